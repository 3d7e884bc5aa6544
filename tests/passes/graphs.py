"""Small models for the passes: one with norms, one without."""

from __future__ import annotations

import numpy as np
import onnx

from tests.support import parsed

_NORMS = """net (float[batch, 16] x) => (float[batch, 16] y) {
    hidden = MatMul(x, first)
    axes = Constant<value = int64[1] {-1}>()  e = Constant<value = float {1e-5}>()
    m = ReduceMean<keepdims = 1>(hidden, axes)  d = Sub(hidden, m)  s = Mul(d, d)
    v = ReduceMean<keepdims = 1>(s, axes)
    w = Add(v, e)  r = Sqrt(w)  n = Div(d, r)  scaled = Mul(n, gamma)  normed = Add(scaled, beta)
    out = MatMul(normed, second)
    y = own.Twice(out)
}
<domain: "own", opset_import: ["": 21]> Twice (x) => (y) { y = Add(x, x) }"""
_PLAIN = """net (float[batch, 16] x) => (float[batch, 16] y) {
    hidden = MatMul(x, first)
    half = Constant<value = float {0.5}>()
    less = Mul(hidden, half)
    out = MatMul(less, second)
    y = own.Twice(out)
}
<domain: "own", opset_import: ["": 21]> Twice (x) => (y) { y = Add(x, x) }"""


def _model(text: str, *names: str) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    shapes = {"first": (16, 16), "second": (16, 16), "gamma": (16,), "beta": (16,)}
    proto = parsed(text, **{name: rng.standard_normal(shapes[name]).astype(np.float32) for name in names})
    proto.opset_import.add(domain="own", version=1)
    proto.metadata_props.add(key="team", value="vision")
    proto.graph.metadata_props.add(key="part", value="encoder")
    for node in proto.graph.node:
        node.metadata_props.add(key="of", value=node.output[0])
    return proto


def model_with_norm() -> onnx.ModelProto:
    """A layer norm in nine nodes between two linear layers, and a function of the file's own."""
    return _model(_NORMS, "first", "second", "gamma", "beta")


def model_without_norm() -> onnx.ModelProto:
    """The same linear layers and function without the norm."""
    return _model(_PLAIN, "first", "second")


def sample() -> dict[str, np.ndarray]:
    """Three rows, one of them constant."""
    rows = np.random.default_rng(1).standard_normal((3, 16)).astype(np.float32)
    rows[1] = 0
    return {"x": rows}


def ops(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]
