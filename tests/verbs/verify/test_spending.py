"""What a comparison may spend: sizes with huge inner tensors, and models that take long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import normdeploy
from normdeploy.model import Dim, InputSpec
from normdeploy.verbs.verify.cases import Case
from normdeploy.verbs.verify.spending import Budget, InnerSizes, affordable


@pytest.fixture
def wide() -> onnx.ModelProto:
    """A convolution whose result is 64 times as large as its input."""
    rng = np.random.default_rng(0)
    stored = {"w": rng.standard_normal((64, 1, 3)), "v": rng.standard_normal((1, 64, 1)) * 0.1}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Conv", ["r", "v"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, 1, ["n", 1, 1000]) for name in "xy"]
    weights = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_largest_inner_tensor_follows_the_models_dims(wide: onnx.ModelProto) -> None:
    # The model calls the dim "batch", the file "n".
    spec = InputSpec("x", "float32", (Dim("batch", 1, 4, 8), Dim.static(1), Dim.static(1000)))
    name, elements = InnerSizes(wide, {}, [spec]).largest({"batch": 3})
    assert name in ("a", "r")
    assert elements == 3 * 64 * 1000


def test_affordable_keeps_one_case_and_names_the_rest(wide: onnx.ModelProto) -> None:
    spec = InputSpec("x", "float32", (Dim("n", 1, 4, 8), Dim.static(1), Dim.static(1000)))
    cases = [Case(f"n={n}", "random", dict, sizes=(("n", n),)) for n in (1, 2, 8)]
    insides = [InnerSizes(wide, {}, [spec])]
    kept, notes = affordable(cases, {"n": 4}, insides, Budget(memory=128 * 2 * 64_000))
    assert [case.name for case in kept] == ["n=1", "n=2"]
    assert "not run at n=8: the tensor" in notes[0]
    assert [case.name for case in affordable(cases, {"n": 4}, insides, Budget(memory=1))[0]] == ["n=1"]


def test_verify_within_little_memory_says_up_to_which_size(wide: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(wide, tmp_path / "wide.onnx")
    verdict = normdeploy.verify(wide, tmp_path / "wide.onnx", max_memory=128 * 2 * 64_000)
    assert verdict
    assert "verified at sizes whose tensors have up to 128,000 elements" in str(verdict)
    # Random inputs, zeros and extremes are drawn at sizes that fit, so most kinds of inputs are still run.
    assert len(verdict.cases) > 10


def test_verify_within_little_time_says_so(wide: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(wide, tmp_path / "wide.onnx")
    verdict = normdeploy.verify(wide, tmp_path / "wide.onnx", max_seconds=1e-9)
    assert verdict
    assert len(verdict.cases) == 1
    assert "as far as 1e-09 s go" in str(verdict)
