"""Find the parts of a graph that only constants feed, and the norms in these parts.

Such a part can be computed once and stored.

Examples are weight standardization (Qiao et al., 2019, arXiv:1903.10520) and weight norm (Salimans and Kingma, 2016,
arXiv:1602.07868). Others are a norm of a learned constant (the first norm of StyleGAN) and a product of two weights.

The part is computed in float64, not in the file's type. So it may contain only continuous functions, and ops that only
move numbers. Round, Floor, comparisons, and Casts to an integer or a narrower type are called steps. A part ends before
a step that reads a computed number, because a rounding error of the number could change the step's result.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ..dtypes import is_float_dtype, is_integer_dtype
from ..graphs.graph import Graph, value_inputs
from .anchors import NORMS, POINTWISE, REDUCTIONS, SCALES, VIEWS, is_norm_node

_MOVES = VIEWS | {
    "Concat",
    "Gather",
    "Slice",
    "Split",
    "Pad",
    "Tile",
    "ConstantOfShape",
    "Identity",
    "Dropout",
    "Constant",
}
# These ops return stored numbers unchanged or with another sign.
_EXACT = _MOVES | {
    "Abs",
    "Neg",
    "Relu",
    "Max",
    "Min",
    "Clip",
    "ReduceMax",
    "ReduceMin",
    "Where",
}
_STEPS = frozenset(
    {
        *("Ceil", "Floor", "Round", "Sign", "Mod", "Range", "IsNaN"),
        *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not"),
    }
)
_GROW = frozenset({"ConstantOfShape", "Range", "Tile", "Pad", "Expand"})
_HEAVY = REDUCTIONS | NORMS | SCALES | {"MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose"}
# Minimum number of elements of a result that is worth a stored constant
_LARGE = 2**10
# Two groups of nodes that share a stored constant with more elements than this form one part. Shared axes and scalars
# do not join groups.
_SHARED = 2**8
# Maximum number of nodes that are visited above and below a root
_FARTHEST = 64


@dataclass(frozen=True)
class ConstantSubgraph:
    """Connected nodes that only constants feed, in topological order.

    Attributes:
        results: tensors of these nodes that other nodes read.
        fixed: tensors of these nodes that are outputs of the graph.
        sources: the stored constants that the nodes read.
    """

    nodes: tuple[gs.Node, ...]
    results: tuple[gs.Tensor, ...]
    fixed: tuple[gs.Tensor, ...]
    sources: tuple[gs.Tensor, ...]

    def file_growth(self, graph: Graph, chosen: Container[int]) -> int:
        """Compute how the file grows if some results are stored and everything that is no longer read is removed.

        Args:
            chosen: ids of the results to store.

        Returns:
            bytes gained; negative if the file shrinks.
        """
        stack = [t for t in self.results if id(t) not in chosen] + list(self.fixed)
        inside = {id(o): n for n in self.nodes for o in n.outputs}
        live: set[int] = set()
        while stack:
            node = inside.get(id(stack.pop()))
            if node is not None and id(node) not in live:
                live.add(id(node))
                stack += [t for t in node.inputs if id(t) not in chosen]
        gained = sum(byte_count(graph, t) for t in self.results if id(t) in chosen)
        own = {id(n) for n in self.nodes} - live
        return gained - sum(
            byte_count(graph, s) for s in self.sources if all(id(r) in own for r in graph.all_consumers_of(s))
        )


@dataclass(frozen=True)
class ConstantNorm:
    """Norm whose input is constant.

    Attributes:
        node: the norm node, or the root.
        kind: for example "weight norm".
        tensor: name of the node's output in the file.
    """

    node: gs.Node
    kind: str
    spelling: str
    tensor: str
    module: str


def find_constant_subgraphs(graph: Graph, barred: Container[int]) -> list[ConstantSubgraph]:
    """Find the constant parts that are worth computing once.

    Args:
        barred: ids of nodes that no part may contain.

    Returns:
        the parts; two nodes are in one part if they are connected or share a large constant.
    """
    nodes = _computable_nodes(graph, barred)
    inside = {id(o): n for n in nodes for o in n.outputs}
    group: dict[int, int] = {id(n): id(n) for n in nodes}

    def find_root(key: int) -> int:
        while group.setdefault(key, key) != key:
            group[key] = key = group[group[key]]
        return key

    for node in nodes:
        for t in node.inputs:
            if id(t) in inside:
                group[find_root(id(inside[id(t)]))] = find_root(id(node))
            elif (element_count(graph, t) or 0) > _SHARED:
                group[find_root(id(t))] = find_root(id(node))
    together: dict[int, list[gs.Node]] = {}
    for node in nodes:
        together.setdefault(find_root(id(node)), []).append(node)
    return [
        _make_subgraph(graph, members)
        for members in together.values()
        if any(_is_worth_computing(graph, n) for n in members)
    ]


def _make_subgraph(graph: Graph, nodes: list[gs.Node]) -> ConstantSubgraph:
    """Build the `ConstantSubgraph` of connected nodes."""
    own = {id(n) for n in nodes}
    made = [o for n in nodes for o in n.outputs]
    fixed = [t for t in made if graph.is_output(t)]
    results = [t for t in made if not graph.is_output(t) and any(id(r) not in own for r in graph.all_consumers_of(t))]
    inner = {id(t) for t in made}
    sources = {id(t): t for n in nodes for t in n.inputs if id(t) not in inner and not t.is_empty()}
    return ConstantSubgraph(tuple(nodes), tuple(results), tuple(fixed), tuple(sources.values()))


def _is_worth_computing(graph: Graph, node: gs.Node) -> bool:
    """Return True if the node computes floating-point numbers, and it is a norm, a product or has a large result."""
    if node.op in _MOVES | _STEPS | {"Where", "Cast", "CastLike"} or not _is_floating(graph, node.outputs[0]):
        return False
    return node.op in _HEAVY or (element_count(graph, node.outputs[0]) or 0) > _LARGE


def _computable_nodes(graph: Graph, barred: Container[int]) -> list[gs.Node]:
    """List the nodes, in topological order, that float64 may compute in place of the file's type."""
    nodes: list[gs.Node] = []
    # id of a computed tensor -> True if it holds stored numbers unchanged
    exact: dict[int, bool] = {}
    # Inputs of the steps that read computed numbers.
    decided: list[gs.Tensor] = []
    for node in graph.nodes:
        if node.op == "Constant" or not node.outputs or not graph.is_constant(node.outputs[0]):
            continue
        inputs = value_inputs(node)
        pure = all(exact.get(id(t), _is_stored_constant(graph, t)) or not _is_floating(graph, t) for t in inputs)
        allowed = _is_allowed(graph, node, pure)
        if not allowed and (node.op in _STEPS or node.op in ("Cast", "CastLike")):
            decided += inputs
        if (
            not allowed
            or id(node) in barred
            or not all(_is_stored_constant(graph, t) or id(t) in exact for t in inputs)
        ):
            continue
        nodes.append(node)
        kept = pure and (node.op in _EXACT | _STEPS or node.op in ("Cast", "CastLike"))
        exact.update((id(o), kept or not _is_floating(graph, o)) for o in node.outputs)
    return _drop_decided_nodes(nodes, {id(t) for t in decided}, exact)


