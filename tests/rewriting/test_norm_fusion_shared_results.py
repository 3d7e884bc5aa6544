"""A norm whose result several readers share, directly or through views, is computed once."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

import normdeploy
from normdeploy.ort_sessions.session import open_session

# A mixture of experts flattens the result for its router, and restores the shape for a shared expert.
TO_AND_FRO = """
<ir_version: 10, opset_import: ["" : 23]>
model (float[2, 8, 16] x) => (float[16, 4] chosen, float[2, 8, 16] shared)
<float[16] gamma, float[16, 4] router, float[16, 16] expert, float epsilon = {1e-6}, float two = {2.0},
 int64[1] last = {-1}, int64[2] flat_shape = {-1, 16}, int64[3] full_shape = {2, 8, 16}>
{
    square = Pow(x, two)
    mean = ReduceMean(square, last)
    above = Add(mean, epsilon)
    root = Sqrt(above)
    inverse = Reciprocal(root)
    scaled = Mul(x, inverse)
    y = Mul(scaled, gamma)
    flat = Reshape(y, flat_shape)
    chosen = MatMul(flat, router)
    READERS
    shared = MatMul(back, expert)
}
"""
THROUGH_VIEWS = "back = Reshape(flat, full_shape)"
THROUGH_TRANSPOSES = """turned = Transpose <perm = [0, 2, 1]> (y)
    used = Relu(turned)
    back = Transpose <perm = [0, 2, 1]> (used)"""


def model_with(readers: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(TO_AND_FRO.replace("READERS", readers))
    rng = np.random.default_rng(0)
    for name, shape in (("gamma", (16,)), ("router", (16, 4)), ("expert", (16, 16))):
        array = rng.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


@pytest.mark.parametrize("readers", [THROUGH_VIEWS, THROUGH_TRANSPOSES])
def test_result_read_behind_a_view_is_computed_once(readers: str) -> None:
    proto = model_with(readers)
    result = normdeploy.optimize(proto)
    ops = [node.op_type for node in result.proto.graph.node]
    assert ops.count("RMSNormalization") == 1
    assert not {"ReduceMean", "Sqrt", "Reciprocal"} & set(ops)
    assert [finding.status for finding in result.summary.findings] == ["fused"]
    x = np.random.default_rng(1).standard_normal((2, 8, 16)).astype(np.float32)
    given = open_session(result.proto.SerializeToString()).run(None, {"x": x})
    before = open_session(proto.SerializeToString()).run(None, {"x": x})
    for one, other in zip(given, before, strict=True):
        # Each side rounds a norm of 16 elements and a product of 16 terms.
        assert np.abs(one - other).max() <= 2 * 40 * 2.0**-24 * np.abs(other).max()
