"""Maps a norm and its QuantizeLinear, one node of ours, to a plugin node, or says why no kernel takes them."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.region import Refused
from ..norms.ops import OURS
from .plugin_nodes import Given, Plan, Planner

_TO = {"int8": "int8", "float8_e4m3fn": "fp8"}  # the types that a kernel quantizes to, as it calls them


def quantized(p: Planner, node: gs.Node, axis: int, given: Given) -> Plan:
    """A norm over the dims from ``axis`` (negative) on, or a residual add and a norm, then QuantizeLinear by one
    constant scale with zero point 0. ``given``: gamma and beta.

    Raises:
        Refused: it is by several scales, to a type that no kernel writes or that the GPU has not.
    """
    row = OURS[node.op]
    x, *others, scale, zero = node.inputs
    value, kind, held = p.graph.known(scale), p.graph.dtype(zero), p.graph.known(zero)
    if value is None or value.size != 1 or held is None or held.any():
        raise Refused("its scale is not one constant, or its zero point is not 0")
    if kind is None or kind.name not in _TO:
        raise Refused(f"it quantizes to {kind}; the kernels write {' and '.join(_TO.values())}")
    if _TO[kind.name] == "fp8":
        from normdeploy_plugins import qdp

        if lacking := qdp.without_fp8():
            raise Refused(lacking)
    added = "residual" in row.inputs
    if added and (p.shape(x) != p.shape(others[0]) or None in p.shape(x) or p.dtype(x) != p.dtype(others[0])):
        raise Refused("its two inputs are not known to have one shape and type")
    if node.outputs[0].is_empty():
        raise Refused("its sum alone is read")
    rank, data = len(p.shape(x)), tuple(others[:1]) if added else ()
    parameters, shape = p.vectors(x, range(rank + axis, rank), given)
    attributes = {"epsilon": p.attributes(node)["epsilon"], "to": _TO[kind.name]} | ({} if added else {"axis": axis})
    inputs = [x, *data, *parameters, p.constant(x, "y_scale", value.reshape(1), np.float32)]
    new = p.node(node.op, inputs, node.outputs[0], **attributes)
    for t in new.outputs[1:]:
        t.dtype = p.dtype(x)
    outputs = tuple(t for t in node.outputs if not t.is_empty())
    leaves = (x, *data, *(t for t in parameters if not p.graph.is_constant(t)))
    return Plan((node,), outputs, leaves, (new,), shape, tuple(range(rank + axis)), f"plugin {node.op}")
