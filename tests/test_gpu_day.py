"""The GPU day, with parts that need no GPU: how each may end, what is kept, what the page says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks.gpu_day import __main__ as day
from benchmarks.gpu_day.parts import PARTS, Part

ROWS = [{"name": "net: verify", "status": "passed", "seconds": 1.5, "detail": "error 1e-6"}]
WRITES = f"import sys, json; open(sys.argv[1], 'w').write(json.dumps({ROWS!r}))"


def part(name: str, code: str, **more: object) -> Part:
    return Part(name, f"that {name} works", ("-c", code, "{results}"), 20, **more)  # type: ignore[arg-type]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one."""
    monkeypatch.setattr(day, "explain_missing_gpu", lambda: "")


def told(folder: Path) -> dict[str, tuple[str, str]]:
    return {o["part"]: (o["status"], o["detail"]) for o in json.loads((folder / "gpu_day.json").read_text())}


def test_each_end_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    parts = (
        part("good", WRITES),
        part("wrong", "print('first'); print('x differs'); raise SystemExit(1)"),
        part("lacking", "print('tensorrt is not installed'); raise SystemExit(3)"),
        part("unknown", "", program=("no-such-program",)),
    )
    monkeypatch.setattr(day, "PARTS", parts)
    assert day.main(["--out", str(tmp_path)]) == 1
    assert told(tmp_path) == {
        "good": ("passed", "1 passed"),
        "wrong": ("failed", "x differs; see gpu_day.wrong.log"),
        "lacking": ("not run", "tensorrt is not installed"),
        "unknown": ("not run", "no-such-program is not installed"),
    }
    page = (tmp_path / "gpu_day.md").read_text()
    assert "| good | that good works | passed |" in page
    assert "| net: verify | passed | 1.5 | error 1e-6 |" in page
    assert (tmp_path / "gpu_day.wrong.log").read_text() == "first\nx differs\n"
    assert not [*tmp_path.glob("*.results")]


def test_a_part_that_does_not_end_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: None
) -> None:
    alive = tmp_path / "alive"
    child = f"import time; time.sleep(4); open({str(alive)!r}, 'w')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    monkeypatch.setattr(day, "PARTS", (Part("slow", "", ("-c", code), 1),))
    assert day.main(["--out", str(tmp_path)]) == 1
    assert told(tmp_path) == {"slow": ("failed", "not done after 1 s; see gpu_day.slow.log")}
    time.sleep(4)
    assert not alive.exists()


def test_what_passed_is_kept_on_the_same_code_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: None
) -> None:
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('x')"
    monkeypatch.setattr(day, "PARTS", (part("good", code), part("bad", f"{code}; raise SystemExit(1)")))
    runs = []
    for key, options in (("a", []), ("a", []), ("a", ["--again"]), ("a", ["good"]), ("b", ["good"])):
        monkeypatch.setattr(day, "key_of", lambda _, key=key: key)
        code = day.main([*options, "--out", str(tmp_path)])
        assert code == (0 if "good" in options else 1)
        runs.append(len(count.read_text()))
    assert runs == [2, 3, 5, 5, 6]
    assert "| bad | that bad works | not run | | not asked for |" in (tmp_path / "gpu_day.md").read_text()


def test_nothing_passes_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(day, "explain_missing_gpu", lambda: "no GPU: this machine has no NVIDIA driver")
    monkeypatch.setattr(
        day, "PARTS", (part("good", "import sys; sys.exit('--dry' not in sys.argv)", alone=("--dry",)),)
    )
    assert day.main(["--out", str(tmp_path)]) == 1
    assert told(tmp_path) == {"good": ("not run", "no GPU: what needs none went well")}


TESTS = """
import pytest
def test_right(): pass
@pytest.mark.skip(reason="needs an H100")
def test_left_out(): pass
"""


@pytest.mark.parametrize(
    ("source", "status", "detail"),
    [
        (TESTS, "passed", "1 passed, 1 not run"),
        (f"{TESTS}\ndef test_wrong(): assert 1 == 2", "failed", "test_wrong: assert 1 == 2; see gpu_day.kernels.log"),
        ("import pytest; pytest.skip('no GPU here', allow_module_level=True)", "not run", "no GPU here"),
        ("def test(:", "failed", "test_it: collection failure; see gpu_day.kernels.log"),
    ],
)
def test_tests_are_counted_by_what_they_report(
    source: str, status: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: None
) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(source)
    command = ("-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", str(file))
    monkeypatch.setattr(day, "PARTS", (Part("kernels", "", command, 60, tests=True),))
    assert day.main(["--out", str(tmp_path)]) == (0 if status == "passed" else 1)
    assert told(tmp_path) == {"kernels": (status, detail)}


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        day.main(["kernel"])
    assert error.value.code == 2
    assert "there is no part 'kernel'; there are kernels, memory," in capsys.readouterr().err


def test_the_day_ends_within_25_minutes() -> None:
    assert sum(part.seconds for part in PARTS) <= 25 * 60


def test_a_part_has_variables_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    code = "import os; print(os.environ['ITS_OWN']); raise SystemExit(1)"
    monkeypatch.setattr(day, "PARTS", (part("own", code, environment={"ITS_OWN": "and its value"}),))
    day.main(["--out", str(tmp_path)])
    assert told(tmp_path)["own"] == ("failed", "and its value; see gpu_day.own.log")
