"""Measure scales and shifts with constants, y = a·z + b, in float64, regardless of their spelling.

An eval-mode BatchNorm computes such a scale and shift, as one node or written as several. Views may surround the nodes,
and branches may lie inside them (y + y·(γ − 1)). For a region that computes f, b = f(0), and a follows from f(s) −
f(−s). A random input checks both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from ..dtypes import is_float_dtype
from ..evaluate import evaluator
from ..evaluate.evaluation_budget import is_affordable
from ..graphs.graph import Graph, value_inputs
from ..graphs.region import (
    BoundRegion,
    EvaluationFailed,
    Refusal,
    Region,
    compile_region,
    concrete_shape,
    size_assignments,
)
from ..storage.onnx_domains import is_standard
from .anchors import FLOATING, VIEWS, find_narrowing_cast

_PLACEWISE = frozenset({"BatchNormalization", "Mul", "Add", "Sub", "Div", "Neg", "Identity", "Sum", "Cast", "Dropout"})
_STEPS = VIEWS | _PLACEWISE
# Maximum number of nodes of a scale and shift; a BatchNorm that is written as separate nodes has about six.
_LONGEST = 24


@dataclass(frozen=True)
class AffineChain:
    """Nodes that compute y = a·z + b elementwise, with constants a and b.

    Attributes:
        scale: a, with as many axes as y and size 1 along axes on which it does not vary.
        shift: b, in the same layout.
        normalizes: True if the nodes contain a BatchNormalization or the root of a constant.
    """

    region: Region
    z: gs.Tensor
    y: gs.Tensor
    scale: np.ndarray
    shift: np.ndarray
    dtype: np.dtype
    normalizes: bool

    @property
    def nodes(self) -> list[gs.Node]:
        """Return the region's nodes without the nodes that only compute shapes."""
        graph = self.region.graph
        return [n for n in self.region.nodes if not graph.is_shape_valued(n.outputs[0])]


def find_affine_chains(graph: Graph, start: gs.Node) -> Iterator[AffineChain] | Refusal:
    """Find the scales and shifts that begin with ``start``, longest first.

    A chain is returned if it normalizes, if it scales by more than one number, or if it scales an input of the graph,
    such as the pixels of an image. A bias without a scale is not returned: it belongs to its linear op.

    Returns:
        an iterator over the chains, empty if no chain begins at ``start``. A refusal if ``start`` is a
        BatchNormalization in training mode.
    """
    nodes, ends = _spread_from(graph, start)
    for node in nodes:
        if node.op == "BatchNormalization" and graph.attrs(node).get("training_mode", 0):
            reason = (
                "BatchNormalization in training mode uses the statistics of the batch; export the model in eval mode"
            )
            return Refusal(reason, node.outputs[0].name)
    of_input = bool(nodes) and _is_input(graph, _data_inputs(graph, start)[0])
    if not any(_may_scale_channels(graph, n) or (of_input and n.op in ("Mul", "Div")) for n in nodes):
        return iter(())
    # Leading views and Casts need not belong to the chain. If they do not, they stay before the scale.
    outside = next((i for i, n in enumerate(nodes) if n.op not in VIEWS and n.op != "Cast"), 0)
    beginnings = [_data_inputs(graph, n)[0] for n in nodes[: outside + 1]]
    measured = (measure_affine(graph, z, y) for z in beginnings for y in reversed(ends))
    return (
        m
        for m in measured
        if isinstance(m, AffineChain)
        and (
            m.scale.size > 1
            or (of_input and any(n.op in ("Mul", "Div") for n in m.nodes))
            or (m.normalizes and _has_channel_constants(graph, m.nodes))
        )
    )


def _is_input(graph: Graph, t: gs.Tensor) -> bool:
    """Return True if ``t`` is an input of the graph in another type or layout."""
    while (node := graph.producer(t)) is not None:
        if node.op not in ("Cast", "Transpose", "Identity"):
            return False
        t = node.inputs[0]
    return not graph.is_constant(t)


def _may_scale_channels(graph: Graph, node: gs.Node) -> bool:
    """Return True if the node may scale by more than one number.

    For attention's 1/√d, a single number after a bias, the result is False.
    """
    if node.op not in ("Mul", "Div"):
        return node.op == "BatchNormalization"
    given = [t for t in value_inputs(node) if graph.is_shape_valued(t)]
    return any((shape := graph.shape(t)) is None or any(n != 1 for n in shape) for t in given)


