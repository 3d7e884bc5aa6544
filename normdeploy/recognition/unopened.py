"""Reports nodes that look like norms inside functions that can't be opened."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ..graphs.graph import Graph
from ..graphs.nested import bodies
from ..graphs.nested_functions import unopened
from ..records import Finding
from .readings import candidate
from .roots import is_norm, is_root


def closed_norms(proto: onnx.ModelProto) -> Iterator[Finding]:
    """A finding for each root over a reduction, and each norm node, in the functions of ``proto`` of which too little
    is known."""
    for function, reason in unopened(proto):
        yield from _inside(function.model, function.place, f"the function that it is in can't be opened: {reason}")


def _inside(model: onnx.ModelProto, place: str, reason: str) -> Iterator[Finding]:
    graph = Graph(model)
    for node in graph.nodes:
        around = candidate(graph, node) if is_root(graph, node) else None
        if around is not None:
            nodes = sorted({id(n): n for n in (*around.passed, node)}.values(), key=graph.order)
            yield Finding(
                kind=node.op if is_norm(node) else "unknown",
                status="kept" if is_norm(node) else "refused",
                tensor=node.outputs[0].name,
                module=graph.module(node),
                spelling=node.op if is_norm(node) else " ".join(n.op for n in nodes),
                reason=reason,
                place=place,
            )
    for body in bodies(model):
        yield from _inside(body.model, f"{place}, {body.place}", reason)
