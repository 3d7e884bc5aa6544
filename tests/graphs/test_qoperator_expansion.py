"""Ops that quantize inside are what their pairs and plain ops say: onnxruntime's kernels differ by a code at ties."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from normdeploy.graphs.qoperator_expansion import can_expand, expand_qoperators, unexpandable_ops
from normdeploy.runtimes.ort_runner import OrtRunner
from normdeploy.runtimes.quantized_float64 import QuantizedRunner
from normdeploy.runtimes.rounding_draws import RoundingDraw

X = ("x", "xs", "xz")
Y = ("ys", "yz")


def model(op: str, inputs: list[str], shape: list[int], *, floating: bool = False, **attrs: Any) -> onnx.ModelProto:
    """One node that reads uint8 codes "x" and constants with scales and zero points."""
    rng = np.random.default_rng(0)
    values: dict[str, np.ndarray] = {
        "xs": np.float32(0.02),
        "xz": np.uint8(120),
        "ys": np.float32(0.05),
        "yz": np.uint8(100),
        "ps": np.float32(1 / 255),
        "pz": np.uint8(0),
        "k": rng.integers(-60, 60, (5, 3, 2, 2)).astype(np.int8),
        "ks": rng.uniform(0.01, 0.02, 5).astype(np.float32),
        "kz": np.zeros(5, np.int8),
        "kb": rng.integers(-500, 500, 5).astype(np.int32),
        "w": rng.integers(-60, 60, (6, 4)).astype(np.int8),
        "ws": rng.uniform(0.01, 0.02, 4).astype(np.float32),
        "wz": np.zeros(4, np.int8),
        "wt": rng.integers(-60, 60, (4, 6)).astype(np.int8),
        "wb": rng.integers(-500, 500, 4).astype(np.int32),
        "c": np.array([True, False] * 3),
        "fb": rng.standard_normal(4).astype(np.float32),
        "one_s": np.float32(0.01),
        "one_z": np.int8(0),
    }
    domain = "" if op in ("QLinearConv", "QLinearMatMul") else "com.microsoft"
    node = helper.make_node(op, inputs, ["y"], "n", domain=domain, **attrs)
    kind = TensorProto.FLOAT if floating else TensorProto.UINT8
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, shape)],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(np.asarray(values[name]), name) for name in dict.fromkeys(inputs) if name in values],
    )
    imports = [helper.make_opsetid("", 13), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


IMAGE, ROWS = [2, 3, 6, 6], [2, 5, 6]
CASES: dict[str, onnx.ModelProto] = {
    "conv": model("QLinearConv", [*X, "k", "ks", "kz", *Y, "kb"], IMAGE, pads=[1, 1, 1, 1], strides=[2, 1]),
    "conv without bias": model("QLinearConv", [*X, "k", "ks", "kz", *Y], IMAGE),
    "matmul": model("QLinearMatMul", [*X, "w", "ws", "wz", *Y], ROWS),
    "gemm": model("QGemm", [*X, "wt", "ws", "wz", "wb", *Y], [5, 6], transB=1),
    "gemm by a factor": model("QGemm", [*X, "w", "ws", "wz", "", *Y], [5, 6], alpha=0.5),
    "gemm to float": model("QGemm", [*X, "w", "ws", "wz", "wb"], [5, 6], floating=True),
    "add": model("QLinearAdd", [*X, *X, *Y], ROWS),
    "mul": model("QLinearMul", [*X, *X, *Y], ROWS),
    "concat": model("QLinearConcat", [*Y, *X, "x", "ps", "pz"], ROWS, axis=1),
    "where": model("QLinearWhere", ["c", *X, "x", "ps", "pz", *Y], ROWS),
    "sigmoid": model("QLinearSigmoid", [*X, "ps", "pz"], ROWS),
    "leaky": model("QLinearLeakyRelu", [*X, *Y], ROWS, alpha=0.2),
    "softmax": model("QLinearSoftmax", [*X, "ps", "pz"], ROWS, axis=1, opset=13),
    "average": model("QLinearAveragePool", [*X, *Y], IMAGE, kernel_shape=[3, 3]),
    "mean": model("QLinearGlobalAveragePool", [*X, *Y], IMAGE),
    "product": model("MatMulIntegerToFloat", ["x", "w", "xs", "ws", "xz", "wz", "fb"], ROWS, floating=True),
}


@pytest.mark.parametrize("name", CASES)
def test_opened_node_gives_what_onnxruntime_gives(name: str) -> None:
    proto = CASES[name]
    shape = [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]
    # Few codes and few terms: a kernel that adds pairs in 16 bits does not saturate.
    feeds = {"x": np.random.default_rng(1).integers(60, 190, shape).astype(np.uint8)}
    with OrtRunner(proto, optimize=False) as runner:
        ran = runner.infer(feeds)["y"]
    got = QuantizedRunner(proto).infer(feeds)["y"]
    assert got.shape == ran.shape
    assert ran.std() > 0
    if ran.dtype == np.float32:
        assert np.abs(got - ran).max() < 1e-4
    else:
        assert np.abs(got.astype(int) - ran.astype(int)).max() <= 1
        # The kernel of QLinearSoftmax rounds in fixed point, a code lower in a quarter of the elements.
        assert np.mean(got != ran) < (0.5 if name == "softmax" else 0.1)
    assert not unexpandable_ops(proto)
    assert all(node.name == "n" for node in expand_qoperators(proto).graph.node)


def test_drawn_rounding_moves_the_result_by_its_steps() -> None:
    proto = CASES["conv"]
    feeds = {"x": np.random.default_rng(1).integers(60, 190, IMAGE).astype(np.uint8)}
    runner = QuantizedRunner(proto)
    exact, drawn = (runner.run_with_draw(feeds, RoundingDraw("exact", seed))["y"].astype(float) for seed in (None, 0))
    assert 0 < np.abs(exact - drawn).max() < 20


def test_node_without_a_plain_form_stays_sealed() -> None:
    last = model("QLinearGlobalAveragePool", [*X, *Y], IMAGE, channels_last=1)
    older = model("QLinearSoftmax", [*X, "ps", "pz"], ROWS, axis=1, opset=12)
    untyped = model("QLinearAdd", [*X, *X, "ys"], ROWS)
    foreign = model("QLinearAdd", [*X, *X, *Y], ROWS)
    foreign.graph.node[0].domain = "acme"
    for proto in (last, older, untyped, foreign):
        assert unexpandable_ops(proto) == (proto.graph.node[0].op_type,)
        assert expand_qoperators(proto) is proto
    assert not can_expand(helper.make_node("QAttention", ["x"], ["y"], domain="com.microsoft"), 13)


def test_node_in_a_body_stays_sealed() -> None:
    inner = model("QLinearAdd", [*X, *X, *Y], ROWS)
    body = helper.make_graph(inner.graph.node, "then", [], [helper.make_tensor_value_info("y", 2, None)])
    choice = helper.make_node("If", ["b"], ["z"], then_branch=body, else_branch=body)
    outer = onnx.ModelProto()
    outer.CopyFrom(inner)
    del outer.graph.node[:]
    outer.graph.node.append(choice)
    assert unexpandable_ops(outer) == ("QLinearAdd",)
