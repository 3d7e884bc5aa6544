"""Check that the file holds the proved nodes, with their attributes and the bytes of their constants.

A certificate applies to nodes as they were when they were proved. A seal records each node at that time. Every seal
must match a node of the final file. This detects, for example, an epsilon that was changed after the proof, or an array
that was stored in another order.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ..errors import ExportError
from ..graphs.graph import Graph
from ..storage.shared_weights import tensor_array


class NodeSeal(NamedTuple):
    """Seal of one proved node.

    Attributes:
        tensor: name of its first output.
        kind: op with the dtypes and shapes of its constants. Only nodes of the same kind are compared, so that other
            weights need not be read.
        digest: SHA-256 of op, attributes and constants.
    """

    tensor: str
    kind: str
    digest: bytes


def seal_nodes(graph: Graph, nodes: Iterable[gs.Node]) -> list[tuple[gs.Node, NodeSeal]]:
    """Seal nodes that were just proved.

    Returns:
        each node with its seal.
    """
    sealed = []
    for node in nodes:
        tensors = {t.name: tensor for t in node.inputs if (tensor := _stored_tensor(graph, t)) is not None}
        proto = graph.node_proto(node)
        sealed.append((node, NodeSeal(node.outputs[0].name, _node_kind(proto, tensors), _node_digest(proto, tensors))))
    return sealed


def require_sealed(proto: onnx.ModelProto, wanted: Sequence[NodeSeal]) -> None:
    """Search a file for every seal.

    Raises:
        ExportError: a node is not in the file as it was proved.
    """
    if not wanted:
        return
    # A caller may override an initializer that is also an input, so it is not a constant.
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
        # Each seal uses up one node, so two equal proved nodes must both be in the file.
        there[seal.digest] -= 1
        if there[seal.digest] < 0:
            raise ExportError(
                f"the node that computes {seal.tensor!r} in the file differs from the proved one: its "
                "attributes or constants have changed since. This is a bug in normdeploy; please report "
                "it"
            )


def _stored_tensor(graph: Graph, t: gs.Tensor) -> onnx.TensorProto | None:
    """Return an initializer, or the tensor of a Constant node, which functions have in place of initializers."""
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
    """Compute the digest of op, attributes and constants, without names and metadata."""
    made = hashlib.sha256(_node_kind(node, tensors).encode())
    for attribute in sorted(node.attribute, key=lambda a: a.name):
        plain = onnx.AttributeProto()
        plain.CopyFrom(attribute)
        plain.ClearField("doc_string")
        made.update(plain.SerializeToString(deterministic=True))
    for name in node.input:
        if (tensor := tensors.get(name)) is not None:
            made.update(tensor.raw_data or _elements_as_bytes(tensor_array(tensor)))
    return made.digest()


def _elements_as_bytes(array: np.ndarray) -> bytes | memoryview:
    """Return the elements in row-major order, without a copy if they are numbers in this order."""
    if array.dtype.hasobject:
        return array.tobytes()
    # 8-bit floats do not support the buffer protocol, but bytes do.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
