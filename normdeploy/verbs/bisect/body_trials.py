"""Try changes of nodes inside the bodies of an If, Loop or Scan.

Each node is replaced by the reference's node, or removed.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ...storage.proto_traversal import iter_subgraphs
from .trial_changes import Trial, TrialNode, copy_node


def try_body_nodes(at: TrialNode) -> Iterator[Trial]:
    """Change one node of a body.

    Yields:
        Trials that replace a node by the reference's node, or remove a node that the reference does not have.
    """
    own = _inner_nodes(at.node)
    if not own:
        return
    theirs = next((n for n in at.around.program.onnx_nodes(at.around.operators) if n.op_type == at.op), None)
    if theirs is None:
        right = {}
    else:
        right = {n.output[0]: n for n in _inner_nodes(theirs)}
    for number, inner in enumerate(own):
        where = f"{_describe_node(inner)} in a body of {at}"
        other = right.get(inner.output[0])
        if other is None:
            for name in filter(None, inner.input):
                kept = onnx.helper.make_node("Identity", [name], [inner.output[0]], name=inner.name)
                text = f"{where} is not in the model: with {name!r} instead the result is correct"
                yield at.as_node("body", text, _replace_inner_node(at.node, number, kept))
        elif _key_of_node(inner) != _key_of_node(other):
            text = f"{where} differs from the model: with the model's {_describe_node(other)} the result is correct"
            yield at.as_node("body", text, _replace_inner_node(at.node, number, other))


def try_exchanged_branches(at: TrialNode) -> Iterator[Trial]:
    """Exchange the branches of an If.

    Yields:
        One trial.
    """
    if not at.is_standard("If"):
        return
    other = {"then_branch": "else_branch", "else_branch": "then_branch"}
    changed = copy_node(at.node)
    for attribute in changed.attribute:
        attribute.name = other.get(attribute.name, attribute.name)
    yield at.as_node("order", f"the branches of {at} are exchanged", changed)


def _inner_nodes(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return the nodes of all bodies inside a node."""
    return [inner for graph in iter_subgraphs(node) for inner in graph.node]


def _replace_inner_node(node: onnx.NodeProto, number: int, other: onnx.NodeProto) -> onnx.NodeProto:
    changed = copy_node(node)
    _inner_nodes(changed)[number].CopyFrom(other)
    return changed


def _key_of_node(node: onnx.NodeProto) -> tuple[object, ...]:
    """Return a key that is equal for nodes with the same computation, whatever their names."""
    return node.op_type, node.domain, list(node.input), sorted(a.SerializeToString() for a in node.attribute)


def _describe_node(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {(node.name or node.output[0])!r}"
