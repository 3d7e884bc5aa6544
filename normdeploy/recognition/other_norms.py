"""List normalizations that no form can express, so that the report names every norm of a file.

Recognition of norms starts from a square root and measures a function. This module only reads structure: it looks for
data that is divided by a statistic of itself, and reports the part of the statistic that no norm node can express. It
also lists activations that models use in place of a norm, such as Dynamic Tanh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_graphsurgeon as gs

from ..findings.records import Finding
from ..graphs.graph import Graph, value_inputs
from ..storage.onnx_domains import is_standard
from .anchors import CLAMPS, EQUALITIES, INSIDE, POINTWISE, REDUCTIONS, VIEWS
from .lookalikes import read_division

# Ops that compute a statistic from a neighborhood of each element.
_WINDOWS = frozenset({"AveragePool", "LpPool", "Conv"})
# Ops that take a part of the data.
_PARTS = frozenset({"Slice", "Gather", "Split"})
_ELEMENTWISE = (POINTWISE | CLAMPS | EQUALITIES) - {"Exp"}
_IN_STATISTIC = _ELEMENTWISE | VIEWS | REDUCTIONS | _WINDOWS | _PARTS | {"CumSum", "Pad", "Concat"}
# Ops that write a sum as a matrix product.
_PRODUCTS = frozenset({"MatMul", "Gemm"})
# A matrix with more elements than this is not read as the weights of a sum.
_MOST_WEIGHTS = 2**26
# Number of elements that are compared before the whole matrix, because most matrices are the weights of a layer.
_FIRST_WEIGHTS = 64
# Reductions whose result is even in their input.
_EVEN_REDUCTIONS = frozenset({"ReduceL1", "ReduceL2", "ReduceSumSquare", "LpPool"})
# Division by a largest or smallest value scales data for quantization; it is not a norm.
_RANGES = frozenset({"ReduceMax", "ReduceMin"})
# Maximum numbers of nodes that are visited above a denominator and above a numerator. Norms have about 12 nodes.
_UPWARD = 48
# Maximum number of tensors above a numerator that are compared with the nodes of a statistic.
_ANCESTORS = 256
_NUMERATOR = 16
# Layers into which the scale of an activation folds.
_LINEAR = frozenset({"MatMul", "Gemm", "Conv"})


def list_other_norms(graph: Graph, findings: Iterable[Finding]) -> list[Finding]:
    """List the normalizations of a rewritten graph that have no finding yet.

    Args:
        findings: findings so far; the norms that they name are omitted.

    Returns:
        a finding for each norm, with the status "refused" and the reason, and for each activation in place of a norm,
        with the status "kept".
    """
    covered = _covered_tensors(graph, [f for f in findings if not f.place])
    return [
        found
        for node in graph.nodes
        if is_standard(node) and node.outputs and node.outputs[0].name not in covered
        for found in (_list_quotient(graph, node, covered) or _list_activation(graph, node),)
        if found is not None
    ]


def _covered_tensors(graph: Graph, findings: Iterable[Finding]) -> set[str]:
    """Collect the names of the tensors that findings name, and of those between them and the inputs of their norms."""
    made = {output.name: node for node in graph.nodes for output in node.outputs}
    covered: set[str] = set()
    for finding in findings:
        starts = {finding.input, *(attempt.start for attempt in finding.attempts)}
        ends = [finding.tensor, *(name for a in finding.attempts for name in (a.end, a.tensor))]
        covered |= {*finding.tensors, *ends}
        stack = [name for name in ends if name not in starts]
        seen: set[str] = set()
        while stack and len(seen) < _UPWARD:
            name = stack.pop()
            node = made.get(name)
            if name in seen or node is None or node.op not in INSIDE:
                continue
            seen.add(name)
            stack += [t.name for t in value_inputs(node) if t.name not in starts]
        covered |= seen
    return covered - {""}


@dataclass
class _Statistic:
    """Nodes above a denominator up to the data that they summarize.

    Attributes:
        nodes: the nodes, nearest first.
        sources: ids of the tensors from which even values are computed.
        inverted: True if a reciprocal lies above the denominator.
    """

    nodes: list[gs.Node] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)
    inverted: bool = False

    @property
    def ops(self) -> set[str]:
        """Return the ops of the nodes."""
        return {node.op for node in self.nodes}


def _list_quotient(graph: Graph, node: gs.Node, covered: Collection[str]) -> Finding | None:
    """Return the finding of data divided by a statistic of itself; None if a finding covers a part of the statistic."""
    for numerator, denominator in _read_as_quotient(graph, node):
        statistic = _walk_statistic(graph, denominator)
        if not statistic.sources or (node.op == "Mul" and not statistic.inverted):
            continue
        if graph.shape(numerator) != graph.shape(node.outputs[0]):
            continue
        above = _tensors_above(graph, numerator)
        if statistic.sources.isdisjoint(above):
            continue
        if any(output.name in covered for n in statistic.nodes for output in n.outputs):
            return None
        own = _drop_numerator(graph, statistic, numerator)
        for kind, reason, applies in _CLASSES:
            if applies(graph, own, numerator):
                return Finding(
                    kind=kind,
                    status="refused",
                    tensor=node.outputs[0].name,
                    module=graph.module(node),
                    spelling=_spell(graph, [node, *statistic.nodes]),
                    reason=reason,
                )
        return read_division(graph, node) or Finding(
            kind="unknown",
            status="refused",
            tensor=node.outputs[0].name,
            module=graph.module(node),
            spelling=_spell(graph, [node, *statistic.nodes]),
            reason="it is divided by a statistic of its own input that is not the variance, mean square or length of "
            "one group",
        )
    return None


def _drop_numerator(graph: Graph, statistic: _Statistic, numerator: gs.Tensor) -> _Statistic:
    """Drop the nodes that compute the numerator, because they are not a part of the statistic's own form."""
    above: set[int] = set()
    stack = [numerator]
    while stack and len(above) < _ANCESTORS:
        t = stack.pop()
        node = graph.producer(t)
        if id(t) in above or node is None:
            continue
        above.add(id(t))
        stack += value_inputs(node)
    return replace(statistic, nodes=[n for n in statistic.nodes if id(n.outputs[0]) not in above])


