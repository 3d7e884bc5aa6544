"""A library that crashes ends the command line with a message, and signals reach the process that works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from tests.forked import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the command line is one process")

# The command line with this in place of the verbs.
WORKS = "import os, signal, sys, time; from normdeploy.cli import app; app.app = lambda: {work}; app.main()"


def started(work: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKS.format(work=work)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def gru_of_nothing() -> onnx.ModelProto:
    """Return a model in which a Slice that starts behind the end of its data makes what a GRU reads."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (float[3, 2, 4] x) => (float[s, d, b, h] y)
        <int64[1] end = {900}, int64[1] axis = {1}, float[1, 4] peak = {0, 0, 0, 1}>
        { [first] r = Relu (x) start = ArgMax <axis = 1, keepdims = 0> (peak) [nothing] z = Slice (r, start, end, axis)
          [recurrent] g = GRU <hidden_size = 3> (z, w, v) [last] y = Relu (g) }"""
    )
    for name, shape in (("w", (1, 9, 4)), ("v", (1, 9, 3))):
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    return model


def test_run_node_that_nothing_foresaw_is_named(tmp_path: Path) -> None:
    onnx.save(gru_of_nothing(), tmp_path / "net.onnx")
    done = subprocess.run(
        [sys.executable, "-c", "from normdeploy.cli.app import main; main()", "run", "net.onnx", "-o", "y.npz"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "onnxruntime crashes here (SIGABRT): GRU 'recurrent' (output 'g'); change the node" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["net.onnx"]


def test_main_crash_of_a_library_is_repeated_and_refused(tmp_path: Path) -> None:
    work = "(print(os.environ.get('NORMDEPLOY_REHEARSE_ALL'), flush=True), os.kill(os.getpid(), signal.SIGSEGV))"
    process = started(work, tmp_path)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out.split() == ["None", "1"]
    assert error.startswith("error: a library crashed (SIGSEGV) in <lambda> of <string>; nothing was written.")
    assert error.count("\n") == 1


def test_main_killed_for_memory_is_refused_once(tmp_path: Path) -> None:
    process = started("(print('tried', flush=True), os.kill(os.getpid(), signal.SIGKILL))", tmp_path)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "tried\n")
    assert error.startswith("error: the system killed the run (SIGKILL), most likely because memory ran out")


@pytest.mark.parametrize("code", [0, 1, 3])
def test_main_exit_code_is_that_of_the_verb(code: int, tmp_path: Path) -> None:
    process = started(f"sys.exit({code})", tmp_path)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_main_signal_ends_the_process_that_works(number: signal.Signals, tmp_path: Path) -> None:
    # `normdeploy.cli.signals` ends it two seconds after a signal.
    process = started("(print(os.getpid(), flush=True), [time.sleep(0.05) for _ in range(2400)])", tmp_path)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    assert worker != process.pid
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == -number if number == signal.SIGKILL else process.returncode in (1, 130, 143, -number)
    for _ in range(100):
        if not Path(f"/proc/{worker}").exists():
            return
        time.sleep(0.05)
    pytest.fail("the worker still runs")
