"""Find rows that an additive mask may hide entirely. Attention and Softmax differ there (`rewriting.attention_fusion`).

Values are tracked as intervals through the few ops that build masks. The dtype bounds integers and bools.
Floating-point inputs have no bounds and may be −Inf.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.graph import Graph
from ..storage.onnx_domains import is_standard

LOWEST = float(np.finfo(np.float32).min)
_MOVES = frozenset({"Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Slice", "Identity", "Flatten"})
# Computed values above this stay above the lowest float32 even after a few roundings
_FAR = LOWEST * (1 - 2.0**-20)
# Maximum length of a chain of nodes that the search follows
_DEEP = 24

Bounds = tuple[float, float]


def may_hide_row(graph: Graph, mask: gs.Tensor, y: gs.Tensor) -> bool:
    """Return True if each element of a row of ``mask`` may be −Inf or the lowest float32, and the row affects ``y``.

    Such a row does not affect ``y`` if the result is multiplied by zero there: by Cast(ReduceMax(mask) > c), as
    `normdeploy.exporting.masked_attention_fix` writes it.

    Args:
        y: result of the attention.

    Returns:
        False only if no such row is possible.
    """
    if graph.is_constant(mask):
        known = graph.known_value(mask)
        return (
            known is None or not known.size or not bool((known.max(axis=-1) > LOWEST).all() and (known < np.inf).all())
        )
    limits = value_bounds(graph, mask)
    return limits is None or (limits[0] <= _FAR and not _are_hidden_rows_zeroed(graph, mask, y))


def value_bounds(graph: Graph, t: gs.Tensor, deep: int = 0) -> Bounds | None:
    """Bound all elements of ``t``.

    Args:
        deep: depth of the recursion.

    Returns:
        (lower, upper); None if the bounds are unknown, or if an element may be outside float32's range.
    """
    if graph.is_constant(t):
        known = graph.known_value(t)
        if known is not None and known.size:
            return _finite_bounds(float(known.min()), float(known.max()))
        return None
    node = graph.producer(t)
    if node is None or deep > _DEEP or not is_standard(node):
        return _dtype_bounds(graph, t)
    if node.op in _MOVES:
        return value_bounds(graph, node.inputs[0], deep + 1)
    if node.op == "Cast":
        return _dtype_bounds(graph, node.inputs[0]) or (
            value_bounds(graph, node.inputs[0], deep + 1) if _is_floating(graph, t) else None
        )
    if node.op not in ("Where", "Concat", "Add", "Sub", "Mul", "Neg") or not _is_floating(graph, t):
        return _dtype_bounds(graph, t)
    each = [value_bounds(graph, i, deep + 1) for i in (node.inputs[1:] if node.op == "Where" else node.inputs)]
    if None not in each:
        return _combine_bounds(node.op, [b for b in each if b is not None])
    return None


def _combine_bounds(op: str, each: list[Bounds]) -> Bounds | None:
    (a, b), (c, d) = each[0], each[-1]
    if op in ("Where", "Concat"):
        return min(low for low, _ in each), max(high for _, high in each)
    ends = {"Neg": [-b, -a], "Add": [a + c, b + d], "Sub": [a - d, b - c], "Mul": [a * c, a * d, b * c, b * d]}[op]
    if min(ends) > _FAR and max(ends) < -_FAR:
        return (min(ends), max(ends))
    return None


def _finite_bounds(low: float, high: float) -> Bounds | None:
    # Both comparisons are False for NaN, so NaN gives None.
    return (low, high) if low >= LOWEST and high <= -LOWEST else None


def _is_floating(graph: Graph, t: gs.Tensor) -> bool:
    dtype = graph.dtype(t)
    return dtype == np.float32


def _dtype_bounds(graph: Graph, t: gs.Tensor) -> Bounds | None:
    """Return the bounds of an integer or bool dtype; None for other dtypes."""
    dtype = graph.dtype(t)
    if dtype is None or dtype.kind not in "iub":
        return None
    if dtype.kind == "b":
        return (0.0, 1.0)
    return (float(np.iinfo(dtype).min), float(np.iinfo(dtype).max))


def _are_hidden_rows_zeroed(graph: Graph, mask: gs.Tensor, y: gs.Tensor) -> bool:
    """Return True if ``y`` is read only as y·Cast(ReduceMax(mask) > c), with c the lowest float32 or above."""
    readers = graph.all_consumers_of(y)
    if graph.is_output(y) or len(readers) != 1 or readers[0].op != "Mul" or readers[0].domain:
        return False
    node = graph.producer(next((t for t in readers[0].inputs if t is not y), y))
    for op in ("Cast", "Greater", "ReduceMax"):
        if node is None or node.op != op or node.domain:
            return False
        if op == "Greater":
            limit = graph.known_value(node.inputs[1])
            if limit is None or limit.size != 1 or not float(limit.reshape(())) >= LOWEST:
                return False
        if op == "ReduceMax":
            if len(node.inputs) > 1:
                axes = graph.known_value(node.inputs[1])
            else:
                axes = graph.attrs(node).get("axes")
            if axes is None:
                told = []
            else:
                told = np.asarray(axes).reshape(-1).tolist()
            rank = len(graph.shape(mask) or ())
            return node.inputs[0] is mask and graph.attrs(node).get("keepdims", 1) == 1 and told in ([-1], [rank - 1])
        node = graph.producer(node.inputs[0])
    return False
