"""Ctrl-C and SIGTERM end a run that is deep inside a library, and leave nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forked import ROOT

SCRIPT = """
import hashlib, sys
from pathlib import Path
from normdeploy.cli import signals
from normdeploy.storage.file_replacement import replace_atomically
from normdeploy.storage.folder_replacement import replace_folder_atomically
signals.GRACE = 0.1
signals.watch_signals()
try:
    with replace_atomically("out") as file, replace_folder_atomically(Path("bundle").absolute()) as folder:
        (folder / "half").touch()
        file.touch()
        print("ready", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # half an hour without a look at signals
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there Ctrl-C is heard when the library returns")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_inside_a_library_ends(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "out").write_bytes(b"old")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait(timeout=30) == 128 + number
    finally:
        process.kill()
        process.communicate()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_bytes() == b"old"


AT_THE_END = """
import sys, threading, time
from normdeploy.cli import signals
signals.watch_signals()
thread = threading.Thread(target=time.sleep, args=(60,))
thread.start()
if sys.argv[1:]:
    signals.restore_default_sigint()
print("ready", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there Ctrl-C is heard when the library returns")
@pytest.mark.parametrize("told", [True, False])
def test_ctrl_c_while_python_ends_prints_no_traceback(told: bool) -> None:
    """Without being told, Python prints one while it waits for threads."""
    process = subprocess.Popen(
        [sys.executable, "-c", AT_THE_END, *(["ended"] if told else [])],
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert ("KeyboardInterrupt" in said) is not told
    assert process.returncode == (-signal.SIGINT if told else 0)
