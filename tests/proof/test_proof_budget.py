"""A proof ends: axes of one name are told apart, and what is too large is refused by a count, not by a clock."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import normdeploy
from normdeploy.graphs.dims import dim_size
from normdeploy.graphs.symbolic_sizes import Size


def root_mean_square(dims: list[str | int], gamma: bool = False, axis: int = -1) -> onnx.ModelProto:
    """An RMS norm by hand over one axis."""
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["q"]),
        helper.make_node("ReduceMean", ["q"], ["m"], axes=[axis], keepdims=1),
        helper.make_node("Add", ["m", "e"], ["v"]),
        helper.make_node("Sqrt", ["v"], ["s"]),
        helper.make_node("Div", ["x", "s"], ["z"]),
        helper.make_node("Mul", ["z", "g"], ["y"]) if gamma else helper.make_node("Identity", ["z"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("x", 1, dims)]
    if gamma:
        inputs.append(helper.make_tensor_value_info("g", 1, [dims[-1]]))
    graph = helper.make_graph(
        nodes,
        "g",
        inputs,
        [helper.make_tensor_value_info("y", 1, dims)],
        [numpy_helper.from_array(np.float32(1e-5), "e")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("dims", "gamma", "axis"),
    [
        (["B", "S", "S", "S"], False, -1),
        (["B", "S", "S", "S"], True, -1),
        (["S"] * 5, False, 1),
        ([7] * 5, False, -1),
    ],
)
def test_many_axes_of_one_size_are_proved(dims: list[str | int], gamma: bool, axis: int) -> None:
    (finding,) = normdeploy.optimize(root_mean_square(dims, gamma, axis)).summary.findings
    assert finding.status == "fused", finding.reason


def test_a_tensor_of_twelve_open_axes_is_too_large_and_says_so() -> None:
    (finding,) = normdeploy.optimize(root_mean_square(list("abcdefghijkl"))).summary.findings
    assert finding.status == "refused"
    assert "too large" in finding.reason
    assert "20,000,000,000" in finding.reason


def test_a_polynomial_of_too_many_terms_is_refused() -> None:
    total = sum((Size.symbol(f"s{i}") for i in range(70)), Size.from_int(1))
    with pytest.raises(OverflowError, match="too large: a size would have 5,041 terms"):
        total * total
    # As the name of a dim it is a symbol of its own.
    assert len(dim_size(" * ".join(["(a + b + c + d)"] * 30), "x").terms) == 1


def test_a_size_of_positive_terms_is_positive_without_being_multiplied_out() -> None:
    assert (Size({tuple(f"s{i}" for i in range(40)): 1, (): 1})).is_positive
    assert not (Size({tuple(f"s{i}" for i in range(40)): 1, (): -1})).is_positive
