"""Files on which onnxruntime takes the process with it, played by a child that ends itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import normdeploy
from normdeploy.errors import RuntimeCrash
from normdeploy.runtimes import survival

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """A file in half precision, which is opened in a child first."""
    weight = numpy_helper.from_array(np.eye(4, dtype=np.float16), "w")
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, ["n", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "h.onnx")
    return tmp_path / "h.onnx"


def test_require_survival_sound_file_passes(half: Path) -> None:
    survival.require_survival(half)


def test_require_survival_child_that_dies_is_named(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survival, "_OPEN", DIES)
    with pytest.raises(RuntimeCrash, match=r"onnxruntime crashes \(SIGSEGV\) when it opens the file"):
        survival.require_survival(half)


def test_verify_file_that_crashes_onnxruntime_fails_with_the_reason(
    half: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survival, "_OPEN", DIES)
    verdict = normdeploy.verify(half, half)
    assert not verdict
    assert verdict.outcome == "failed"
    assert "onnxruntime crashes (SIGSEGV)" in str(verdict)
