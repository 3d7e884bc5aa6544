"""The plugin in sessions of pytest: fixture, marker, JUnit properties and report, and the price of a session without
parity tests.

``tests/testing/test_pytest_plugin_environments.py`` installs the plugin by pip. Here it is named by ``-p``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

# The modules stay imported between the inner sessions, each of which would import them again.
import normdeploy.testing.assertions
import normdeploy.testing.session_report  # noqa: F401
from tests.forked import ROOT

pytest_plugins = ["pytester"]

# An ordinary test without torch's exporter: the reference and the file are two models of ONNX.
MODELS = """
import onnx
import pytest

from normdeploy.testing import assert_parity

pytestmark = pytest.mark.normdeploy(max_seconds=5)


def model(factor):
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2,3] x) => (float[2,3] y)'
        f" {{ f = Constant <value = float[1] {{{factor}}}> () y = Mul (x, f) }}"
    )
"""
# A test that makes verdicts and needs no library.
LIGHT = """
import pytest

from normdeploy.testing.verdicts import Verdict, publish_verdict


@pytest.mark.parametrize("number", range(6))
def test_light(number):
    publish_verdict(Verdict(assertion="assert_parity", ok=True, text=f"verdict {number}", error=1e-7, allowed=2e-7))
"""


@pytest.fixture(autouse=True)
def only_our_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed normdeploy names the plugin too, and pytest takes no plugin twice."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


@pytest.fixture
def run(pytester: pytest.Pytester) -> Any:
    """Run pytest on the text of a test file, in this process; its result."""

    def run_text(text: str, *options: str, models: bool = True) -> pytest.RunResult:
        pytester.makepyfile((MODELS if models else "") + textwrap.dedent(text))
        return pytester.runpytest_inprocess(
            "-p", "normdeploy.testing.pytest_plugin", "--strict-markers", "-p", "no:logging", *options
        )

    return run_text


def properties(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Name of a test -> its JUnit properties."""
    return {
        case.attrib["name"]: [(each.attrib["name"], each.attrib["value"]) for each in case.iter("property")]
        for case in ElementTree.parse(path).iter("testcase")
    }


TWO = """
def test_right(normdeploy_parity):
    normdeploy_parity.assert_parity(model(2.5), model(2.5))

def test_wrong(normdeploy_parity):
    normdeploy_parity.assert_parity(model(2.5), model(2.75))

def test_without_the_fixture():
    assert_parity(model(2.5), model(2.5), max_seconds=5)

def test_without_a_verdict():
    pass
"""


def test_failure_names_numbers_and_culprit_in_message_and_section(run: Any) -> None:
    result = run(TWO)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.re_match_lines(
        [
            r"E +AssertionError: NOT verified on \d+ inputs against .* in float64",
            r"E +output 'y' in onnxruntime \(optimizer off\): error .*, allowed .*, at .*",
            r"E +culprit: .*2\.75.*2\.5.*",
            r"-+ Captured normdeploy call -+",
            r"assert_parity FAILED: NOT verified on \d+ inputs",
            r"culprit: .*2\.75.*2\.5.*",
        ]
    )
    # The frames of the assertion are left out of the traceback.
    assert "assertions.py" not in result.stdout.str()


def test_junit_file_has_verdict_error_bound_and_versions(run: Any, tmp_path: Path) -> None:
    run(TWO, f"--junitxml={tmp_path / 'junit.xml'}")
    found = properties(tmp_path / "junit.xml")
    right, wrong = dict(found["test_right"]), dict(found["test_wrong"])
    assert right["normdeploy.verdict"].startswith("assert_parity passed: verified on ")
    assert wrong["normdeploy.verdict"].startswith("assert_parity FAILED: NOT verified on ")
    assert float(right["normdeploy.error"]) <= float(right["normdeploy.allowed"])
    assert float(wrong["normdeploy.error"]) > float(wrong["normdeploy.allowed"])
    assert "onnxruntime" in right["normdeploy.versions"]
    assert "culprit" in "".join(wrong)
    assert found["test_without_the_fixture"]
    assert not found["test_without_a_verdict"]


def test_report_has_every_verdict_of_the_session(run: Any, tmp_path: Path) -> None:
    files = tmp_path / "r.json", tmp_path / "r.html"
    result = run(TWO, *(f"--normdeploy-report={file}" for file in files))
    result.stdout.fnmatch_lines([f"normdeploy: 3 verdicts in {file}" for file in files])
    document = json.loads(files[0].read_text())
    assert not document["ok"]
    assert [(verdict["test"].partition("::")[2], verdict["ok"]) for verdict in document["verdicts"]] == [
        ("test_right", True),
        ("test_without_the_fixture", True),
        ("test_wrong", False),
    ]
    assert document["verdicts"][2]["culprit"] in files[1].read_text().replace("&#39;", "'")