def _spell(graph: Graph, nodes: Sequence[gs.Node]) -> str:
    return " ".join(n.op for n in sorted(nodes, key=graph.position_of))


def _read_as_quotient(graph: Graph, node: gs.Node) -> Iterator[tuple[gs.Tensor, gs.Tensor]]:
    """Yield the readings of a node as numerator and denominator, both computed from data."""
    if node.op not in ("Div", "Mul") or any(graph.is_shape_valued(t) or graph.is_constant(t) for t in node.inputs):
        return
    first, second = node.inputs
    yield first, second
    if node.op == "Mul":
        yield second, first


def _walk_statistic(graph: Graph, denominator: gs.Tensor) -> _Statistic:
    """Walk up from a denominator through the ops of a statistic, past its last reduction."""
    found = _Statistic()
    # Pairs: a tensor, and True if the walk has passed a reduction before it.
    stack = [(denominator, False)]
    seen: set[tuple[int, bool]] = set()
    while stack and len(found.nodes) < _UPWARD:
        t, reduced = stack.pop()
        node = graph.producer(t)
        if (id(t), reduced) in seen or node is None or not is_standard(node) or not _is_in_statistic(graph, node):
            continue
        seen.add((id(t), reduced))
        if node.op in _RANGES or graph.is_shape_valued(t):
            continue
        if all(n is not node for n in found.nodes):
            found.nodes.append(node)
        found.inverted |= not reduced and _is_inverting(graph, node)
        # A Conv of other data is a layer. A Conv of squares is a statistic.
        now = reduced or node.op in REDUCTIONS | _WINDOWS | _PRODUCTS | {"CumSum"}
        inputs = value_inputs(node)[:1] if node.op in _WINDOWS | _PARTS | {"CumSum"} else value_inputs(node)
        if now and _is_even(graph, node):
            found.sources |= {i for x in inputs for i in _tensors_above(graph, x, joined=True)}
        stack += [(x, now) for x in inputs if not graph.is_constant(x)]
    return found


def _is_inverting(graph: Graph, node: gs.Node) -> bool:
    """Return True for 1/x, c/x and a negative power."""
    if node.op == "Pow":
        power = graph.known_value(node.inputs[1])
        return power is not None and bool((power < 0).all())
    if node.op == "Exp":
        factor = _read_log_power(graph, node)
        return factor is not None and factor < 0
    return node.op == "Reciprocal" or (node.op == "Div" and graph.is_constant(node.inputs[0]))


