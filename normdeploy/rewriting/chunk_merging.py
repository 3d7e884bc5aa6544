"""Merge equal norms of the parts of a tensor into one: Concat(norm(x₁), …, norm(xₙ)) = norm(x).

Models split a tensor along an axis over which nothing is summed, and normalize each part by itself: StableLM its heads,
Mochi's decoder its frames. This module writes the nodes of one part for the whole tensor, before norms are recognized.
So the spelling of the norm does not matter. The proof decides whether the parts were independent.

If each part has a scale and bias of its own, the norm gets a scale of 1, and a Mul and an Add apply the stacked
parameters. A norm node with a scale per part would be one node less, but the nodes of some runtimes read only the last
axes of a scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from ..dtypes import is_float_dtype
from ..graphs.graph import Graph
from ..norms.norm_table import STANDARD
from ..proof.computed_constants import ComputedConstants
from ..proof.interpreter import ProofInterpreter
from ..proof.op_definitions import TABLE
from ..proof.region_evaluation import constant_value
from ..proof.value import Value
from ..recognition.anchors import is_anchor
from .certification import pair_of
from .node_queries import is_standard_op, sole_consumer
from .proposals import Proposal, RewriteTarget, propose_for_speed
from .rounding_verdicts import fold_trial_maker

STAGE = "chunks"
# Maximum number of nodes between a part and the Concat; a norm by hand has about 12, with shapes about 20
_LONGEST = 32
# Norms of whole rows, whose scale and bias may differ between the parts
_ROW_NORMS = tuple(op for op, row in STANDARD.items() if row.kind in ("LayerNorm", "RMSNorm") and row.has_scale)
_AFFINE = ("Mul", "Add", "Sub", "Div")
# Ops whose second input is the shape of their result
_SHAPED = ("Reshape", "Expand")


@dataclass(frozen=True)
class StackedConstant:
    """Constant that holds one constant of each part, along an axis.

    Attributes:
        stacked: the written constant.
        parts: the constants of the parts, in order.
        axis: axis of the tensor that is split, from the right.
    """

    stacked: gs.Constant
    parts: tuple[gs.Tensor, ...]
    axis: int


@dataclass(frozen=True)
class StackedConstants(ComputedConstants):
    """Constants of the merged nodes, as Concats of those of the parts."""

    stacks: tuple[StackedConstant, ...]

    def computed_constants(self) -> list[gs.Constant]:
        """List the written constants.

        Returns:
            one per stack.
        """
        return [stack.stacked for stack in self.stacks]

    def template_with_names(self, names: Mapping[int, object]) -> tuple[object, ...]:
        """Describe the stacks.

        Returns:
            the axis and the number of parts of each; the regions hold the constants.
        """
        return tuple((stack.axis, len(stack.parts)) for stack in self.stacks)

    def evaluate_constants(self, m: ProofInterpreter, graph: Graph, *, absolute: bool = False) -> dict[int, Value]:
        """Concatenate the constants of the parts.

        Args:
            absolute: use the magnitudes.

        Returns:
            values by the ids of the constants.
        """
        made: dict[int, Value] = {}
        for stack in self.stacks:
            parts = [_with_rank(constant_value(m, graph, t), len(stack.stacked.shape)) for t in stack.parts]
            value = TABLE["Concat"](m, parts, {"axis": stack.axis}, graph.opset, 1)
            if absolute:
                value.f = np.abs(value.f)
            made[id(stack.stacked)] = value
        return made


def _with_rank(value: Value, rank: int) -> Value:
    """Add or drop leading axes of size 1."""
    missing = rank - len(value.axes)
    return value.with_axes((*((),) * missing, *value.axes[max(-missing, 0) :]))


def propose_chunk_merge(graph: Graph, node: gs.Node, target: RewriteTarget) -> Proposal | None:
    """Propose to apply the nodes between the Split ``node`` and a Concat once, to the whole tensor.

    Returns:
        the proposal; None if ``node`` does not split a tensor into parts with equal norms that a Concat joins.
    """
    if not is_standard_op(node, "Split") or len(node.outputs) < 2:
        return None
    x = node.inputs[0]
    shape = graph.shape(x)
    end = _find_concat(graph, node)
    if shape is None or end is None:
        return None
    attrs = graph.attrs(end)
    axis = int(graph.attrs(node).get("axis", 0)) % len(shape)
    if int(attrs["axis"]) % len(shape) != axis:
        return None
    chains: list[list[gs.Node]] = []
    for part, joined in zip(node.outputs, end.inputs, strict=True):
        chain = _nodes_between(graph, part, joined)
        if chain is None or (chains and len(chain) != len(chains[0])):
            return None
        chains.append(chain)
    sizes = [own[axis] for part in node.outputs if (own := graph.shape(part)) is not None]
    if len(sizes) < len(chains) or not any(is_anchor(graph, n) for n in chains[0]):
        return None
    writer = _WholeWriter(graph, node, axis, sizes, chains)
    made = writer.write_nodes()
    y = end.outputs[0]
    dtype = graph.dtype(y)
    if made is None or dtype is None or len(made) >= sum(map(len, chains)) + 2:
        return None
    stacks = tuple(writer.stacks)
    return propose_for_speed(
        "chunks",
        y,
        made,
        f"the norms of {len(chains)} parts as one",
        graph.module(chains[0][0]),
        (pair_of(graph, y, [x], made[-1].outputs[0]),),
        trial=fold_trial_maker((), dtype),
        expressions=StackedConstants(stacks) if stacks else None,
    )


def _find_concat(graph: Graph, split: gs.Node) -> gs.Node | None:
    """Find the Concat of as many tensors as ``split`` has outputs, below its first output."""
    seen: set[int] = set()
    waiting = [split.outputs[0]]
    while waiting and len(seen) <= _LONGEST:
        for reader in graph.consumers(waiting.pop()):
            if id(reader) in seen:
                continue
            seen.add(id(reader))
            if is_standard_op(reader, "Concat") and len(reader.inputs) == len(split.outputs):
                return reader
            waiting += reader.outputs
    return None


def _nodes_between(graph: Graph, part: gs.Tensor, joined: gs.Tensor) -> list[gs.Node] | None:
    """Collect the nodes that compute ``joined`` from ``part`` and constants alone, and that only compute it.

    Returns:
        nodes in an order that depends on their structure alone; None if others read or compute a part of them.
    """
    order: list[gs.Node] = []
    seen: set[int] = {id(part)}

    def collect(t: gs.Tensor) -> bool:
        if id(t) in seen or t.is_empty() or graph.is_constant(t):
            return True
        node = graph.producer(t)
        if node is None or len(seen) > 2 * _LONGEST:
            return False
        seen.update(id(output) for output in node.outputs)
        if not all(collect(i) for i in node.inputs):
            return False
        order.append(node)
        return True

    if not collect(joined) or not order or len(order) > _LONGEST:
        return None
    inside = {id(node) for node in order}
    for t in (part, *(output for node in order for output in node.outputs)):
        readers = [id(reader) for reader in graph.consumers(t)]
        if graph.is_output(t) or (t is not joined and not inside.issuperset(readers)):
            return None
    if sole_consumer(graph, joined) is None:
        return None
    return order


class _WholeWriter:
    """Writes the nodes of the first part for the whole tensor.

    Attributes:
        stacks: constants stacked so far.
    """

    def __init__(
        self,
        graph: Graph,
        split: gs.Node,
        axis: int,
        sizes: Sequence[int | str | None],
        chains: Sequence[Sequence[gs.Node]],
    ) -> None:
        self._graph = graph
        self._rank = len(graph.shape(split.inputs[0]) or ())
        self._axis = axis
        self._sizes = list(sizes)
        self._chains = chains
        # The tensors of each part by the id of the one of the first part
        self._alike: list[dict[int, gs.Tensor]] = [
            {id(split.outputs[0]): part, **dict(_matching_outputs(chains[0], chain))}
            for part, chain in zip(split.outputs, chains, strict=True)
        ]
        self._whole: dict[int, gs.Tensor] = {id(split.outputs[0]): split.inputs[0]}
        self.stacks: list[StackedConstant] = []

    def write_nodes(self) -> list[gs.Node] | None:
        """Write the nodes.

        Returns:
            nodes in order, the result last; None if the parts differ in more than scales and biases.
        """
        made: list[gs.Node] = []
        for steps in zip(*self._chains, strict=True):
            written = self._write_step(steps)
            if written is None:
                return None
            made += written
        return made

    def _write_step(self, steps: Sequence[gs.Node]) -> list[gs.Node] | None:
        graph, node = self._graph, steps[0]
        if any(
            (s.op, s.domain or "", graph.attrs(s)) != (node.op, node.domain or "", graph.attrs(node)) for s in steps
        ):
            return None
        if len({(len(s.inputs), len(s.outputs)) for s in steps}) > 1:
            return None
        inputs = [self._whole_input(node, i, [s.inputs[i] for s in steps]) for i in range(len(node.inputs))]
        affine: list[tuple[str, gs.Constant]] = []
        if is_standard_op(node, *_ROW_NORMS) and any(t is None for t in inputs[1:]):
            # The bias of a part is added after the part's scale.
            for i in range(1 if inputs[1] is None else 2, len(inputs)):
                own = inputs[i]
                if own is not None and own.is_empty():
                    continue
                stacked = self._stack([s.inputs[i] for s in steps], node)
                if stacked is None:
                    return None
                inputs[i] = self._neutral_parameter(node, i)
                affine.append(("Mul" if i == 1 else "Add", stacked))
        given = [t for t in inputs if t is not None]
        if len(given) < len(inputs):
            return None
        y = node.outputs[0]
        made = [graph.make_node(node.op, given, y, graph.attrs(node), node.domain or "", outputs=len(node.outputs))]
        for op, constant in affine:
            made.append(graph.make_node(op, [made[-1].outputs[0], constant], y))
        self._whole |= {id(old): new for old, new in zip(node.outputs, made[0].outputs, strict=True)}
        self._whole[id(y)] = made[-1].outputs[0]
        return made

    def _whole_input(self, node: gs.Node, i: int, given: Sequence[gs.Tensor]) -> gs.Tensor | None:
        """Return the input of the node that reads the whole tensor; None if the parts have different ones."""
        graph, first = self._graph, given[0]
        if any(t.is_empty() for t in given):
            return first if all(t.is_empty() for t in given) else None
        if not all(map(graph.is_constant, given)):
            same = all(alike.get(id(first)) is t for alike, t in zip(self._alike, given, strict=True))
            return self._whole.get(id(first)) if same else None
        values = [graph.known_value(t) for t in given]
        if i == 1 and is_standard_op(node, *_SHAPED):
            shape = self._whole_shape(node, values)
            if shape is not None:
                return shape
        if _all_equal(values) and len({graph.dtype(t) for t in given}) == 1:
            return first
        if is_standard_op(node, *_AFFINE):
            return self._stack(given, node)
        return None

    def _whole_shape(self, node: gs.Node, values: Sequence[np.ndarray | None]) -> gs.Constant | None:
        """Return the shape in which the size of a part is that of the whole; None if no shape names it."""
        shapes = [
            value.tolist() for value in values if value is not None and value.ndim == 1 and value.size > self._axis
        ]
        if [shape[self._axis] for shape in shapes] != self._sizes:
            return None
        total = sum(size for size in self._sizes if isinstance(size, int))
        whole = [[*shape[: self._axis], total, *shape[self._axis + 1 :]] for shape in shapes]
        if any(shape != whole[0] for shape in whole):
            return None
        return self._graph.add_constant(f"{node.outputs[0].name}_shape", np.array(whole[0], dtype=np.int64), np.int64)

    def _stack(self, given: Sequence[gs.Tensor], node: gs.Node) -> gs.Constant | None:
        """Stack one constant of each part along the split axis, if each part is one place."""
        graph = self._graph
        values = [graph.known_value(t) for t in given]
        dtype = graph.dtype(given[0])
        if (
            dtype is None
            or not is_float_dtype(dtype)
            or set(self._sizes) != {1}
            or not all(map(graph.is_constant, given))
        ):
            return None
        shape = graph.shape(node.outputs[0])
        if shape is None or len(shape) != self._rank:
            return None
        known = [value for value in values if value is not None and value.ndim <= self._rank]
        if len(known) < len(values) or len({(value.shape, value.dtype) for value in known}) > 1:
            return None
        laid = [value.reshape((1,) * (self._rank - value.ndim) + value.shape) for value in known]
        if laid[0].shape[self._axis] != 1:
            return None
        made = np.concatenate(laid, axis=self._axis)
        while made.ndim > self._rank - self._axis and made.shape[0] == 1:
            made = made[0]
        constant = graph.add_constant(f"{given[0].name}_stacked", made.astype(np.float64), dtype)
        self.stacks.append(StackedConstant(constant, tuple(given), self._axis - self._rank))
        return constant

    def _neutral_parameter(self, node: gs.Node, i: int) -> gs.Constant | None:
        """Return a scale of ones or a bias of zeros over all normalized axes, in the shape of the part's own."""
        graph = self._graph
        value = graph.known_value(node.inputs[i])
        dtype = graph.dtype(node.inputs[i])
        axis = int(graph.attrs(node).get("axis", -1)) % self._rank
        if value is None or dtype is None or value.ndim != self._rank - axis:
            return None
        neutral = np.ones(value.shape) if i == 1 else np.zeros(value.shape)
        return graph.add_constant(f"{node.outputs[0].name}_neutral", neutral, dtype)


def _matching_outputs(first: Sequence[gs.Node], other: Sequence[gs.Node]) -> Iterator[tuple[int, gs.Tensor]]:
    """Pair the outputs of two chains: (id of the first chain's tensor, the other chain's)."""
    for one, two in zip(first, other, strict=True):
        yield from ((id(a), b) for a, b in zip(one.outputs, two.outputs, strict=False))


def _all_equal(values: Sequence[np.ndarray | None]) -> bool:
    first = values[0]
    return first is not None and all(value is not None and np.array_equal(value, first) for value in values)