def _spread_from(graph: Graph, start: gs.Node) -> tuple[list[gs.Node], list[gs.Tensor]]:
    """Collect the nodes from ``start`` on that read only z, constants and each other.

    Returns:
        the nodes, and the tensors at which all branches have joined. Both are empty if the chain begins before
        ``start``.
    """
    data = _data_inputs(graph, start)
    if len(data) != 1 or not _is_affine_step(graph, start, data[0]):
        return [], []
    z = data[0]
    above = graph.producer(z)
    private = not graph.is_output(z) and graph.is_read_once(z)
    if (
        above is not None
        and private
        and len(_data_inputs(graph, above)) == 1
        and _is_affine_step(graph, above, above.inputs[0])
    ):
        return [], []
    nodes = [start]
    inside = {id(z), id(start.outputs[0])}
    ends = []
    # Tensors that still have readers outside the collected nodes.
    waiting: list[gs.Tensor] = [start.outputs[0]]
    while len(nodes) < _LONGEST:
        if len(waiting) == 1:
            ends.append(waiting[0])
        done = {id(n) for n in nodes}
        readers = [r for t in waiting for r in graph.consumers(t) if id(r) not in done]
        if any(graph.is_output(t) for t in waiting) or not all(_is_affine_step(graph, r, z) for r in readers):
            break
        reader = min(
            (r for r in readers if all(id(t) in inside for t in _data_inputs(graph, r))),
            key=graph.position_of,
            default=None,
        )
        if reader is None:
            break
        nodes.append(reader)
        done.add(id(reader))
        inside.add(id(reader.outputs[0]))
        waiting = [
            t
            for t in [*waiting, reader.outputs[0]]
            if t is reader.outputs[0] or any(id(r) not in done for r in graph.consumers(t))
        ]
    return nodes, ends


def _is_affine_step(graph: Graph, node: gs.Node, z: gs.Tensor) -> bool:
    """Return True if the node may be part of a scale and shift.

    A Cast to a type narrower than z's type must not be part of it, because everything after the Cast would have to be
    rounded too. A Sum with more than `_LONGEST` inputs must not be part of it either.
    """
    if node.op not in _STEPS or not is_standard(node) or len(node.inputs) > _LONGEST:
        return False
    return find_narrowing_cast(graph, [node], graph.dtype(z)) is None


def _data_inputs(graph: Graph, node: gs.Node) -> list[gs.Tensor]:
    """List the inputs that are neither constants nor computed only from shapes, such as an exporter's Expand of 1."""
    return [t for t in value_inputs(node) if not graph.is_shape_valued(t)]


def _has_channel_constants(graph: Graph, nodes: Sequence[gs.Node]) -> bool:
    """Return True for a BatchNormalization or constants with several elements.

    The elements may all be equal, for example in a norm that was never trained.
    """
    # A BatchNormalization of one channel counts too.
    if any(n.op == "BatchNormalization" for n in nodes):
        return True
    constants = [t for n in nodes for t in value_inputs(n) if graph.is_constant(t)]
    return any((d := graph.dtype(t)) is not None and is_float_dtype(d) and graph.value(t).size > 1 for t in constants)