def _is_in_statistic(graph: Graph, node: gs.Node) -> bool:
    """Return True if a statistic may contain the node."""
    if node.op in _PRODUCTS:
        return _is_sum(graph, node) or _is_product_with_itself(graph, node)
    if node.op == "Exp":
        return _read_log_power(graph, node) is not None
    return node.op in _IN_STATISTIC


def _is_sum(graph: Graph, node: gs.Node) -> bool:
    """Return True for a matrix product or a pointwise Conv that adds its inputs up with equal weights, also in groups.

    In groups, the other weights are 0.
    """
    weights = [t for t in node.inputs[:2] if graph.is_constant(t)]
    shape = graph.shape(weights[0]) if len(weights) == 1 else None
    if shape is None or not all(isinstance(n, int) for n in shape):
        return False
    sizes = [n for n in shape if isinstance(n, int)]
    if math.prod(sizes) > _MOST_WEIGHTS or (node.op == "Conv" and math.prod(sizes[2:]) != 1):
        return False
    value = graph.known_value(weights[0])
    if value is None or value.ndim < 2 or not _has_one_weight(value.ravel()[:_FIRST_WEIGHTS]):
        return False
    used = value != 0
    # A matrix may be transposed. A Conv sums over its second axis.
    axes = (1,) if node.op == "Conv" else (-1, -2)
    sums = any(bool((used.sum(axis) > 1).all()) for axis in axes)
    return sums and _has_one_weight(value)


def _has_one_weight(value: np.ndarray) -> bool:
    """Return True if all elements other than 0 are equal."""
    weights = value[value != 0]
    return not weights.size or bool(np.ptp(weights) == 0)


def _is_product_with_itself(graph: Graph, node: gs.Node) -> bool:
    """Return True for the product of a tensor and a view of the same tensor."""
    # The third input of a Gemm is added.
    factors = node.inputs[:2]
    if any(graph.is_constant(t) for t in factors):
        return False
    first, second = (_tensors_above(graph, t) for t in factors)
    return not first.isdisjoint(second)


def _read_log_power(graph: Graph, node: gs.Node) -> float | None:
    """Return the sign of c for exp(c · log(v)) with a constant c; None for another node."""
    sign = 1.0
    inner = graph.producer(node.inputs[0])
    while inner is not None and inner.op in ("Neg", "Mul", "Div"):
        factors = [graph.known_value(t) for t in inner.inputs if graph.is_constant(t)]
        data = [t for t in inner.inputs if not graph.is_constant(t)]
        if len(data) != 1 or (inner.op == "Div" and data[0] is not inner.inputs[0]):
            return None
        if inner.op == "Neg":
            sign = -sign
        elif factors[0] is None or not (np.all(factors[0] > 0) or np.all(factors[0] < 0)):
            return None
        elif np.all(factors[0] < 0):
            sign = -sign
        inner = graph.producer(data[0])
    if inner is None or inner.op != "Log":
        return None
    return sign


def _is_even(graph: Graph, node: gs.Node) -> bool:
    """Return True if the node gives the same result for x and −x."""
    if node.op in _EVEN_REDUCTIONS or node.op == "Abs":
        return True
    if node.op in _PRODUCTS:
        return _is_product_with_itself(graph, node)
    if node.op == "Mul":
        return node.inputs[0] is node.inputs[1]
    if node.op == "Pow":
        power = graph.known_value(node.inputs[1])
        return power is not None and power.size == 1 and float(power.item()) % 2 == 0
    return False


def _tensors_above(graph: Graph, t: gs.Tensor, *, joined: bool = False) -> set[int]:
    """Return the ids of ``t`` and of tensors above it, up to ops other than elementwise ones, views and parts.

    Args:
        joined: True to go on above a Concat.
    """
    above: dict[int, gs.Tensor] = {}
    stack = [t]
    while stack and len(above) < _NUMERATOR:
        t = stack.pop()
        if id(t) in above or graph.is_constant(t) or graph.is_shape_valued(t):
            continue
        above[id(t)] = t
        node = graph.producer(t)
        if node is None or not is_standard(node):
            continue
        if node.op in _ELEMENTWISE | VIEWS | _PARTS or (joined and node.op == "Concat"):
            stack += value_inputs(node)
    return set(above)