def _drop_decided_nodes(nodes: list[gs.Node], decided: set[int], exact: Mapping[int, bool]) -> list[gs.Node]:
    """Drop the nodes whose computed numbers a later step reads."""
    kept = []
    for node in reversed(nodes):
        if any(id(o) in decided for o in node.outputs) and not all(exact[id(o)] for o in node.outputs):
            decided.update(id(t) for t in value_inputs(node))
        else:
            kept.append(node)
    return kept[::-1]


def _is_allowed(graph: Graph, node: gs.Node, pure: bool) -> bool:
    """Return True if float64 may compute the node in place of the file's type.

    Args:
        pure: True if all floating-point inputs hold stored numbers.
    """
    for t in node.outputs:
        if t.name and element_count(graph, t) is None and (_is_floating(graph, t) or node.op in _GROW):
            return False
    if node.op in ("Cast", "CastLike"):
        source = graph.dtype(node.inputs[0])
        target = _cast_target(graph, node)
        if source is None or target is None:
            return False
        # Strings have no mantissa to compare.
        if "O" in (source.kind, target.kind):
            return False
        if target.kind == "b" or is_integer_dtype(target):
            return pure
        return _holds_exactly(graph, node.inputs[0], source, target)
    return pure or node.op not in _STEPS


def _holds_exactly(graph: Graph, t: gs.Tensor, source: np.dtype, target: np.dtype) -> bool:
    """Return True if a Cast of ``t`` to the floating ``target`` rounds none of its numbers."""
    own = ml_dtypes.finfo(target)
    if source.kind == "b" or is_integer_dtype(source):
        # The target type represents every integer up to this number.
        most = 2 ** (own.nmant + 1)
        if source.kind == "b" or 8 * source.itemsize <= own.nmant + 1:
            return True
        # torch divides an unbiased variance by a count that it computes from the shape.
        value = graph.known_value(t)
        return value is not None and bool((np.abs(value.astype(np.float64)) <= most).all())
    theirs = ml_dtypes.finfo(source)
    return own.nmant >= theirs.nmant and own.maxexp >= theirs.maxexp and own.minexp <= theirs.minexp


