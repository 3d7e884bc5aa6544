"""Find divisions by a statistic without a square root: they are not norms, but may have been meant as norms.

The statistic is computed from the numerator or from the numerator's input x:

    (x − mean)/var,   (x − mean)/mean|x − mean|,   (x − min)/(max − min),   x/mean(x²),   x/max|x|

Recognition starts at a root over a reduction, so it never finds these divisions. Divisions by a sum of x itself
(attention weights, softmax) are not reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import onnx
import onnx_graphsurgeon as gs

from ..findings.records import Finding
from ..graphs.graph import Graph, value_inputs
from ..storage.onnx_domains import is_standard
from .anchors import CLAMPS, POINTWISE, REDUCTIONS, VIEWS, is_anchor

_STEPS = (POINTWISE | VIEWS | CLAMPS) - {"Exp", "Log"}
# Maximum number of nodes that are visited above a denominator, and above each of its reductions
_FARTHEST = 24


def find_lookalikes(proto: onnx.ModelProto, findings: Sequence[Finding]) -> list[Finding]:
    """Find the divisions by a statistic in the main graph of ``proto`` that no finding covers.

    Returns:
        a refused finding per division.
    """
    graph = Graph(proto)
    taken = {t for f in findings if not f.place for t in (f.tensor, *f.tensors, *(a.end for a in f.attempts))}
    readings = (
        read_division(graph, n) for n in graph.nodes if n.op in ("Div", "Mul") and n.outputs[0].name not in taken
    )
    return [f for f in readings if f is not None]


def read_division(graph: Graph, node: gs.Node) -> Finding | None:
    """Read a Div or Mul as a division by a statistic of its input; None if it is not such a division."""
    for numerator, denominator in _fractions_of(graph, node):
        below = _walk_upwards(graph, denominator)
        if below.root or not below.reductions:
            continue
        x, is_centered = _uncentered_input(graph, numerator)
        above = [_walk_upwards(graph, r.inputs[0], stop=(x, numerator)) for r in below.reductions]
        reason = _describe_denominator(graph, below.reductions, above, is_centered)
        if reason and all(a.met for a in above):
            nodes = sorted({id(n): n for w in (below, *above) for n in w.nodes}.values(), key=graph.position_of)
            nodes = [
                *(n for n in [graph.producer(numerator)] if is_centered and n is not None and n not in nodes),
                *nodes,
                node,
            ]
            return Finding(
                kind="lookalike",
                status="refused",
                tensor=node.outputs[0].name,
                module=graph.module(node),
                spelling=" ".join(n.op for n in nodes if not graph.is_shape_valued(n.outputs[0])),
                reason=f"{reason}; recognition starts from a square root over a reduction",
                dtype=d.name if (d := graph.dtype(x)) is not None else "",
                input=x.name,
                shape=graph.shape(x),
                tensors=tuple(o.name for n in nodes for o in n.outputs),
            )
    return None


def _fractions_of(graph: Graph, node: gs.Node) -> Iterator[tuple[gs.Tensor, gs.Tensor]]:
    """Yield (numerator, denominator) of a Div, or of a Mul with a Reciprocal, if both are data."""
    a = node.inputs[0]
    b = node.inputs[-1]
    if graph.is_shape_valued(a) or graph.is_shape_valued(b) or a is b:
        return
    if node.op == "Div":
        yield a, b
        return
    for x, other in ((a, b), (b, a)):
        above = graph.producer(other)
        if above is not None and above.op == "Reciprocal":
            yield x, above.inputs[0]


@dataclass
class _UpwardWalk:
    """Nodes above a tensor, up to the reductions or to one of the ``stop`` tensors.

    Attributes:
        reductions: the reductions that were reached.
        root: True if a square root is among the nodes.
        met: True if a ``stop`` tensor was reached.
    """

    nodes: list[gs.Node] = field(default_factory=list)
    reductions: list[gs.Node] = field(default_factory=list)
    root: bool = False
    met: bool = False


def _walk_upwards(graph: Graph, t: gs.Tensor, stop: Sequence[gs.Tensor] = ()) -> _UpwardWalk:
    """Collect the nodes above ``t``.

    Without ``stop``, the walk ends at reductions. With ``stop``, the walk continues above reductions and ends at the
    tensors in ``stop``.
    """
    walk = _UpwardWalk()
    stack = [t]
    seen = {id(t)}
    while stack and len(walk.nodes) < _FARTHEST:
        t = stack.pop()
        if any(t is s for s in stop):
            walk.met = True
            continue
        node = graph.producer(t)
        if node is None or graph.is_shape_valued(t) or not is_standard(node):
            continue
        walk.root = walk.root or is_anchor(graph, node)
        if node.op in REDUCTIONS:
            walk.reductions.append(node)
        if node.op in REDUCTIONS and not stop:
            walk.nodes.append(node)
        elif node.op in _STEPS or node.op in REDUCTIONS:
            walk.nodes.append(node)
            new = [i for i in value_inputs(node) if id(i) not in seen]
            seen.update(map(id, new))
            stack += new
    return walk


def _uncentered_input(graph: Graph, numerator: gs.Tensor) -> tuple[gs.Tensor, bool]:
    """Return x, and True if the numerator is x minus a reduction of x, or False if it is x."""
    node = graph.producer(numerator)
    if node is not None and node.op == "Sub":
        for reduction in _walk_upwards(graph, node.inputs[1]).reductions:
            if _walk_upwards(graph, reduction.inputs[0], stop=node.inputs[:1]).met:
                return node.inputs[0], True
    return numerator, False


def _describe_denominator(
    graph: Graph, reductions: Sequence[gs.Node], above: Sequence[_UpwardWalk], is_centered: bool
) -> str | None:
    """Describe the denominator; None if it does not resemble the denominator of a norm."""
    ops = {r.op for r in reductions}
    if {"ReduceMax", "ReduceMin"} <= ops:
        return "it divides by a range (largest minus smallest), not by a standard deviation"
    magnitudes = "ReduceL1" in ops or any(n.op == "Abs" for a in above for n in a.nodes)
    if magnitudes:
        return (
            f"it divides by {'the largest magnitude' if 'ReduceMax' in ops else 'a mean or sum of magnitudes'}, "
            "not by a standard deviation"
        )
    if "ReduceSumSquare" in ops or any(_is_square(graph, n) for a in above for n in a.nodes):
        return f"it divides by {'a variance' if is_centered else 'a mean or sum of squares'} without taking the root"
    return None


def _is_square(graph: Graph, node: gs.Node) -> bool:
    if node.op == "Mul":
        return node.inputs[0] is node.inputs[1]
    if node.op == "Pow":
        power = graph.known_value(node.inputs[1])
    else:
        power = None
    return power is not None and power.size == 1 and power.item() == 2