def _has_mask(graph: Graph, statistic: _Statistic, numerator: gs.Tensor) -> bool:
    """Return True if other data weights the elements of the statistic."""
    above = _tensors_above(graph, numerator)
    for node in statistic.nodes:
        if node.op != "Mul" or node.inputs[0] is node.inputs[1]:
            continue
        data = [t for t in node.inputs if not graph.is_constant(t) and not graph.is_shape_valued(t)]
        # A product with a number scales the statistic.
        if len(data) == 2 and any(_tensors_above(graph, t).isdisjoint(above) for t in data):
            return True
    return False


_Applies = Callable[[Graph, _Statistic, gs.Tensor], bool]

# Kind, reason and premise of each class of such norms. A norm belongs to the first class whose premise holds. The
# remaining ones are lookalikes or unknown.
_CLASSES: tuple[tuple[str, str, _Applies], ...] = (
    (
        "cumulative norm",
        "its statistics are cumulative along an axis; no norm node has such statistics",
        lambda graph, statistic, numerator: "CumSum" in statistic.ops,
    ),
    (
        "partial norm",
        "its statistics are those of a part of its input; no norm node has such statistics",
        lambda graph, statistic, numerator: bool(statistic.ops & _PARTS),
    ),
    (
        "joined norm",
        "its statistics are those of its input and other values together; no norm node has such statistics",
        lambda graph, statistic, numerator: "Concat" in statistic.ops,
    ),
    (
        "masked norm",
        "other data masks or weights its statistics; no norm node takes a mask",
        _has_mask,
    ),
    (
        "Lp norm",
        "it is divided by a sum of powers of absolute values with an exponent other than 2; no norm node does this",
        lambda graph, statistic, numerator: "Abs" in statistic.ops and "Pow" in statistic.ops,
    ),
    (
        "matrix-product norm",
        "its sums are written as a matrix product; sums or means over an axis can be recognized",
        lambda graph, statistic, numerator: any(
            n.op in _PRODUCTS or (n.op == "Conv" and _is_sum(graph, n)) for n in statistic.nodes
        ),
    ),
    (
        "logarithmic norm",
        "its root is written as exp of a logarithm; a square root can be recognized",
        lambda graph, statistic, numerator: {"Exp", "Log"} <= statistic.ops,
    ),
    (
        "local norm",
        "its statistics are those of a neighborhood of each element (local response or divisive normalization); no "
        "norm node has such statistics",
        lambda graph, statistic, numerator: bool(statistic.ops & _WINDOWS),
    ),
)


def _list_activation(graph: Graph, node: gs.Node) -> Finding | None:
    """Return the finding of an activation in place of a norm: γ·tanh(α·x) + β or γ·erf(α·x + s) + β.

    See Zhu et al., "Transformers without Normalization", 2025. A GELU and a cap of logits begin with the same nodes.
    But a GELU then adds 1, and a cap multiplies by a single number.
    """
    if node.op not in ("Tanh", "Erf"):
        return None
    scale = graph.producer(node.inputs[0])
    if scale is not None and scale.op == "Add" and any(_is_scalar(graph, t) for t in scale.inputs):
        scale = next((p for t in scale.inputs if (p := graph.producer(t)) is not None), None)
    if scale is None or scale.op != "Mul" or not any(_is_scalar(graph, t) for t in scale.inputs):
        return None
    consumers = graph.consumers(node.outputs[0])
    if not consumers or not all(_applies_weights(graph, node.outputs[0], c) for c in consumers):
        return None
    return Finding(
        kind={"Tanh": "DynamicTanh", "Erf": "Derf"}[node.op],
        status="kept",
        tensor=node.outputs[0].name,
        module=graph.module(node),
        spelling=f"Mul {node.op}",
        reason="it has no statistics: an activation in place of a norm; only its scale and shift can be folded",
    )


def _is_scalar(graph: Graph, t: gs.Tensor) -> bool:
    value = graph.known_value(t)
    return value is not None and value.size == 1


def _applies_weights(graph: Graph, t: gs.Tensor, consumer: gs.Node) -> bool:
    """Return True if ``consumer`` is a layer, or a Mul by a constant that is not one number."""
    if consumer.op in _LINEAR:
        return consumer.inputs[0] is t
    if consumer.op != "Mul":
        return False
    other = next((x for x in consumer.inputs if x is not t), t)
    if not graph.is_constant(other):
        return False
    value = graph.known_value(other)
    return value is None or (value.size > 1 and bool(np.ptp(value) > 0))
