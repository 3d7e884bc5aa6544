"""Explain a division by a deviation whose numerator is neither the input nor the input minus its mean.

An example is EvoNorm's x·sigmoid(v·x) (arXiv:2004.02967).
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from ..graphs.graph import Graph, value_inputs
from .anchors import INSIDE, VIEWS
from .fit_measurement import EVEN

# Maximum number of nodes that are visited below a deviation, and above its numerator
_FARTHEST = 24


def explain_numerator(graph: Graph, x: gs.Tensor, deviation: gs.Tensor) -> str:
    """Explain why a division by ``deviation`` is not a norm of x.

    The deviation is an even function of x: it is the same for x and −x.

    Returns:
        the reason. It names the first node of the numerator that cannot be part of a norm.
    """
    for divided in _numerators_of(graph, deviation):
        node = _foreign_node_above(graph, divided, x)
        if node is not None:
            if node.name:
                name = f"{node.op} {node.name!r}"
            else:
                name = node.op
            return (
                f"its deviation divides the result of {name}, not its input or its input minus the mean (as in EvoNorm)"
            )
    return EVEN


def _numerators_of(graph: Graph, deviation: gs.Tensor) -> list[gs.Tensor]:
    """Find the numerators of the fractions that have ``deviation``, or a view of it, as denominator."""
    numerators: list[gs.Tensor] = []
    stack = [(deviation, False)]
    seen = 0
    while stack and seen < _FARTHEST:
        t, inverse = stack.pop()
        for reader in graph.consumers(t):
            seen += 1
            if reader.op in VIEWS or reader.op in ("Identity", "Cast"):
                stack.append((reader.outputs[0], inverse))
            elif reader.op == "Reciprocal":
                stack.append((reader.outputs[0], not inverse))
            elif reader.op == ("Mul" if inverse else "Div") and (inverse or reader.inputs[1] is t):
                numerators.append(next((i for i in reader.inputs if i is not t), t))
    return numerators


def _foreign_node_above(graph: Graph, t: gs.Tensor, x: gs.Tensor) -> gs.Node | None:
    """Find the nearest node between ``x`` and ``t`` that cannot be part of a norm; None if there is no such node."""
    stack = [t]
    seen = 0
    while stack and seen < _FARTHEST:
        t = stack.pop(0)
        node = graph.producer(t)
        seen += 1
        if node is None or t is x:
            continue
        if node.op not in INSIDE:
            return node
        stack += [i for i in value_inputs(node) if not graph.is_shape_valued(i)]
    return None
