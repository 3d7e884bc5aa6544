"""Our runs leave nothing in the user's folders, and onnxruntime's telemetry is off in our own runs
(docs/reference/privacy.md)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from normdeploy.runtimes.openvino_runner import explain_missing_openvino
from normdeploy.verbs.bisect.reproduction_script import write_script
from tests.forked import ROOT
from tests.support import LAYER_NORM, parsed

FOLDERS = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "ORT_DISABLE_TELEMETRY")


def python(home: Path, *arguments: str | Path, **variables: str) -> str:
    """What Python prints, run in an empty home with none of the caller's own settings of it."""
    kept = {name: value for name, value in os.environ.items() if name not in FOLDERS}
    environment = kept | {"HOME": str(home), "PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=home.parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def left_in(home: Path) -> set[str]:
    """Every file in a home."""
    return {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def test_onnxruntime_alone_leaves_something(home: Path) -> None:
    """The other tests would pass for nothing if this one did not: this is what they look for."""
    python(home, "-c", "import onnxruntime")
    if not left_in(home):
        pytest.skip("this build of onnxruntime holds no telemetry")
    assert any("deviceid" in name for name in left_in(home)), left_in(home)


def test_a_run_of_ours_leaves_nothing(home: Path) -> None:
    """The passes open many sessions, the census asks every runtime, each in a process of its own."""
    onnx.save(parsed(LAYER_NORM), home.parent / "norm.onnx")
    script = (
        "import normdeploy; print(normdeploy.optimize('norm.onnx', 'out.onnx').summary.findings[0].status);"
        " normdeploy.inspect('out.onnx')"
    )
    assert python(home, "-c", script).strip() == "fused"
    assert left_in(home) == set()


def test_every_process_of_ours_is_one_of_the_package(home: Path) -> None:
    """A child gets the variable, or sets it itself: its module lies in the package."""
    script = (
        "from normdeploy.ort_sessions import child_process; import subprocess, sys; "
        "subprocess.run([sys.executable, '-c', 'import"
        " onnxruntime'], env="
    )
    python(home, "-c", script + "child_process.child_environment(), check=True)")
    assert left_in(home) == set()


def test_what_the_user_has_set_stays(home: Path) -> None:
    script = "import os, normdeploy; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    assert python(home, "-c", script, ORT_DISABLE_TELEMETRY="0").strip() == "0"
    assert python(home, "-c", script).strip() == "1"


def test_the_script_of_a_reproduction_switches_it_off_first() -> None:
    script = write_script("cpu", "a fault")
    assert 0 < script.index("ORT_DISABLE_TELEMETRY") < script.index("import onnxruntime")
    script = write_script("openvino", "a fault")
    assert 0 < script.index('sys.modules["openvino_telemetry"] = None') < script.index("import openvino")


@pytest.mark.skipif(explain_missing_openvino() is not None, reason="OpenVINO is not installed")
def test_openvino_alone_leaves_something_and_our_import_of_it_nothing(home: Path) -> None:
    """The plain import writes its identifier, unless the machine counts as a CI job."""
    neither = {"CI": "", "TF_BUILD": "", "JENKINS_URL": ""}
    python(home, "-c", "import openvino", **neither)
    if not left_in(home):
        pytest.skip("this build of OpenVINO sends nothing at its import")
    for path in sorted(home.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    ours = (
        "from normdeploy.runtimes.openvino_runner import import_openvino; import_openvino().Core();"
        " import openvino_telemetry; print(openvino_telemetry.Telemetry.__name__)"
    )
    assert python(home, "-c", ours, **neither).strip() == "Telemetry"
    assert left_in(home) == set()
