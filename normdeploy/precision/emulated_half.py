"""Emulate half precision on a machine without half-precision kernels.

Each operator is computed in float32, and each result is rounded to half precision.

A GPU also accumulates each node in float32 and stores the result in half precision. onnxruntime's CPU provider has
hardly any bfloat16 kernels. For float16 it computes several consecutive nodes in float32 and rounds only the last
result. So a run without the emulation would show too small an error.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from ..errors import GraphError
from ..graphs.shape_inference import infer_types
from ..storage.proto_traversal import attribute_graphs, copy_model
from .type_conversion import initializer_values

_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def emulate_half(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Build a float32 model in which each node computes in float32 and rounds to the types that ``proto`` states.

    Half-precision inputs and outputs become float32. Pass inputs that are already rounded to half precision.

    Returns:
        the new model; ``proto`` is not changed.

    Raises:
        GraphError: the body of a control-flow node contains weights in half precision.
    """
    types = {name: kind for name, (kind, _) in infer_types(proto).items() if kind in _HALVES}
    proto = copy_model(proto)
    graph = proto.graph
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        widen_node(node)
        nodes.append(node)
        for i, name in enumerate(node.output):
            if name in types:
                raw = f"{name}_exact"
                half = f"{name}_half"
                node.output[i] = raw
                nodes.append(onnx.helper.make_node("Cast", [raw], [half], to=types[name]))
                nodes.append(onnx.helper.make_node("Cast", [half], [name], to=TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)
    for tensor in graph.initializer:
        if tensor.data_type in _HALVES:
            tensor.CopyFrom(onnx.numpy_helper.from_array(initializer_values(tensor).astype("float32"), tensor.name))
    for v in (*graph.input, *graph.output):
        if v.type.tensor_type.elem_type in _HALVES:
            v.type.tensor_type.elem_type = TensorProto.FLOAT
    del graph.value_info[:]
    return proto


def widen_node(node: onnx.NodeProto) -> None:
    """Replace half precision by float32 in the attributes of ``node``, in place.

    Raises:
        GraphError: a body of the node holds weights in half precision.
    """
    for a in node.attribute:
        if a.type == onnx.AttributeProto.INT and a.name in ("to", "dtype") and a.i in _HALVES:
            a.i = TensorProto.FLOAT
        if a.type == onnx.AttributeProto.TENSOR and a.t.data_type in _HALVES:
            a.t.CopyFrom(onnx.numpy_helper.from_array(initializer_values(a.t).astype("float32")))
        if any(t.data_type in _HALVES for body in attribute_graphs(a) for t in body.initializer):
            raise GraphError(
                f"{node.op_type} {node.name!r} has half precision in its body, which is not supported here"
            )
