"""The process that has the libraries in memory, and what becomes of the calls when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from normdeploy.fleet.fork_client import CallEnd, ForkClient, ProcessVanished


@pytest.fixture
def warm() -> Iterator[ForkClient]:
    made = ForkClient("tests.fleet.toy", ())
    yield made
    made.close()


def call(warm: ForkClient, folder: Path, text: str, *argv: str, **limits: float) -> CallEnd:
    (folder / "out").mkdir(parents=True, exist_ok=True)
    (folder / "m.pt2").write_text(text)
    return warm.run(argv or ("export", "m.pt2", "-o", "out/model.onnx"), folder, folder / "log", **limits)  # type: ignore[arg-type]


def test_a_call_runs_in_its_folder_and_logs_there(warm: ForkClient, tmp_path: Path) -> None:
    end = call(warm, tmp_path, "one")
    assert (end.code, end.why) == (0, "")
    assert end.peak > 1 << 20
    assert (tmp_path / "out" / "model.onnx").is_file()
    assert (tmp_path / "log").read_text() == "toy export m.pt2 -o out/model.onnx\n"
    assert os.getcwd() != str(tmp_path)


def test_calls_run_side_by_side(warm: ForkClient, tmp_path: Path) -> None:
    call(warm, tmp_path / "first", "one")
    start = time.monotonic()
    threads = [threading.Thread(target=call, args=(warm, tmp_path / str(n), "slow")) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < 8 * 0.2 + 1.0
    assert all((tmp_path / str(n) / "out" / "report.json").is_file() for n in range(8))


def test_a_crash_ends_one_call(warm: ForkClient, tmp_path: Path) -> None:
    assert call(warm, tmp_path / "a", "crashes").code == -signal.SIGSEGV
    assert call(warm, tmp_path / "b", "one").code == 0


def test_a_limit_ends_a_call(warm: ForkClient, tmp_path: Path) -> None:
    end = call(warm, tmp_path, "endless", seconds=0.3)
    assert (end.code, end.why) == (-signal.SIGKILL, "seconds")


def test_a_call_that_is_killed_from_outside_may_be_tried_again(warm: ForkClient, tmp_path: Path) -> None:
    call(warm, tmp_path / "a", "one")
    killer = threading.Timer(
        0.5, lambda: _kill_children_of(_children_of(os.getpid(), "normdeploy.fleet.fork_server")[0])
    )
    killer.start()
    with pytest.raises(ProcessVanished, match="signal 9"):
        call(warm, tmp_path / "b", "endless")


def test_where_the_process_dies_its_calls_are_lost_and_another_is_started(warm: ForkClient, tmp_path: Path) -> None:
    call(warm, tmp_path / "a", "one")
    pid = _children_of(os.getpid(), "normdeploy.fleet.fork_server")[0]
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(ProcessVanished, match="died"):
        call(warm, tmp_path / "b", "endless")
    assert call(warm, tmp_path / "c", "one").code == 0
    assert not [p for p in _children_of(1, "normdeploy.fleet.fork_server") if p == pid]


def test_nothing_outlives_whoever_started_it(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from normdeploy.fleet.fork_client import ForkClient; f = pathlib.Path(sys.argv[1]);"
        "ForkClient('tests.fleet.toy', ()).run(('export', 'm.pt2'), f, f / 'log')"
    )
    (tmp_path / "m.pt2").write_text("endless")
    driver = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text():
        assert driver.poll() is None
        time.sleep(0.05)
    warm = _children_of(driver.pid, "normdeploy.fleet.fork_server")[0]
    calls = _children_of(warm, "")
    assert calls
    driver.kill()
    driver.wait()
    for _ in range(100):
        left = [pid for pid in (warm, *calls) if Path(f"/proc/{pid}").exists() and not _is_zombie(pid)]
        if not left:
            break
        time.sleep(0.05)
    assert not left


def _children_of(parent: int, said: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if int(stat[1]) == parent and said in words:
                found.append(int(entry.name))
    return found


def _kill_children_of(pid: int) -> None:
    for child in _children_of(pid, ""):
        os.kill(child, signal.SIGKILL)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
