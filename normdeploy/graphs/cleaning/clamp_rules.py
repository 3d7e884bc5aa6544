"""Rules for chains of Min, Max, Clip and Relu, which limit a number to one interval.

Define clip(x, lo, hi) = min(max(x, lo), hi), and let a ≤ b, c ≤ d. Then clip(clip(x, a, b), c, d) = clip(x, a', b')
with a' = clip(a, c, d), b' = clip(b, c, d). Proof: the outer clip is monotone, maps [a, b] onto [a', b'], and is the
identity on [a', b']. Below a the result is a', above b it is b'. If the two intervals do not meet, a' = b'. NaN passes
every clip. Relu is clip(x, 0, ∞). An omitted bound of Clip is the type's lowest or highest finite number, in the
standard and in onnxruntime. A float32 Clip without bounds therefore turns ∞ into 3.4e38.

The sign of zero needs care. If x equals the bound, onnxruntime's Clip and Relu return x, but its Max returns +0. So Max
and Min become a Clip only if no bound is 0, and an op with a bound of -0 is never merged. A merged Clip with a bound of
0 passes -0 on. The inner clip must pass -0 too, so 0 must lie in [a, b].
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from .node_matching import constant_array, input_at, is_understood, replace_node, understood_producer

_FLOATS = frozenset({ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE})
# Types that onnxruntime's Clip, Max and Min all accept.
_TYPES = _FLOATS | {ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT32, ir.DataType.UINT64}

Number = float | int


def merge_limits(graph: ir.Graph, node: ir.Node) -> bool:
    """Merge a Clip or Relu with the Clip or Relu before it, by the lemma above.

    Returns: whether the graph changed.
    """
    if node.inputs:
        inner = _clamp_producer(node.inputs[0])
    else:
        inner = None
    if is_understood(node, "Clip") or is_understood(node, "Relu"):
        outer = node
    else:
        outer = None
    if inner is None or outer is None:
        return False
    x = inner.inputs[0]
    first = _clamp_interval(inner)
    second = _clamp_interval(outer)
    if x is None or x.dtype not in _TYPES or first is None or second is None:
        return False
    if outer.op_type == inner.op_type == "Relu":
        return replace_node(graph, node, ir.node("Relu", [x]))
    low, high = (min(max(bound, second[0]), second[1]) for bound in first)
    if 0 in (low, high) and not first[0] <= 0 <= first[1]:
        # The inner op never returns -0 in this case, but a Clip at 0 may.
        return False
    if math.isinf(low) or math.isinf(high):
        return False
    return _replace_by_clip(graph, node, x, low, high)


def merge_extremes(graph: ir.Graph, node: ir.Node) -> bool:
    """Merge Min(Min(x, a), b), Max(Max(x, a), b), Min(Max(x, a), b) and Max(Min(x, b), a).

    Premise: a and b are scalars, neither NaN nor zero. The last two forms become a Clip, so they also need a ≤ b.

    Returns: whether the graph changed.
    """
    outer = _min_max_operand(node)
    if outer is None:
        inner = None
    else:
        inner = _min_max_operand(outer[0].producer())
    if outer is None or inner is None:
        return False
    made = outer[0].producer()
    assert made is not None
    x, first = inner
    second = outer[1]
    if x.dtype not in _TYPES:
        return False
    if made.op_type == node.op_type:
        bound = (min if node.op_type == "Min" else max)(first, second)
        limit = _scalar_constant(x, bound)
        return replace_node(graph, node, limit, ir.node(node.op_type, [x, limit.outputs[0]]))
    low, high = (first, second) if node.op_type == "Min" else (second, first)
    if low > high or math.isinf(low) or math.isinf(high):
        return False
    return _replace_by_clip(graph, node, x, low, high)


def _clamp_producer(value: ir.Value | None) -> ir.Node | None:
    return understood_producer(value, "Clip") or understood_producer(value, "Relu")


def _clamp_interval(node: ir.Node) -> tuple[Number, Number] | None:
    """Return the interval of a Clip or Relu; None if a bound is computed, NaN or -0, or the interval is empty."""
    x = node.inputs[0]
    if x is None or x.dtype not in _TYPES:
        return None
    least, most = _finite_limits(x)
    if node.op_type == "Relu":
        if x.dtype in _FLOATS:
            return (0, math.inf)
        return None
    bounds: list[Number] = []
    for index, default in ((1, least), (2, most)):
        value = input_at(node, index)
        bound = default if value is None else _clamp_bound(value)
        if bound is None:
            return None
        bounds.append(bound)
    if bounds[0] <= bounds[1]:
        return (bounds[0], bounds[1])
    return None


def _clamp_bound(value: ir.Value) -> Number | None:
    array = constant_array(value)
    if array is None or array.ndim != 0:
        return None
    number = array.item()
    if isinstance(number, float) and (math.isnan(number) or (number == 0 and math.copysign(1, number) < 0)):
        return None
    if isinstance(number, int | float):
        return number
    return None


def _min_max_operand(node: ir.Node | None) -> tuple[ir.Value, Number] | None:
    """Return x and the number of Min(x, number) or Max(x, number); None if the number is computed, NaN or zero."""
    if node is None or not (is_understood(node, "Min") or is_understood(node, "Max")) or len(node.inputs) != 2:
        return None
    for value, other in (node.inputs, reversed(node.inputs)):
        if other is None:
            bound = None
        else:
            bound = _clamp_bound(other)
        if value is not None and constant_array(value) is None and bound:
            return value, bound
    return None


def _scalar_constant(x: ir.Value, number: Number) -> ir.Node:
    assert x.dtype is not None
    return ir.node("Constant", [], {"value": ir.tensor(np.array(number, x.dtype.numpy()))})


def _replace_by_clip(graph: ir.Graph, node: ir.Node, x: ir.Value, low: Number, high: Number) -> bool:
    # A Clip omits a bound that equals the lowest or highest finite number of its type.
    least, most = _finite_limits(x)
    bounds = [None if number == end else _scalar_constant(x, number) for number, end in ((low, least), (high, most))]
    inputs = [x, *(None if bound is None else bound.outputs[0] for bound in bounds)]
    while inputs[-1] is None:
        inputs.pop()
    return replace_node(graph, node, *filter(None, bounds), ir.node("Clip", inputs))


def _finite_limits(x: ir.Value) -> tuple[Number, Number]:
    """Return the lowest and the highest finite number of a tensor's type."""
    assert x.dtype is not None
    if x.dtype in _FLOATS:
        info = np.finfo(x.dtype.numpy())
        return float(info.min), float(info.max)
    whole = np.iinfo(x.dtype.numpy())
    return whole.min, whole.max
