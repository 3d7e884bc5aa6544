"""Correct the biases of layers with shifted inputs, with the weights as they are stored.

A layer that reads x − c has the bias b + W·c. With rounded weights Ŵ, its result has the error (Ŵ − W)·(x − c), and c
is many times as large as most x. With the bias b + Ŵ·c, the error is (Ŵ − W)·x:

    Ŵ·(x − c) + (b + Ŵ·c) = Ŵ·x + b                (docs/explanation/identities.md, "A shift and rounded weights")

So with this bias, the shift does not enlarge the error of the rounded weights. But if the values of a channel are
nearer to c than to 0, (Ŵ − W)·x is the larger error. This is so for a constant channel, for example. For such channels,
the bias is corrected with W. Calibration samples show which channels these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from ..findings.quantization_report import Migration
from .layer_groups import LayerCandidate
from .qdq_writer import InputShift
from .scale_migration import InputCondition


def find_input_shifts(
    proto: onnx.ModelProto,
    layers: Sequence[LayerCandidate],
    migrations: Sequence[Migration],
    conditions: Mapping[str, InputCondition],
) -> dict[str, InputShift]:
    """Find the layers of ``proto`` whose inputs ``migrations`` shifted.

    Only layers with a two-dimensional weight and a bias are included, if no other node reads weight or bias.

    Args:
        conditions: conditions by the name of the tensor that the layers read.

    Returns:
        first result of a layer's node → its shift.
    """
    shifted = {
        name: condition
        for m in migrations
        if m.status == "made" and (condition := conditions.get(m.norm)) is not None and condition.shift is not None
        for name in m.linears
    }
    stored = {t.name: tuple(t.dims) for t in proto.graph.initializer}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in proto.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    nodes = {n.output[0]: n for n in proto.graph.node if n.output}
    found: dict[str, InputShift] = {}
    for c in layers:
        condition = shifted.get(c.result)
        node = nodes.get(c.plan.tensor)
        if condition is None or node is None or condition.shift is None:
            continue
        bias = _bias_name(node, readers)
        weight = node.input[c.plan.weight]
        matrix = len(stored.get(weight, ())) == 2 and len(readers[weight]) == 1
        if matrix and stored.get(bias) == (c.outputs,) and len(readers[bias]) == 1:
            offset = condition.shift.astype(np.float64) / condition.scale
            found[c.plan.tensor] = InputShift(
                offset if condition.recentred is None else np.where(condition.recentred, offset, 0.0), bias
            )
    return found


def _bias_name(node: onnx.NodeProto, readers: Mapping[str, Sequence[onnx.NodeProto]]) -> str:
    """Return the name of a layer's bias; "" if it has none.

    The bias is the third input of a Gemm, or the other input of the Add after a MatMul.
    """
    if node.op_type == "Gemm":
        if len(node.input) > 2:
            return str(node.input[2])
        return ""
    behind = readers.get(node.output[0], ())
    if node.op_type != "MatMul" or len(behind) != 1 or behind[0].op_type != "Add":
        return ""
    return str(next((name for name in behind[0].input if name != node.output[0]), ""))
