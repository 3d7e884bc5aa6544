"""Checks that the file holds what was proved: each node that a rewrite wrote, with its attributes and the bytes of its
constants.

A certificate speaks of nodes as they were when it was given. A seal is taken of them then, and looked for in the file
at the end: an epsilon that was changed since, or an array stored in another order, is found there.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import onnx
import onnx_graphsurgeon as gs

from ..errors import ExportError
from ..graphs.graph import Graph
from ..storage.shared_weights import tensor_array


class NodeSeal(NamedTuple):
    """Of one node: ``kind`` is its op with the types and shapes of its constants, so that other nodes' weights need not
    be read."""

    # which it makes
    tensor: str
    kind: str
    digest: bytes


def seal_nodes(graph: Graph, nodes: Iterable[gs.Node]) -> list[tuple[gs.Node, NodeSeal]]:
    """Of nodes that were just proved."""
    sealed = []
    for node in nodes:
        tensors = {t.name: tensor for t in node.inputs if (tensor := _stored_tensor(graph, t)) is not None}
        proto = graph.node_proto(node)
        sealed.append((node, NodeSeal(node.outputs[0].name, _node_kind(proto, tensors), _node_digest(proto, tensors))))
    return sealed


def require_sealed(proto: onnx.ModelProto, wanted: Sequence[NodeSeal]) -> None:
    """Look for every seal in a file.

    Raises:
        ExportError: a node is not there as it was proved.
    """
    if not wanted:
        return
    # which a caller may replace
    if proto.ir_version >= 4:
        defaults = {i.name for i in proto.graph.input}
    else:
        defaults = set()
    kinds = {seal.kind for seal in wanted}
    there = Counter(
        _node_digests(proto.graph.node, {t.name: t for t in proto.graph.initializer if t.name not in defaults}, kinds)
    )
    for function in proto.functions:
        there.update(_node_digests(function.node, {}, kinds))
    for seal in wanted:
        # of two that are the same both have to be there
        there[seal.digest] -= 1
        if there[seal.digest] < 0:
            raise ExportError(
                f"the node that makes {seal.tensor!r} is not in the file as it was proved: its attributes or constants"
                " have changed since. This is a mistake of normdeploy's; please report it"
            )


def _stored_tensor(graph: Graph, t: gs.Tensor) -> onnx.TensorProto | None:
    """An initializer, or what a Constant node holds: a function has no initializers, and gets them as such nodes."""
    if isinstance(t, gs.Constant):
        return graph.tensor_proto(t)
    node = graph.producer(t)
    if node is None:
        return None
    if node.op == "Constant":
        return _constant_tensor(graph.node_proto(node))
    return None


def _constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    if node.op_type == "Constant":
        return next((a.t for a in node.attribute if a.name == "value"), None)
    return None


def _node_digests(
    nodes: Iterable[onnx.NodeProto], around: Mapping[str, onnx.TensorProto], kinds: Collection[str]
) -> Iterator[bytes]:
    tensors = dict(around)
    for node in nodes:
        if (tensor := _constant_tensor(node)) is not None:
            tensors[node.output[0]] = tensor
        if _node_kind(node, tensors) in kinds:
            yield _node_digest(node, tensors)
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                if body.node:
                    yield from _node_digests(body.node, {**tensors, **{t.name: t for t in body.initializer}}, kinds)


def _node_kind(node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> str:
    given = [
        f"{t.data_type}{list(t.dims)}" if (t := tensors.get(name)) is not None else "-" if name else ""
        for name in node.input
    ]
    return f"{node.domain.replace('ai.onnx', '')}.{node.op_type}({', '.join(given)})"


def _node_digest(node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> bytes:
    """Of op, attributes and constants; names and metadata don't count."""
    made = hashlib.sha256(_node_kind(node, tensors).encode())
    for attribute in sorted(node.attribute, key=lambda a: a.name):
        plain = onnx.AttributeProto()
        plain.CopyFrom(attribute)
        plain.ClearField("doc_string")
        made.update(plain.SerializeToString(deterministic=True))
    for name in node.input:
        if (tensor := tensors.get(name)) is not None:
            # an 8-bit float is no buffer
            made.update(tensor.raw_data or tensor_array(tensor).tobytes())
    return made.digest()
