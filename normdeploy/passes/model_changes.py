"""Decide if a rewritten model differs from the original in more than the storage of its constants.

A pass manager repeats its passes until none of them changes the model. The rewriter stores the value of each Constant
node as an initializer and drops the declared shapes of inner tensors. Neither counts as a change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx

from ..storage.shared_weights import tensor_array


def is_changed(before: onnx.ModelProto, after: onnx.ModelProto) -> bool:
    """Compare two models.

    The order of nodes, names of nodes, metadata and declared shapes are ignored.

    Args:
        before: the original, with its weights.
        after: the same model after a rewriting.

    Returns:
        True if the models differ in an opset, a node, a function or a constant that both of them have.
    """
    if _opsets(before) != _opsets(after):
        return True
    if _comparable_nodes(before.graph.node) != _comparable_nodes(after.graph.node):
        return True
    if _comparable_functions(before) != _comparable_functions(after):
        return True
    old = dict(_iter_constants(before.graph))
    return any(name in old and not _is_same_array(old[name], new) for name, new in _iter_constants(after.graph))


def _opsets(proto: onnx.ModelProto) -> dict[str, int]:
    return {o.domain: o.version for o in proto.opset_import}


def _comparable_nodes(nodes: Sequence[onnx.NodeProto]) -> list[bytes]:
    return sorted(_comparable_bytes(node) for node in nodes if not _is_constant(node))


def _comparable_functions(proto: onnx.ModelProto) -> dict[tuple[str, str, str], list[bytes]]:
    return {(f.domain, f.name, f.overload): sorted(map(_comparable_bytes, f.node)) for f in proto.functions}


def _comparable_bytes(node: onnx.NodeProto) -> bytes:
    """Serialize what a node computes, without its name, texts and metadata."""
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    for text in ("name", "doc_string", "metadata_props"):
        bare.ClearField(text)
    bare.ClearField("attribute")
    bare.attribute.extend(sorted(node.attribute, key=lambda a: a.name))
    for attribute in bare.attribute:
        attribute.ClearField("doc_string")
    return bare.SerializeToString(deterministic=True)


def _is_constant(node: onnx.NodeProto) -> bool:
    return node.op_type == "Constant" and node.domain in ("", "ai.onnx")


def _iter_constants(graph: onnx.GraphProto) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the value of each initializer, and of each Constant node with a tensor."""
    for tensor in graph.initializer:
        yield tensor.name, tensor_array(tensor)
    for node in graph.node:
        if _is_constant(node):
            yield from ((node.output[0], tensor_array(a.t)) for a in node.attribute if a.name == "value")


def _is_same_array(one: np.ndarray, other: np.ndarray) -> bool:
    """Compare two arrays bit by bit, so that NaN equals NaN and 0 differs from -0."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
