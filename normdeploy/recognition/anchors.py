"""Find the square roots at which recognition starts, and the tensors around them at which a norm may begin and end.

Only ops and shapes are compared here, not values.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ..graphs.graph import Graph, value_inputs
from ..graphs.region import Refusal, compile_region
from ..norms import third_party
from ..norms.norm_table import DEFAULT, DOMAIN, OURS, StatisticsKind
from ..storage.onnx_domains import is_standard

POINTWISE = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Sum", "Mean", "Neg", "Abs", "Sqrt", "Reciprocal", "Pow", "Exp", "Log"),
        *("Cast", "CastLike", "Identity", "Dropout", "Where"),
    }
)
VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand"})
REDUCTIONS = frozenset(
    {
        *("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMin"),
        *("GlobalAveragePool", "Einsum"),
    }
)
# normdeploy's own ops, without the joined ops, which `rewriting.epilogue_fusion` recognizes.
OWN = frozenset(op for op, row in OURS.items() if not row.joined)
NORMS = frozenset(op for op, row in DEFAULT.items() if row.statistics is StatisticsKind.INPUT) | OWN
# Models clamp a variance that rounding may have made negative. After a norm, such an op is an activation.
CLAMPS = frozenset({"Relu", "Clip", "Max", "Min"})
# Flax compares the smallest and the largest value of a row and, if they are equal, sets the centered values to zero.
EQUALITIES = frozenset({"Equal", "And", "Or", "Not"})
# After a norm, these ops apply its gamma and beta.
SCALES = frozenset(op for op, row in DEFAULT.items() if row.statistics is StatisticsKind.CONSTANT)
# All ops that may be inside a norm.
INSIDE = POINTWISE | VIEWS | REDUCTIONS | NORMS | CLAMPS | EQUALITIES | SCALES

# Maximum numbers of nodes that are visited above and below a root. Norms have about 12 nodes, or about 40 with dynamic
# shapes.
_UPWARD = 96
_DOWNWARD = 48
# Maximum number of further roots that are visited above a root if no reduction lies between them. A norm contains no
# such roots. Without the limit, a chain of thousands of roots would be visited once from each of its roots.
_NESTED = 4


def find_entries(graph: Graph, root: gs.Node) -> tuple[list[gs.Tensor], list[gs.Node]]:
    """Find the tensors through which all data reaches ``root``; a norm's input can only be one of these.

    The walk ends at an op that no norm contains, and at the root of another norm.

    Returns:
        the tensors, nearest first, and the nodes passed on the way.
    """
    entering: list[gs.Tensor] = []
    passed: list[gs.Node] = []
    seen: set[int] = set()
    heap: list[tuple[float, int, gs.Tensor]] = []
    nested = 0

    def push_tensors(tensors: Iterable[gs.Tensor]) -> None:
        for t in tensors:
            if id(t) not in seen and not graph.is_shape_valued(t):
                seen.add(id(t))
                node = graph.producer(t)
                heapq.heappush(heap, (-graph.position_of(node) if node is not None else 1.0, id(t), t))

    # A norm node's scale and bias may come from other data.
    push_tensors(root.inputs[:1] if is_norm_node(root) else value_inputs(root))
    while heap and len(passed) < _UPWARD:
        t = heapq.heappop(heap)[2]
        if not heap:
            entering.append(t)
        node = graph.producer(t)
        another = (
            node is not None
            and is_anchor(graph, node)
            and (is_norm_node(node) or any(n.op in REDUCTIONS for n in passed))
        )
        if node is None or another or not _is_walkable(graph, node):
            break
        # No reduction lies between the two roots, so they belong to the same candidate.
        nested += is_anchor(graph, node)
        if nested > _NESTED:
            break
        passed.append(node)
        push_tensors(value_inputs(node))
    return entering, passed


def find_results(graph: Graph, root: gs.Node, xs: Sequence[gs.Tensor]) -> list[gs.Tensor]:
    """Find the tensors below ``root`` that only pointwise ops and views separate from it.

    The walk ends at data that has the full shape and does not come from ``xs``, such as a residual stream.

    Returns:
        the tensors in topological order.
    """
    heap = [(graph.position_of(root), id(root), root)]
    seen = {id(root)}
    tensors: dict[int, gs.Tensor] = {}
    while heap and len(tensors) < _DOWNWARD:
        node = heapq.heappop(heap)[2]
        t = node.outputs[0]
        if node is not root and any(_is_foreign_data(graph, other, t, xs, tensors) for other in value_inputs(node)):
            continue
        tensors[id(t)] = t
        statistic = bool(xs) and graph.shape(t) != graph.shape(xs[-1])
        for consumer in graph.consumers(t):
            if consumer.op in CLAMPS:
                passable = statistic
            else:
                passable = consumer.op in POINTWISE | VIEWS or _is_scaling(graph, consumer)
            if id(consumer) not in seen and passable and _is_standard_op(consumer):
                seen.add(id(consumer))
                heapq.heappush(heap, (graph.position_of(consumer), id(consumer), consumer))
    return list(tensors.values())


def _is_foreign_data(
    graph: Graph, t: gs.Tensor, y: gs.Tensor, xs: Sequence[gs.Tensor], inner: Mapping[int, gs.Tensor]
) -> bool:
    """Return True if ``t`` is as large as ``y`` and depends neither on the root nor on the last of ``xs``."""
    if id(t) in inner or graph.is_shape_valued(t) or not xs or any(t is x for x in xs):
        return False
    a = graph.shape(t)
    b = graph.shape(y)
    if a is None or b is None or len(a) != len(b) or any(d == 1 and e != 1 for d, e in zip(a, b, strict=True)):
        return False
    return isinstance(compile_region(graph, t, xs[-1:], INSIDE), Refusal)


def is_norm_node(node: gs.Node | onnx.NodeProto) -> bool:
    """Return True if the node's op is a norm: a standard op, one of normdeploy's own ops, or an op of an installed
    package.
    """
    if isinstance(node, gs.Node):
        op = node.op
    else:
        op = node.op_type
    return op in NORMS or third_party.third_party_row(node.domain, op) is not None


def is_anchor(graph: Graph, node: gs.Node) -> bool:
    """Return True for a norm node, and for a square root of a value that depends on the values of an input."""
    if is_norm_node(node):
        return node.op not in OWN or node.domain == DOMAIN
    if not _is_standard_op(node) or node.op not in ("Sqrt", "Pow", "ReduceL2"):
        return False
    if node.op == "Pow":
        shape = graph.shape(node.inputs[1]) or ()
        few = all(isinstance(d, int) for d in shape) and math.prod(shape) <= 64  # type: ignore[arg-type]
        if few:
            power = graph.known_value(node.inputs[1])
        else:
            power = None
        if power is None or len(np.unique(power)) != 1 or abs(power.flat[0]) != 0.5:
            return False
    return not graph.is_shape_valued(node.inputs[0])


def _is_standard_op(node: gs.Node) -> bool:
    return is_standard(node)


def _is_walkable(graph: Graph, node: gs.Node) -> bool:
    return _is_standard_op(node) and node.op in INSIDE - SCALES


def _is_scaling(graph: Graph, node: gs.Node) -> bool:
    fixed = node.op in SCALES and not graph.attrs(node).get("training_mode", 0)
    return fixed and all(graph.is_constant(t) for t in node.inputs[1:])


# Names of the dtypes in which norms and scales compute. numpy's kind can't tell them apart: bfloat16 and 4-bit integers
# both have the kind "V".
FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})


def find_narrowing_cast(graph: Graph, nodes: Iterable[gs.Node], dtype: np.dtype | None) -> gs.Node | None:
    """Find a Cast of data among ``nodes`` to a floating type with fewer bytes than ``dtype``.

    Returns:
        the first such node; None if no such node exists or ``dtype`` is None.
    """
    if dtype is None:
        return None
    for node in nodes:
        if node.op not in ("Cast", "CastLike") or graph.is_shape_valued(node.outputs[0]):
            continue
        if node.op == "Cast":
            target = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(int(graph.attrs(node).get("to", 1))))
        else:
            target = graph.dtype(node.inputs[1])
        if target is not None and target.kind not in "iub" and target.itemsize < dtype.itemsize:
            return node
    return None
