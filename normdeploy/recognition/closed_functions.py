"""Report nodes that look like norms inside functions that can't be inlined."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ..findings.records import Finding
from ..graphs.graph import Graph
from ..graphs.local_functions import closed_functions
from ..graphs.subgraphs import body_subgraphs
from .anchors import is_anchor, is_norm_node
from .norm_candidates import candidate_at


def find_closed_norms(proto: onnx.ModelProto) -> Iterator[Finding]:
    """Find the norms in functions of ``proto`` that can't be inlined because too little is known about them.

    Yields:
        a finding for each norm node and each root over a reduction.
    """
    for function, reason in closed_functions(proto):
        yield from _norms_inside(
            function.model, function.place, f"the function that contains it can't be inlined: {reason}"
        )


def _norms_inside(model: onnx.ModelProto, place: str, reason: str) -> Iterator[Finding]:
    """Yield a finding for each norm node and each root over a reduction in ``model`` and its bodies."""
    graph = Graph(model)
    for node in graph.nodes:
        if is_anchor(graph, node):
            around = candidate_at(graph, node)
        else:
            around = None
        if around is not None:
            nodes = sorted({id(n): n for n in (*around.passed, node)}.values(), key=graph.position_of)
            yield Finding(
                kind=node.op if is_norm_node(node) else "unknown",
                status="kept" if is_norm_node(node) else "refused",
                tensor=node.outputs[0].name,
                module=graph.module(node),
                spelling=node.op if is_norm_node(node) else " ".join(n.op for n in nodes),
                reason=reason,
                place=place,
            )
    for body in body_subgraphs(model):
        yield from _norms_inside(body.model, f"{place}, {body.place}", reason)
