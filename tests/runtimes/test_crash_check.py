"""Files on which onnxruntime takes the process with it, played by a child that ends itself."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import normdeploy
from normdeploy.cli import app
from normdeploy.errors import RuntimeCrash
from normdeploy.runtimes import crash_check

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
# As onnxruntime does at an optimizer, whose name the log has before; with it disabled the file opens.
DIES_AT_ONE = f"""
import sys
for name in ("First", "Fatal"):
    print(f"Applying graph transformer {{name}} on step 1.", file=sys.stderr, flush=True)
if "Fatal" not in sys.argv: {DIES}
"""


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """A file in half precision, which is opened in a child first."""
    weight = numpy_helper.from_array(np.eye(4, dtype=np.float16), "w")
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, ["n", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "h.onnx")
    return tmp_path / "h.onnx"


def test_require_survival_sound_file_passes(half: Path) -> None:
    crash_check.require_no_crash(half)


def test_require_survival_child_that_dies_is_named(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_check, "OPEN", DIES)
    with pytest.raises(
        RuntimeCrash, match=r"onnxruntime crashes \(SIGSEGV\) when it opens h\.onnx with its .* ORT_DISABLE_ALL"
    ):
        crash_check.require_no_crash(half)


def test_require_survival_crash_in_an_optimizer_says_which_to_leave_out(
    half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_check, "OPEN", DIES_AT_ONE)
    with pytest.raises(RuntimeCrash, match=r"disable its optimizer Fatal \(disabled_optimizers=\['Fatal'\]\)"):
        crash_check.require_no_crash(half.read_bytes())


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("verify h.onnx h.onnx", 1),
        ("bisect net.pt2 h.onnx", 1),
        ("bench h.onnx", 1),
        ("run h.onnx -o o.npz", 1),
        # The bundle is configured with the optimizer off, and the file is right so.
        ("package h.onnx -o bundle --max-batch 2", 0),
    ],
)
def test_verb_on_a_file_that_crashes_onnxruntime_gives_the_reason(
    words: str, code: int, half: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(crash_check, "OPEN", DIES)
    # The reason is no cell of a table, which folds into the next one's words.
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(half.parent)
    net = torch.nn.Linear(4, 4, bias=False).half()
    torch.nn.init.eye_(net.weight)
    torch.export.save(torch.export.export(net.eval(), (torch.zeros(2, 4).half(),)), "net.pt2")
    monkeypatch.setattr(sys, "argv", ["normdeploy", *words.split()])
    with pytest.raises(SystemExit) as end:
        app.main()
    told = capsys.readouterr()
    assert (end.value.code or 0) == code
    assert "onnxruntime crashes (SIGSEGV)" in " ".join((told.out + told.err).split())


@pytest.mark.parametrize("words", ["check h.onnx", "inspect h.onnx", "optimize h.onnx -o o.onnx"])
def test_verb_that_runs_no_optimizer_of_onnxruntime_is_not_stopped(
    words: str, half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_check, "OPEN", DIES)
    monkeypatch.chdir(half.parent)
    monkeypatch.setattr(sys, "argv", ["normdeploy", *words.split()])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert not end.value.code


def test_verify_file_that_crashes_onnxruntime_fails_with_the_reason(
    half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_check, "OPEN", DIES)
    verdict = normdeploy.verify(half, half)
    assert not verdict
    assert verdict.outcome == "failed"
    assert "onnxruntime crashes (SIGSEGV)" in str(verdict)
