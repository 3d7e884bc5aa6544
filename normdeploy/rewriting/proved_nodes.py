"""Check that the file holds the proved nodes, with their attributes and the bytes of their constants.

A certificate applies to nodes as they were when they were proved. A seal records each node at that time. Every seal
must match a node of the final file. This detects, for example, an epsilon that was changed after the proof, or an array
that was stored in another order.

A large constant that was computed is in read-only memory, which nothing can change after the proof. If the file refers
to the same memory in the same shape, its bytes need not be read. Otherwise the bytes are compared.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ..errors import ExportError
from ..graphs.graph import Graph
from ..storage.shared_weights import shared_array, tensor_array

Tensors = Mapping[str, onnx.TensorProto]


@dataclass(frozen=True)
class NodeContent:
    """Op, attributes and constants of a node at one time, without names and metadata.

    Attributes:
        head: SHA-256 of op and attributes.
        constants: SHA-256 of each constant; the array itself if it is in read-only memory.
    """

    head: bytes
    constants: tuple[bytes | np.ndarray, ...]

    def memory_key(self) -> tuple[object, ...]:
        """Return a key that is equal for nodes whose arrays are the same memory."""
        return (
            self.head,
            *((c.ctypes.data, c.strides) if isinstance(c, np.ndarray) else c for c in self.constants),
        )

    def content_key(self) -> tuple[object, ...]:
        """Return a key that is equal for nodes whose arrays have the same bytes."""
        return (self.head, *(_hash_array(c) if isinstance(c, np.ndarray) else c for c in self.constants))


@dataclass(frozen=True)
class NodeSeal:
    """Seal of one proved node.

    Attributes:
        tensor: name of its first output.
        kind: op with the dtypes and shapes of its constants. Only nodes of the same kind are compared, so that other
            weights need not be read.
        content: the node at the time of the proof.
    """

    tensor: str
    kind: str
    content: NodeContent


def seal_nodes(graph: Graph, nodes: Iterable[gs.Node]) -> list[tuple[gs.Node, NodeSeal]]:
    """Seal nodes that were just proved.

    Returns:
        each node with its seal.
    """
    sealed = []
    for node in nodes:
        tensors = {t.name: tensor for t in node.inputs if (tensor := _stored_tensor(graph, t)) is not None}
        proto = graph.node_proto(node)
        seal = NodeSeal(node.outputs[0].name, _node_kind(proto, tensors), _node_content(proto, tensors))
        sealed.append((node, seal))
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
    initializers = {t.name: t for t in proto.graph.initializer if t.name not in defaults}
    there = list(_iter_contents(proto.graph.node, initializers, kinds))
    for function in proto.functions:
        there += _iter_contents(function.node, {}, kinds)
    left, there = _match_seals(wanted, there, NodeContent.memory_key)
    # The file may have a copy of the memory.
    left, _ = _match_seals(left, there, NodeContent.content_key)
    if left:
        raise ExportError(
            f"the node that computes {left[0].tensor!r} in the file differs from the proved one: its attributes or "
            "constants have changed since. This is a bug in normdeploy; please report it"
        )


def _match_seals(
    seals: Sequence[NodeSeal], nodes: Sequence[NodeContent], key: Callable[[NodeContent], tuple[object, ...]]
) -> tuple[list[NodeSeal], list[NodeContent]]:
    """Match each seal to a node of its own, so that two equal proved nodes must both be in the file.

    Returns:
        the seals and the nodes without a match.
    """
    there = defaultdict[tuple[object, ...], list[NodeContent]](list)
    left = []
    if seals:
        for node in nodes:
            there[key(node)].append(node)
    for seal in seals:
        same = there[key(seal.content)]
        if same:
            same.pop()
        else:
            left.append(seal)
    return left, [node for same in there.values() for node in same]


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


def _iter_contents(nodes: Iterable[onnx.NodeProto], around: Tensors, kinds: Collection[str]) -> Iterator[NodeContent]:
    tensors = dict(around)
    for node in nodes:
        if (tensor := _constant_tensor(node)) is not None:
            tensors[node.output[0]] = tensor
        if _node_kind(node, tensors) in kinds:
            yield _node_content(node, tensors)
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                if body.node:
                    yield from _iter_contents(body.node, {**tensors, **{t.name: t for t in body.initializer}}, kinds)


def _node_kind(node: onnx.NodeProto, tensors: Tensors) -> str:
    given = [
        f"{t.data_type}{list(t.dims)}" if (t := tensors.get(name)) is not None else "-" if name else ""
        for name in node.input
    ]
    return f"{node.domain.replace('ai.onnx', '')}.{node.op_type}({', '.join(given)})"


def _node_content(node: onnx.NodeProto, tensors: Tensors) -> NodeContent:
    head = hashlib.sha256(_node_kind(node, tensors).encode())
    for attribute in sorted(node.attribute, key=lambda a: a.name):
        plain = onnx.AttributeProto()
        plain.CopyFrom(attribute)
        plain.ClearField("doc_string")
        head.update(plain.SerializeToString(deterministic=True))
    given = (tensors[name] for name in node.input if name in tensors)
    return NodeContent(head.digest(), tuple(map(_constant_content, given)))


def _constant_content(tensor: onnx.TensorProto) -> bytes | np.ndarray:
    """Return the SHA-256 of a constant, or its array if nothing can change the array."""
    array = shared_array(tensor)
    if array is not None and _is_unchangeable(array):
        return array
    if tensor.raw_data:
        return hashlib.sha256(tensor.raw_data).digest()
    return _hash_array(tensor_array(tensor))


def _is_unchangeable(array: np.ndarray) -> bool:
    """Return True if an array and the owner of its memory are read-only."""
    owner: object = array
    while isinstance(owner, np.ndarray) and not owner.flags.writeable:
        if owner.base is None:
            return True
        owner = owner.base
    return False


def _hash_array(array: np.ndarray) -> bytes:
    return hashlib.sha256(_elements_as_bytes(array)).digest()


def _elements_as_bytes(array: np.ndarray) -> bytes | memoryview:
    """Return the elements in row-major order, without a copy if they are numbers in this order."""
    if array.dtype.hasobject:
        return array.tobytes()
    # 8-bit floats do not support the buffer protocol, but bytes do.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
