"""Nodes inside the bodies of an If, Loop or Scan: each is tried as the reference has it, or left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from ...runtimes.float64_evaluator import Float64Evaluator, NodeChange
from ...storage.onnx_domains import is_standard
from ...storage.proto_traversal import attribute_graphs
from .reference_program import ReferenceProgram
from .trial_changes import Cause, node_at_text


def try_body_nodes(
    exact: Float64Evaluator, place: int, program: ReferenceProgram, operators: Iterable[str]
) -> Iterator[tuple[Cause, NodeChange]]:
    """Change one node of a body.

    Args:
        operators: of the model, that the node may stand for.
    """
    node = exact.nodes[place]
    own = list(_iter_inner_nodes(node))
    if not own:
        return
    theirs = next((n for n in program.onnx_nodes(operators) if n.op_type == node.op_type), None)
    right = {} if theirs is None else {n.output[0]: n for n in _iter_inner_nodes(theirs)}
    for number, inner in enumerate(own):
        where = f"{_describe_node(inner)} in a body of {node_at_text(exact, place)}"
        other = right.get(inner.output[0])
        if other is not None and not _is_same_node(inner, other):
            text = f"{where} is not the model's: with {_describe_node(other)} as the model has it it is right"
            yield Cause("body", text, place), NodeChange(nodes={place: _replace_inner_node(node, number, other)})
        for name in inner.input:
            if name and not other:
                kept = onnx.helper.make_node("Identity", [name], [inner.output[0]], name=inner.name)
                text = f"{where} does something that the model does not: with {name!r} in its place it is right"
                yield Cause("body", text, place), NodeChange(nodes={place: _replace_inner_node(node, number, kept)})


def try_exchanged_branches(exact: Float64Evaluator, place: int) -> Iterator[tuple[Cause, NodeChange]]:
    """Take the branches of an If in each other's place."""
    node = exact.nodes[place]
    if node.op_type != "If" or not is_standard(node):
        return
    other = {"then_branch": "else_branch", "else_branch": "then_branch"}
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    for attribute in changed.attribute:
        attribute.name = other.get(attribute.name, attribute.name)
    text = f"the branches of {node_at_text(exact, place)} are in each other's place"
    yield Cause("order", text, place), NodeChange(nodes={place: changed})


def _iter_inner_nodes(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """The nodes of all bodies inside a node, in order."""
    for graph in (g for a in node.attribute for g in attribute_graphs(a)):
        for inner in graph.node:
            yield inner
            yield from _iter_inner_nodes(inner)


def _replace_inner_node(node: onnx.NodeProto, number: int, other: onnx.NodeProto) -> onnx.NodeProto:
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    list(_iter_inner_nodes(changed))[number].CopyFrom(other)
    return changed


def _is_same_node(one: onnx.NodeProto, other: onnx.NodeProto) -> bool:
    """Whether two nodes compute the same, whatever their names."""
    key = [
        (n.op_type, n.domain, list(n.input), sorted(a.SerializeToString() for a in n.attribute)) for n in (one, other)
    ]
    return key[0] == key[1]


def _describe_node(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {(node.name or node.output[0])!r}"