def _cast_target(graph: Graph, node: gs.Node) -> np.dtype | None:
    if node.op == "CastLike":
        return graph.dtype(node.inputs[1])
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(int(graph.attrs(node)["to"])))


def _is_stored_constant(graph: Graph, t: gs.Tensor) -> bool:
    node = graph.producer(t)
    return isinstance(t, gs.Constant) or (node is not None and node.op == "Constant")


def _is_floating(graph: Graph, t: gs.Tensor) -> bool:
    dtype = graph.dtype(t)
    return dtype is None or is_float_dtype(dtype)


def element_count(graph: Graph, t: gs.Tensor) -> int | None:
    """Count the elements of ``t``.

    Returns:
        the number, or None if the file does not state it.
    """
    shape = graph.shape(t)
    return None if shape is None or not all(isinstance(d, int) for d in shape) else math.prod(shape)  # type: ignore[arg-type]


def byte_count(graph: Graph, t: gs.Tensor) -> int:
    """Compute the bytes of ``t``.

    Returns:
        the number; 0 if its shape is unknown, and 4 bytes per element if its dtype is unknown.
    """
    dtype = graph.dtype(t)
    return (element_count(graph, t) or 0) * (4 if dtype is None else dtype.itemsize)


# ------------------------------------------------------------------ norms


def find_sized_data(graph: Graph) -> list[gs.Tensor]:
    """Find the data of norms that only constants and dynamic sizes determine.

    Examples are a learned constant that is repeated for each row of the batch, the rows that a table has for start
    tokens, and encoded positions. Scalars are not data: a norm may divide by a number that it computes from a size.

    Returns:
        the tensors in which the data begins.
    """
    found: dict[int, gs.Tensor] = {}
    for root in graph.nodes:
        if not (is_norm_node(root) or _is_root(graph, root)) or not root.inputs:
            continue
        if not _has_open_size(graph, root.inputs[0]):
            continue
        nodes, reduced = _walk_above_root(graph, root)
        if not reduced and not is_norm_node(root):
            continue
        found.update((id(t), t) for node in nodes for t in _list_beginning_data(graph, node))
    return list(found.values())