def test_verdict_of_a_fixture_is_counted_once(run: Any, tmp_path: Path) -> None:
    text = """
    @pytest.fixture(scope="module")
    def checked():
        assert_parity(model(2.5), model(2.5), seeds=1)

    def test_first(checked):
        pass

    def test_second(checked):
        pass
    """
    run(text, f"--normdeploy-report={tmp_path / 'r.json'}").assert_outcomes(passed=2)
    (verdict,) = json.loads((tmp_path / "r.json").read_text())["verdicts"]
    assert verdict["test"].endswith("::test_first")


def test_marker_of_the_test_overrides_that_of_the_class_and_the_module(run: Any) -> None:
    text = """
    @pytest.mark.normdeploy(tolerance="1:1", seeds=1)
    class TestClass:
        def test_options_of_the_class(self, normdeploy_parity):
            normdeploy_parity.assert_parity(model(2.5), model(2.75))

        @pytest.mark.normdeploy(tolerance="1e-6:0", culprit=False)
        def test_options_of_the_test(self, normdeploy_parity):
            normdeploy_parity.assert_parity(model(2.5), model(2.75))

        def test_argument_of_the_call(self, normdeploy_parity):
            normdeploy_parity.assert_parity(model(2.5), model(2.75), tolerance="1e-6:0", culprit=False)
    """
    result = run(text)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["E*tolerance 1e-06:0: error *", "FAILED *test_options_of_the_test*"])


@pytest.mark.parametrize(
    ("marker", "reason"),
    [("seedz=1", "unknown option 'seedz'; choose from *seeds*"), ("1e-4", "takes options by name only, but got *")],
)
def test_wrong_marker_is_told_once_and_in_one_line(run: Any, marker: str, reason: str) -> None:
    result = run(f"@pytest.mark.normdeploy({marker})\ndef test_it(normdeploy_parity): pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"@pytest.mark.normdeploy*{reason}"])
    assert "During handling" not in result.stdout.str()


@pytest.mark.parametrize(("name", "reason"), [("r.txt", "ends in neither .json nor .html"), ("no/r.json", "folder")])
def test_report_that_can_not_be_written_stops_the_session_at_its_start(
    run: Any, tmp_path: Path, name: str, reason: str
) -> None:
    result = run(LIGHT, f"--normdeploy-report={tmp_path / name}", models=False)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --normdeploy-report: *{reason}*"])


def test_report_whose_folder_disappears_fails_the_session(run: Any, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    text = f"def test_it():\n    import os\n    os.rmdir({str(tmp_path / 'folder')!r})\n"
    result = run(text, f"--normdeploy-report={tmp_path / 'folder' / 'r.json'}", models=False)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["normdeploy: no report was written: *does not exist*"])


def test_verdicts_of_the_workers_of_xdist_come_together(pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytester.makepyfile(LIGHT)
    plugins = ("-p", "normdeploy.testing.pytest_plugin", "-p", "xdist.plugin")
    files = (f"--normdeploy-report={tmp_path / 'r.json'}", f"--junitxml={tmp_path / 'junit.xml'}")
    result = pytester.runpytest_subprocess(*plugins, "-n2", *files)
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines([f"normdeploy: 6 verdicts in {tmp_path / 'r.json'}"])
    verdicts = json.loads((tmp_path / "r.json").read_text())["verdicts"]
    assert [verdict["text"] for verdict in verdicts] == [f"verdict {number}" for number in range(6)]
    assert dict(properties(tmp_path / "junit.xml")["test_light[3]"])["normdeploy.error"] == "1e-07"


def test_plugin_imports_no_heavy_library() -> None:
    code = "import sys, pytest; import normdeploy.testing.pytest_plugin; print(*sys.modules)"
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    modules = told.stdout.split()
    loaded = {name.partition(".")[0] for name in modules}
    assert not loaded & {"torch", "onnx", "onnx_ir", "numpy", "onnxruntime", "rich", "jinja2", "typer"}
    ours = {name for name in modules if name.startswith("normdeploy.")}
    assert ours == {
        *("normdeploy.errors", "normdeploy.reports", "normdeploy.reports.page_templates", "normdeploy.testing"),
        *("normdeploy.testing.pytest_plugin", "normdeploy.testing.verdicts", "normdeploy.version"),
    }
