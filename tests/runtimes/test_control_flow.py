"""If, Loop and Scan in float64: bodies are evaluated as the rest of a file is."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from normdeploy.runtimes.onnx_float64 import OnnxFloat64Runner
from tests.support import run_onnxruntime

GROWS = """
    <ir_version: 10, opset_import: ["": 21]> g (float[2,4] x, bool c) => (float[2,4] y) {
        y = If <then_branch = t () => (float[2,4] r) { a = Mul(x, w) b = Exp(a) r = Sqrt(b) },
                else_branch = e () => (float[2,4] r) { r = Tanh(x) }> (c)
    }"""
LOOPS = """
    <ir_version: 10, opset_import: ["": 21]> g (float[2,4] x, int64 n) => (float[2,4] y, float[k,2,4] every) {
        y, every = Loop <body = b (int64 i, bool goes, float[2,4] v) => (bool on, float[2,4] u, float[2,4] s)
            { on = Identity(goes) f = Cast <to = 1> (i) p = Mul(v, w) u = Add(p, f) s = Tanh(u) }> (n, "", x)
    }"""
SCANS = """
    <ir_version: 10, opset_import: ["": 21]> g (float[2,4] x, float[5,2,4] z) => (float[2,4] y, float[2,5,4] every) {
        y, every = Scan <num_scan_inputs = 1, scan_input_directions = [1], scan_output_axes = [1],
            body = b (float[2,4] v, float[2,4] e) => (float[2,4] u, float[2,4] s)
            { p = Mul(v, w) u = Add(p, e) s = Tanh(u) }> (x, z)
    }"""
NESTED = """
    <ir_version: 10, opset_import: ["": 21]> g (float[2,4] x, bool c) => (float[2,4] y) {
        y = If <then_branch = t () => (float[2,4] r) {
                    a = Mul(x, w)
                    r = If <then_branch = t2 () => (float[2,4] q) {
                                own = Exp(a)
                                q = If <then_branch = t3 () => (float[2,4] p) { p = Sqrt(own) },
                                        else_branch = e3 () => (float[2,4] p) { p = Tanh(own) }> (c) },
                            else_branch = e2 () => (float[2,4] q) { q = Tanh(a) }> (c) },
                else_branch = e () => (float[2,4] r) { r = Tanh(x) }> (c)
    }"""
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 4)).astype(np.float32)
CASES = {
    "If, then": (GROWS, {"x": X, "c": np.array(True)}),
    "If, else": (GROWS, {"x": X, "c": np.array(False)}),
    "If in an If in an If": (NESTED, {"x": X, "c": np.array(True)}),
    "Loop": (LOOPS, {"x": X, "n": np.array(3)}),
    "Scan": (SCANS, {"x": X, "z": RNG.standard_normal((5, 2, 4)).astype(np.float32)}),
}


def file(text: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.array([[0.7, 1.3, -0.4, 0.9]] * 2, np.float32), "w"))
    return proto


@pytest.mark.parametrize("name", CASES)
def test_a_body_is_evaluated_in_float64(name: str) -> None:
    text, feeds = CASES[name]
    proto = file(text)
    found = OnnxFloat64Runner(proto).infer(feeds)
    for output, expected in zip(proto.graph.output, run_onnxruntime(proto, feeds), strict=True):
        value = found[output.name]
        assert value.dtype == np.float64
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
        assert (value != value.astype(np.float32)).any(), "these are float32 numbers"


@pytest.mark.parametrize("name", CASES)
def test_roundings_are_drawn_inside_a_body(name: str) -> None:
    text, feeds = CASES[name]
    runner = OnnxFloat64Runner(file(text))
    plain, one, other = runner.infer(feeds), runner.run_rounded(feeds, 0), runner.run_rounded(feeds, 1)
    for output, value in plain.items():
        assert (one[output] != other[output]).any()
        np.testing.assert_allclose(one[output], value, rtol=1e-5, atol=1e-6)