def _list_beginning_data(graph: Graph, node: gs.Node) -> list[gs.Tensor]:
    """List the inputs of a node, or its output, in which data of an open size begins."""
    ends = [t for t in value_inputs(node) if _has_open_size(graph, t) and not _is_above_root(graph, t)]
    first = node.inputs[0]
    repeats = node.op in ("Expand", "Tile") and graph.is_constant(first) and element_count(graph, first) != 1
    converts = node.op in ("Cast", "CastLike") and not _is_floating(graph, first)
    if repeats or converts:
        ends.append(node.outputs[0])
    return [t for t in ends if element_count(graph, t) != 1]


def _has_open_size(graph: Graph, t: gs.Tensor) -> bool:
    return not graph.is_constant(t) and graph.is_shape_valued(t) and _is_floating(graph, t)


def find_constant_norms(graph: Graph) -> Iterator[ConstantNorm]:
    """Find the norms whose input is constant.

    Yields:
        the norms in the graph's order.
    """
    for node in graph.nodes:
        if not node.outputs or not graph.is_constant(node.outputs[0]) or not graph.all_consumers_of(node.outputs[0]):
            continue
        if node.op in SCALES or is_norm_node(node):
            if node.op in SCALES:
                usual = "weight standardization"
            else:
                usual = node.op.replace("Normalization", "Norm")
            yield ConstantNorm(node, usual, node.op, node.outputs[0].name, graph.module(node))
        elif _is_root(graph, node) and (above := _statistic_nodes(graph, node)):
            centered = any(n.op == "Sub" for n in above)
            if centered:
                weight = "weight standardization"
            else:
                weight = "weight norm"
            if _feeds_weight(graph, node):
                kind = weight
            else:
                kind = "norm of a constant"
            spelling = " ".join(n.op for n in sorted(above, key=graph.position_of))
            yield ConstantNorm(node, kind, spelling, node.outputs[0].name, graph.module(node))


def _is_root(graph: Graph, node: gs.Node) -> bool:
    if node.op == "Pow":
        if (element_count(graph, node.inputs[1]) or 0) == 1:
            power = graph.known_value(node.inputs[1])
        else:
            power = None
        return power is not None and abs(float(power.reshape(-1)[0])) == 0.5
    return node.op in ("Sqrt", "ReduceL2")


def _statistic_nodes(graph: Graph, root: gs.Node) -> list[gs.Node]:
    """List the nodes of the statistic under the root; empty if they do not reduce several floating-point numbers."""
    nodes, reduced = _walk_above_root(graph, root)
    if reduced:
        return nodes
    return []


def _walk_above_root(graph: Graph, root: gs.Node) -> tuple[list[gs.Node], bool]:
    """Collect a root and the nodes above it, and whether one of them reduces several floating-point numbers."""
    nodes = [root]
    stack = [root]
    seen = {id(root)}
    reduced = False
    while stack and len(nodes) < _FARTHEST:
        node = stack.pop()
        if node.op in REDUCTIONS:
            reduced = reduced or (_is_floating(graph, node.inputs[0]) and element_count(graph, node.inputs[0]) != 1)
        for t in value_inputs(node):
            above = graph.producer(t)
            if above is not None and id(above) not in seen and _is_above_root(graph, t):
                seen.add(id(above))
                nodes.append(above)
                stack.append(above)
    return nodes, reduced


def _is_above_root(graph: Graph, t: gs.Tensor) -> bool:
    """Return True if the walk above a root passes the node that computes ``t``."""
    node = graph.producer(t)
    return node is not None and node.op in POINTWISE | VIEWS | REDUCTIONS | {"Tile"} and _is_floating(graph, t)


def _feeds_weight(graph: Graph, root: gs.Node) -> bool:
    """Return True if a value computed from the root is the weight of a linear op."""
    stack = [root]
    seen = {id(root)}
    while stack and len(seen) < _FARTHEST:
        for t in stack.pop().outputs:
            for reader in graph.all_consumers_of(t):
                if not graph.is_constant(reader.outputs[0]):
                    if reader.op in ("Conv", "ConvTranspose", "Gemm", "MatMul") and any(i is t for i in reader.inputs):
                        return True
                elif id(reader) not in seen:
                    seen.add(id(reader))
                    stack.append(reader)
    return False
