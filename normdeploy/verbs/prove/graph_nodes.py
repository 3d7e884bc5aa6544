"""Find the tensors that nodes read, and the nodes that outputs need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx

from ...storage.proto_traversal import attribute_graphs


def node_inputs(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the tensors that a node reads, including those that its bodies read from outside."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for body in attribute_graphs(attribute):
            made = {v.name for v in body.input} | {t.name for t in body.initializer}
            made |= {name for inner in body.node for name in inner.output}
            read = (*read_names(body), *(v.name for v in body.output))
            yield from (name for name in read if name not in made)


def read_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the tensors that the nodes of a graph read."""
    for node in graph.node:
        yield from node_inputs(node)


def needed_nodes(graph: onnx.GraphProto, outputs: Sequence[str]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that the outputs need, in the order of the graph."""
    wanted = set(outputs)
    kept = []
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(node_inputs(node))
    yield from reversed(kept)