def measure_affine(graph: Graph, z: gs.Tensor, y: gs.Tensor) -> AffineChain | Refusal:
    """Measure the scale and shift from ``z`` to ``y``.

    Returns:
        the chain, or a refusal with the reason.
    """
    region = compile_region(graph, y, [z])
    dtypes = [d for d in (graph.dtype(z), graph.dtype(y)) if d is not None]
    if isinstance(region, Refusal):
        return region
    if not dtypes or graph.shape(z) is None:
        return Refusal(f"the type or shape of {z.name!r} is unknown", z.name)
    dtype = dtypes[0]
    if dtype.name not in FLOATING or dtypes[-1] != dtype:
        return Refusal(
            f"{z.name!r} is {dtype.name} and {y.name!r} is {dtypes[-1].name}: both must have the same "
            "floating-point type",
            y.name,
        )
    for sizes in size_assignments(region.symbols, graph.shape(z)):
        size = concrete_shape(graph, z, sizes)
        size = None if size is None else _narrow_size(region, size)
        if size is None or not is_affordable(size):
            break
        # At small sizes, a convolution without padding may leave an empty tensor.
        if min(size, default=1) < 1:
            continue
        try:
            with evaluator.silence_numpy():
                bound = region.bind(sizes)
                shift = bound.run([np.zeros(size)])
                scale = bound.run([np.ones(size)]) - shift
                if not (np.isfinite(shift).all() and np.isfinite(scale).all()):
                    return Refusal("its scale or shift is not finite", y.name)
                if shift.shape != size:
                    return Refusal(f"it broadcasts its input from shape {size} to {shift.shape}", y.name)
                scale = _measure_scale(bound, size, _drop_constant_axes(scale))
                sample = np.random.default_rng(17).standard_normal(size)
                if not np.allclose(
                    bound.run([sample]), scale * sample + shift, rtol=1e-9, atol=1e-9 * float(np.abs(scale).max())
                ):
                    return Refusal("it is not a scale and shift", y.name)
                return AffineChain(
                    region, z, y, scale, _drop_constant_axes(shift), dtype, _is_normalizing(graph, region.nodes)
                )
        except EvaluationFailed:
            continue
    return Refusal(f"the scale and shift between {z.name!r} and {y.name!r} can't be evaluated", y.name)


# Size for an axis along which no constant varies; 2 is the smallest size that does not broadcast.
_FEW = 2


def _narrow_size(region: Region, size: tuple[int, ...]) -> tuple[int, ...]:
    """Shrink the axes along which no constant varies and no op mixes elements, such as the axes of an image."""
    graph = region.graph
    rank = len(size)
    constants = [t for n in region.nodes for t in value_inputs(n) if graph.is_constant(t)]
    if not all(n.op in _PLACEWISE for n in region.nodes if not graph.is_constant(n.outputs[0])):
        return size
    # The vectors of a BatchNormalization vary along axis 1, not along the last axis.
    vectors = {id(t) for n in region.nodes if n.op == "BatchNormalization" for t in n.inputs[1:]}
    values = [graph.known_value(t) for t in constants if id(t) not in vectors]
    # A constant that can't be evaluated, a Cast of strings for example, may vary along any axis.
    shapes = [np.shape(value) for value in values if value is not None]
    if len(shapes) < len(values) or any(len(s) > rank for s in shapes):
        return size
    varies = {rank - len(s) + i for s in shapes for i, n in enumerate(s) if n > 1} | ({1} if vectors else set())
    return tuple(n if i in varies else min(n, _FEW) for i, n in enumerate(size))


def _measure_scale(bound: BoundRegion, size: tuple[int, ...], scale: np.ndarray) -> np.ndarray:
    """Measure a from f(s) − f(−s) at a large s.

    f(1) − f(0) would lose digits if the shift is much larger than the scale.
    """
    s = 2.0**40
    with evaluator.silence_numpy():
        wide = (bound.run([np.full(size, s)]) - bound.run([np.full(size, -s)])) / (2 * s)
    if np.isfinite(wide).all():
        return _drop_constant_axes(wide)
    return scale


def _drop_constant_axes(full: np.ndarray) -> np.ndarray:
    for axis in range(full.ndim):
        first = np.take(full, [0], axis=axis)
        if (full == first).all():
            full = first
    return full


def _is_normalizing(graph: Graph, nodes: Sequence[gs.Node]) -> bool:
    """Return True if the nodes hold a BatchNormalization or the root of a constant with several elements.

    The root of a single number is attention's 1/sqrt(d).
    """
    if any(n.op == "BatchNormalization" for n in nodes):
        return True
    seen: set[int] = set()
    stack = [t for n in nodes for t in n.inputs]
    while stack:
        node = graph.producer(stack.pop())
        if node is None or id(node) in seen or not graph.is_constant(node.outputs[0]):
            continue
        seen.add(id(node))
        if (
            node.op in ("Sqrt", "Pow", "Reciprocal")
            and (root := graph.known_value(node.outputs[0])) is not None
            and root.size > 1
        ):
            return True
        stack.extend(node.inputs)
    return False
