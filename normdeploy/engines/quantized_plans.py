"""Map one of normdeploy's own ops, which contains a norm and QuantizeLinear, to a plugin node. If no kernel accepts the
op, give the reason.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.region import RefusedError
from ..norms.norm_table import OURS
from .plugin_nodes import Given, PluginPlan, PluginPlanner

# ONNX's type -> name of the type in the kernels.
_TO = {"int8": "int8", "float8_e4m3fn": "fp8"}
# ONNX's type -> code of a row's largest element.
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def plan_quantized_norm(p: PluginPlanner, node: gs.Node, axis: int, given: Given) -> PluginPlan:
    """Plan a norm over the dims from the negative ``axis`` on, followed by QuantizeLinear. A residual add may precede
    the norm.

    The zero point is 0, and the scale is one constant or one value for each row.

    Args:
        given: gamma and beta, as for `PluginPlanner.expand_parameters`.

    Returns:
        the plan.

    Raises:
        RefusedError: no kernel accepts the norm or its parameters, there are several scales, no kernel writes the
            quantized type, or the GPU does not support this type.
    """
    row = OURS[node.op]
    x, *others, zero = node.inputs
    kind = p.graph.dtype(zero)
    held = p.graph.known_value(zero)
    if held is None or held.any():
        raise RefusedError("its zero point is not 0")
    if kind is None or kind.name not in _TO:
        raise RefusedError(f"it quantizes to {kind}; the kernels write {' and '.join(_TO.values())}")
    if _TO[kind.name] == "fp8":
        from normdeploy_plugins import qdp

        if lacking := qdp.without_fp8():
            raise RefusedError(lacking)
    added = "residual" in row.inputs
    if added and (
        p.known_shape(x) != p.known_shape(others[0]) or None in p.known_shape(x) or p.dtype(x) != p.dtype(others[0])
    ):
        raise RefusedError("its two inputs are not known to have the same shape and type")
    if any(t.is_empty() for t in node.outputs[:-1]):
        raise RefusedError("not all of its results are read")
    rank = len(p.known_shape(x))
    data = tuple(others[:1]) if added else ()
    parameters, shape = p.expand_parameters(x, range(rank + axis, rank), given)
    given_attributes = p.attributes(node)
    attributes = {"epsilon": given_attributes["epsilon"], "to": _TO[kind.name]} | ({} if added else {"axis": axis})
    inputs = [x, *data, *parameters]
    if row.is_quantized_by_row:
        if given_attributes["largest"] != _LARGEST[kind.name]:
            raise RefusedError(
                f"its scales are for values up to {given_attributes['largest']:g}, but {kind.name} has values up to "
                f"{_LARGEST[kind.name]:g}"
            )
        attributes["least"] = given_attributes["least"]
    else:
        value = p.graph.known_value(others[-1])
        if value is None or value.size != 1:
            raise RefusedError("its scale is not a single constant")
        inputs.append(p.make_constant(x, "y_scale", value.reshape(1), np.float32))
    new = p.make_plugin_node(node.op, inputs, node.outputs[0], **attributes)
    for name, t in zip(row.outputs[1:], new.outputs[1:], strict=True):
        t.dtype = np.dtype(np.float32) if name == "y_scale" else p.dtype(x)
    outputs = tuple(t for t in node.outputs if not t.is_empty())
    leaves = (x, *data, *(t for t in parameters if not p.graph.is_constant(t)))
    return PluginPlan((node,), outputs, leaves, (new,), shape, tuple(range(rank + axis)), f"plugin {node.op}")
