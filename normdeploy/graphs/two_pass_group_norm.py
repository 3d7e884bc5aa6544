"""Expand GroupNormalization into two passes over each group, which references need for accuracy.

onnxruntime has no kernel for GroupNormalization. It computes E[x²] − E[x]² in float32. If the mean is large compared to
the standard deviation, this difference loses all digits and may even be negative. Here the mean is subtracted before
squares are summed:

    y = (x − E[x]) / √(E[(x − E[x])²] + epsilon) · scale + bias        E over each group, as on the operator's page
"""

from __future__ import annotations

import onnx
import onnx.parser

from ..storage.proto_traversal import copy_model, iter_bodies

ONE_PASS = "onnxruntime computes GroupNormalization in one pass, which loses digits if the mean is large"
_DOMAIN = "normdeploy.two_pass"
_SINCE = 18
_BODY = """<opset_import: ["": OPSET], domain: "DOMAIN">
GroupNormalization <num_groups, epsilon: float = 1e-5, stash_type: int = 1> (X, scale, bias) => (Y) {
    keep = Constant <value_ints: ints = [0]> ()
    rest = Constant <value_ints: ints = [-1]> ()
    one = Constant <value_ints: ints = [1]> ()
    two = Constant <value_ints: ints = [2]> ()
    groups = Constant <value_int: int = @num_groups> ()
    group_axis = Unsqueeze (groups, keep)
    by_group = Concat <axis: int = 0> (keep, group_axis, rest)
    x = Reshape (X, by_group)
    mean = ReduceMean <keepdims: int = 1> (x, two)
    centered = Sub (x, mean)
    squares = Mul (centered, centered)
    variance = ReduceMean <keepdims: int = 1> (squares, two)
    epsilon_value = Constant <value_float: float = @epsilon> ()
    small = CastLike (epsilon_value, variance)
    guarded = Add (variance, small)
    deviation = Sqrt (guarded)
    normal = Div (centered, deviation)
    factors = Shape (scale)
    by_factor = Concat <axis: int = 0> (keep, factors, rest)
    lines = Reshape (normal, by_factor)
    gain = Unsqueeze (scale, one)
    shift = Unsqueeze (bias, one)
    scaled = Mul (lines, gain)
    shifted = Add (scaled, shift)
    shape = Shape (X)
    Y = Reshape (shifted, shape)
}"""


def expand_group_norms(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """Copy ``proto`` with each GroupNormalization as a function of two passes.

    Opset 18 scales each group and opset 21 each channel. The body works with either number of factors.

    Returns: the copy; None if nothing is to be expanded, or below opset 18.
    """
    opset = next((entry.version for entry in proto.opset_import if not entry.domain), 0)
    if opset < _SINCE or not _group_norm_nodes(proto):
        return None
    made = copy_model(proto)
    for node in _group_norm_nodes(made):
        node.domain = _DOMAIN
    made.opset_import.add(domain=_DOMAIN, version=1)
    for function in made.functions:
        function.opset_import.add(domain=_DOMAIN, version=1)
    made.functions.append(onnx.parser.parse_function(_BODY.replace("OPSET", str(opset)).replace("DOMAIN", _DOMAIN)))
    return made


def _group_norm_nodes(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    """List the GroupNormalization nodes of all graphs and functions."""
    return [
        node
        for body in iter_bodies(proto)
        for node in body.node
        if node.op_type == "GroupNormalization" and not node.domain
    ]
