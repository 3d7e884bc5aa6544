"""Quantization in bodies and functions: ``inspect`` counts its layers, ``check`` asks its rules there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import normdeploy

RNG = np.random.default_rng(0)
OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("my", 1)]
HELD: dict[str, Any] = {
    "w": RNG.integers(-127, 128, (8, 8)).astype(np.int8),
    "s": np.full(8, 0.01, np.float32),
    "one": np.float32(0.01),  # for all channels
    "sx": np.float32(0.02),
    "zx": np.uint8(3),
    "yes": np.array(True),
}


def layer(
    x: str, y: str, scale: str = "s", weight: str = "w", step: str = "sx", zero: str = "zx"
) -> list[onnx.NodeProto]:
    node = helper.make_node
    own = {"axis": 1} if scale == "s" else {}
    return [
        node("QuantizeLinear", [x, step, zero], [f"{y}q"]),
        node("DequantizeLinear", [f"{y}q", step, zero], [f"{y}d"]),
        node("DequantizeLinear", [weight, scale], [f"{y}w"], **own),
        node("MatMul", [f"{y}d", f"{y}w"], [y]),
    ]


def model(nodes: list[onnx.NodeProto], functions: list[onnx.FunctionProto] | None = None) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 8]) for n in ("x", "y")]
    held = [numpy_helper.from_array(np.asarray(v), k) for k, v in HELD.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], held)
    proto = helper.make_model(graph, opset_imports=OPSETS, ir_version=10, functions=functions or [])
    onnx.checker.check_model(proto, full_check=not functions)
    return proto


def in_if() -> onnx.ModelProto:
    """A quantized layer whose constants lie outside in one branch, none in the other."""
    out = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 8]) for n in ("t", "e")]
    then = helper.make_graph(layer("r", "t", "one"), "then", [], out[:1])
    other = helper.make_graph([helper.make_node("Neg", ["r"], ["e"])], "else", [], out[1:])
    choice = helper.make_node("If", ["yes"], ["y"], name="gate", then_branch=then, else_branch=other)
    return model([helper.make_node("Relu", ["x"], ["r"]), choice])


def in_function() -> onnx.ModelProto:
    held = {"w": "w", "one": "one", "sx": "sx", "zx": "zx"}
    constants = [
        helper.make_node("Constant", [], [f"c{k}"], value=numpy_helper.from_array(np.asarray(HELD[k]))) for k in held
    ]
    body = [*constants, *layer("a", "b", "cone", "cw", "csx", "czx")]
    function = helper.make_function("my", "F", ["a"], ["b"], body, OPSETS[:1])
    return model([helper.make_node("F", ["x"], ["y"], domain="my")], [function])


PLACES = {"then_branch of If 'gate'": in_if, "function my.F": in_function}


@pytest.mark.parametrize("place", PLACES)
def test_inspect_counts_layers_there(place: str, tmp_path: Path) -> None:
    onnx.save(PLACES[place](), tmp_path / "in.onnx")
    (found,) = normdeploy.inspect(tmp_path / "in.onnx").layers
    assert (found.place, found.status, found.weight, found.granularity) == (place, "quantized", "int8", "tensor")
    assert (found.activation, found.zero_point) == ("uint8", 3)


@pytest.mark.parametrize("place", PLACES)
def test_check_asks_its_rules_there(place: str, tmp_path: Path) -> None:
    onnx.save(PLACES[place](), tmp_path / "in.onnx")
    (file,) = normdeploy.check(tmp_path / "in.onnx", fail_on="all", runtime="tensorrt-rtx").files
    told = {(p.rule, p.place) for p in file.findings}
    assert {("per-tensor", place), ("asymmetric", place)} <= told


def test_a_body_may_dequantize_what_is_quantized_outside(tmp_path: Path) -> None:
    """No tensor that is never dequantized, then."""
    node = helper.make_node
    out = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 8]) for n in ("t", "e")]
    then = helper.make_graph([node("DequantizeLinear", ["q", "sx", "zx"], ["t"])], "then", [], out[:1])
    other = helper.make_graph([node("DequantizeLinear", ["q", "sx", "zx"], ["e"])], "else", [], out[1:])
    nodes = [node("QuantizeLinear", ["x", "sx", "zx"], ["q"])]
    onnx.save(model([*nodes, node("If", ["yes"], ["y"], then_branch=then, else_branch=other)]), tmp_path / "in.onnx")
    (file,) = normdeploy.check(tmp_path / "in.onnx", fail_on="all").files
    assert [p.rule for p in file.findings] == []
