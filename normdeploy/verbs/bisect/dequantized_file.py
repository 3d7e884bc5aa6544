"""Convert a quantized file to a float file, which `bisect` searches like any other float file.

A stored weight within half a step of the model's parameter becomes that parameter. Activations are neither rounded nor
clipped, with one exception: a range that begins at 0 may express a ReLU, so it becomes a ReLU. Errors that remain are
not caused by quantization.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ...errors import GraphError
from ...evaluate.quantize_ops import finite_limits
from ...graphs.proto_queries import captured_names
from ...graphs.quantization_info import DEQUANTIZE, DYNAMIC, QUANTIZE, GraphQuantization, is_quantization_node
from ...storage.proto_traversal import copy_model, iter_subgraphs
from ...types import Array, Arrays

# Suffix of a node's name, followed by a number, if several nodes are written for one node of the file.
_PART = "#part"
# Suffix of the name of a ReLU's input, if the file expresses the ReLU by a zero point.
BEFORE_RELU = "_before_relu"
_PLAIN = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}


def remove_quantization(proto: onnx.ModelProto, weights: Arrays) -> onnx.ModelProto:
    """Write ``proto`` without its quantization.

    Args:
        weights: float values of the weights. The key of a weight is the output tensor of its DequantizeLinear. For a
            product of integers, the key is the product's output tensor. Later nodes multiply this output by a scale, so
            the value is the weight divided by that scale.

    Returns:
        A float model with the same outputs.

    Raises:
        GraphError: a product of integers reads codes whose scale is not found.
    """
    proto = copy_model(proto)
    q = GraphQuantization(proto)
    graph = proto.graph
    del graph.value_info[:]
    _rename_relu_tensors(graph, q)
    nodes = list[onnx.NodeProto]()
    for node in graph.node:
        for body in iter_subgraphs(node):
            _keep_loop_states(body)
        if not is_quantization_node(node):
            nodes.append(node)
        elif node.op_type in (QUANTIZE, DEQUANTIZE):
            if node.op_type == DEQUANTIZE and q.is_weight(node.output[0]):
                _add_initializer(graph, node.output[0], weights[node.output[0]])
            elif not q.is_weight(node.input[0]):
                if node.op_type == QUANTIZE and _is_relu_range(q, node):
                    op = "Relu"
                else:
                    op = "Identity"
                nodes.append(helper.make_node(op, node.input[:1], node.output[:1], node.name))
        elif node.op_type == DYNAMIC:
            codes, scale, zero = node.output
            nodes.append(helper.make_node("Identity", node.input[:1], [codes], node.name))
            _add_initializer(graph, scale, np.ones(()))
            _add_initializer(graph, zero, np.zeros(()))
        else:
            nodes.append(_write_float_product(graph, q, node, weights))
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    _make_names_unique(kept)
    del graph.node[:]
    graph.node.extend(kept)
    read = {name for node in kept for name in (*node.input, *captured_names(node))} | {v.name for v in graph.output}
    stored = [t for t in graph.initializer if t.name in read]
    del graph.initializer[:]
    graph.initializer.extend(stored)
    return proto


def _make_names_unique(nodes: Sequence[onnx.NodeProto]) -> None:
    """Make node names unique. If an op quantizes internally, all nodes that replace it get its name."""
    every = [*nodes, *(inner for node in nodes for body in iter_subgraphs(node) for inner in body.node)]
    names = Counter(node.name for node in every)
    used = Counter[str]()
    for node in every:
        name = node.name
        if names[name] > 1 and node.op_type in ("Identity", "Relu"):
            node.name = ""
        elif name and used[name]:
            node.name = f"{name}{_PART}{used[name]}"
        used[name] += 1


def original_node_name(name: str) -> str:
    """Return the name of the original node in the file, given a node that was written for it.

    Returns:
        The name without the suffix.
    """
    return name.partition(_PART)[0]


def is_extra_node(node: onnx.NodeProto) -> bool:
    """Return whether a node is one of the additional nodes that were written for one node of the file.

    A change of such a node can't be made in the file.

    Returns:
        True if its name has the suffix.
    """
    return _PART in node.name


def _keep_loop_states(body: onnx.GraphProto) -> None:
    """Replace the quantization and dequantization of loop states by Identity."""
    codes = {node.output[0] for node in body.node if node.op_type == DYNAMIC and is_quantization_node(node)}
    for node in body.node:
        if (node.op_type == DYNAMIC and is_quantization_node(node)) or (
            node.op_type == DEQUANTIZE and node.input[0] in codes
        ):
            node.op_type = "Identity"
            del node.input[1:], node.output[1:], node.attribute[:]


def _add_initializer(graph: onnx.GraphProto, name: str, value: Array) -> None:
    graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), name))


def _is_relu_range(q: GraphQuantization, node: onnx.NodeProto) -> bool:
    """Check that the range of a QuantizeLinear begins at 0, so that it acts as a ReLU."""
    scheme = q.scheme_of(node)
    if scheme.kind is None or "int" not in scheme.kind.name:
        return False
    if scheme.zero_point is None:
        zero = np.zeros(())
    else:
        zero = scheme.zero_point.astype(np.float64)
    return bool((zero == finite_limits(scheme.kind)[0]).all())


def _rename_relu_tensors(graph: onnx.GraphProto, q: GraphQuantization) -> None:
    """If a tensor's only reader is a quantizer that acts as a ReLU, rename the tensor.

    The output of the ReLU gets the old name.
    """
    for node in q.nodes:
        if node.op_type != QUANTIZE or not is_quantization_node(node) or not _is_relu_range(q, node):
            continue
        name = node.input[0]
        maker = q.makers.get(name)
        alone = len(q.readers_by_tensor[name]) == 1 and name not in q.outputs
        if (
            maker is None
            or maker.op_type == "Relu"
            or not alone
            or len(q.readers_by_tensor.get(node.output[0], ())) != 1
        ):
            continue
        after = q.readers_by_tensor[node.output[0]][0]
        if after.op_type != DEQUANTIZE or node.output[0] in q.outputs or after.output[0] in q.outputs:
            continue
        before = f"{name}{BEFORE_RELU}"
        maker.output[:] = [before if made == name else made for made in maker.output]
        node.input[0], node.output[0] = before, name
        after.input[0] = name


def _write_float_product(
    graph: onnx.GraphProto, q: GraphQuantization, node: onnx.NodeProto, weights: Arrays
) -> onnx.NodeProto:
    """Write a product of integers as a product of floats. The zero point of the weight is already subtracted."""
    maker = q.makers.get(node.input[0])
    if maker is None or maker.op_type != DYNAMIC or node.output[0] not in weights:
        raise GraphError(f"{node.op_type} {node.name!r} reads codes whose scale is not next to it")
    weight = f"{node.output[0]}_weight"
    _add_initializer(graph, weight, weights[node.output[0]])
    plain = helper.make_node(_PLAIN[node.op_type], [node.input[0], weight], node.output[:1], node.name)
    plain.attribute.extend(node.attribute)
    return plain
