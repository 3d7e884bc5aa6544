"""Match measured gamma, beta and epsilon with the values that the file stores.

A measured value is accurate to about 1e-13. If a constant of the file agrees with the measured value, the constant is
used, because it is exact and keeps its name. Gamma and beta may also be data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from ..dtypes import is_float_dtype
from ..graphs.graph import Graph
from ..graphs.region import Refusal, Region
from .anchors import is_norm_node

_CASTS = ("Cast", "CastLike")
# These ops do not change the values of a constant.
_FIXED = (*_CASTS, "Reshape", "Unsqueeze", "Expand")
# Views that keep the order of the elements.
_SAME_ORDER = ("Reshape", "Flatten", "Unsqueeze", "Squeeze", "Identity")


@dataclass(frozen=True)
class MeasuredParameter:
    """Gamma or beta: a constant or data.

    Attributes:
        value: the constant, with as many axes as x and size 1 along axes on which it does not vary; None for data.
        tensor: the data, or the file's initializer if it stores exactly ``value``. The initializer is used with its
            name.
        varies: the axes of x along which it varies.
    """

    value: np.ndarray | None
    tensor: gs.Tensor | None = None
    varies: tuple[int, ...] = ()

    @property
    def data(self) -> bool:
        """Return True if the parameter is data, not a constant."""
        return self.value is None


def find_parameter(
    graph: Graph, region: Region, full: np.ndarray, others: Sequence[np.ndarray], neutral: float, vector: bool = False
) -> MeasuredParameter | Refusal | None:
    """Identify gamma or beta from its measured values.

    Args:
        full: the measured values, in the shape of x.
        others: values that the leaves other than x had during the measurement.
        neutral: 1 for gamma, 0 for beta.
        vector: True to return the one-dimensional tensor that the data is a view of, if one exists.

    Returns:
        the parameter; None if it is ``neutral`` everywhere; a refusal if it is data that can't be broadcast to x.
    """
    scale = np.abs(full).max()
    for leaf, values in zip(region.leaves[1:], others, strict=True):
        flat = np.sort(values, axis=None)
        near = flat[np.clip(np.searchsorted(flat, full - 1e-9), 0, flat.size - 1)]
        if _is_close(near, full, 0.0):
            order = np.argsort(values, axis=None)
            index = order[np.clip(np.searchsorted(flat, full - 1e-9), 0, flat.size - 1)]
            return _data_parameter(graph, leaf, values, index, vector)
    reduced = full
    for axis in range(full.ndim):
        first = np.take(reduced, [0], axis=axis)
        if (np.abs(reduced - first) <= 1e-11 * np.maximum(np.abs(first), 1e-3 * scale)).all():
            reduced = first
    if reduced.size == 1 and abs(reduced.item() - neutral) <= 1e-11:
        return None
    varies = tuple(a for a, n in enumerate(reduced.shape) if n > 1)
    return snap_to_file(graph, region, reduced, varies)


def _is_close(a: np.ndarray, b: np.ndarray, absolute: float) -> bool:
    return bool((np.abs(a - b) <= absolute + 1e-9 * np.abs(b)).all())


def _data_parameter(
    graph: Graph, leaf: gs.Tensor, values: np.ndarray, index: np.ndarray, vector: bool
) -> MeasuredParameter | Refusal:
    """Find the tensor of a gamma or beta that is data: ``leaf``, or a tensor of which ``leaf`` is a view.

    Of these tensors, the first one that broadcasts to x is chosen.
    """
    varies = tuple(a for a in range(index.ndim) if (np.take(index, [0], axis=a) != index).any())
    t: gs.Tensor = leaf
    wanted = tuple(index.shape[a] for a in varies)
    while True:
        shape = graph.shape(t)
        size = tuple(d for d in shape or () if d != 1)
        if shape is not None and len(size) == len(wanted):
            return MeasuredParameter(None, _underlying_vector(graph, t) if vector else t, varies)
        node = graph.producer(t)
        if node is None or node.op not in _SAME_ORDER:
            return Refusal(
                f"its scale or shift {leaf.name!r} does not vary along the normalized axes in order", leaf.name
            )
        t = node.inputs[0]


def _underlying_vector(graph: Graph, t: gs.Tensor) -> gs.Tensor:
    """Return the vector that ``t`` is a view of, or ``t`` itself."""
    above = t
    while len(graph.shape(above) or ()) != 1:
        node = graph.producer(above)
        if node is None or node.op not in _SAME_ORDER:
            return t
        above = node.inputs[0]
    return above


def snap_to_file(graph: Graph, region: Region, reduced: np.ndarray, varies: tuple[int, ...]) -> MeasuredParameter:
    """Match a measured value with a constant of the file.

    Returns:
        the exact constant, possibly times a factor; the measured value if no constant matches.
    """
    for t in region_constants(graph, region):
        if (
            t.shape is None
            or int(np.prod(t.shape, dtype=int)) != reduced.size
            or (reduced.size == 1 and not is_float_dtype(t.dtype))
        ):
            continue
        stored = graph.value(t)
        if stored.dtype.kind != "f" or not np.isfinite(stored).all() or not stored.any():
            continue
        stored = stored.reshape(reduced.shape)
        if _is_close(stored, reduced, 1e-11 * np.abs(stored).max()):
            return MeasuredParameter(stored, t, varies)
        ratio = float((stored * reduced).sum() / (stored * stored).sum())
        if reduced.size > 1 and _is_close(stored * ratio, reduced, 1e-11 * np.abs(reduced).max()):
            return MeasuredParameter(stored * ratio, None, varies)
    return MeasuredParameter(reduced, None, varies)


def snap_epsilon(graph: Graph, region: Region, epsilon: float) -> float:
    """Replace a measured epsilon by the number in the file that agrees with it.

    Returns:
        the number in the file, or ``epsilon`` if no number agrees.
    """
    exact = stored_epsilon(graph, region, epsilon)
    if exact is None:
        return epsilon
    return exact


def stored_epsilon(graph: Graph, region: Region, epsilon: float) -> float | None:
    """Find the number in the file that agrees with the measured epsilon up to a relative error of 1e-7.

    Returns:
        the number, from an attribute or a scalar constant; None if no number agrees.
    """
    attributes = (graph.attrs(n).get("epsilon") for n in region.nodes if is_norm_node(n))
    scalars = (
        graph.value(t)
        for t in region_constants(graph, region)
        if t.shape is not None and np.prod(t.shape, dtype=int) == 1
    )
    numbers = (*(a for a in attributes if a is not None), *(v.item() for v in scalars if v.dtype.kind == "f"))
    return next((float(v) for v in numbers if abs(v - epsilon) <= 1e-7 * epsilon), None)


def numbers_cast_to_zero(graph: Graph, region: Region) -> list[tuple[float, str]]:
    """List the nonzero scalars that a Cast of the file turns into zero. An evaluation in float64 does not show this.

    Returns:
        pairs of a scalar and the name of the type that it is cast to.
    """
    vanished: dict[tuple[float, str], None] = {}
    stack = [
        t
        for n in region.nodes
        for t in n.inputs
        if not isinstance(t, gs.Constant) and not t.is_empty() and graph.is_constant(t)
    ]
    while stack:
        t = stack.pop()
        node = graph.producer(t)
        if node is None or node.op not in _FIXED:
            continue
        stack.append(node.inputs[0])
        value = graph.known_value(t)
        kind = graph.dtype(t)
        if node.op in _CASTS and value is not None and value.size == 1 and kind is not None and kind.kind not in "iub":
            number = float(value.item())
            if number and not value.astype(kind).any():
                vanished[number, kind.name] = None
    return list(vanished)


def region_constants(graph: Graph, region: Region) -> Iterator[gs.Constant]:
    """Yield the file's constants that the region reads, directly or through views and Casts.

    Yields:
        each constant once. A ``value_float`` of a Constant node is yielded as a float32 constant without a name.
    """
    seen: set[int] = set()
    stack = [t for n in region.nodes for t in n.inputs if graph.is_constant(t)]
    while stack:
        t = stack.pop()
        if id(t) in seen or t.is_empty():
            continue
        seen.add(id(t))
        if isinstance(t, gs.Constant):
            yield t
            continue
        node = graph.producer(t)
        if node is not None and node.op == "Constant" and isinstance(node.attrs.get("value"), gs.Constant):
            yield node.attrs["value"]
        elif node is not None and "value_float" in node.attrs:
            yield gs.Constant("", np.array(node.attrs["value_float"], np.float32))
        elif node is not None:
            stack.extend(node.inputs[:1] if node.op in _FIXED else node.inputs)
