"""Replace a DequantizeLinear of constant int32 codes, usually a bias, by a float32 constant, for TensorRT.

    DQ(q) = (q − 0)·s, where q and the product are rounded to float32

onnxruntime's quantizer stores biases as int32 before a DequantizeLinear (ONNX, DequantizeLinear 10 to 25, int32 with
zero point 0). TensorRT's parser refuses a DequantizeLinear of int32. The stored float32 number equals, bit for bit, the
number that ONNX's reference and onnxruntime compute in each run.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx

from ..evaluate.quantize_ops import broadcast_parameter
from ..graphs.quantization_info import DEQUANTIZE, GraphQuantization, all_quantizations
from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import copy_model


def find_int32_dequantizers(q: GraphQuantization) -> Iterator[onnx.NodeProto]:
    """Find the DequantizeLinear nodes of a graph that read int32.

    Yields:
        the nodes in the order of the graph.
    """
    for node in q.nodes:
        if node.op_type == DEQUANTIZE and is_standard(node) and q.scheme_of(node).kind == np.int32:
            yield node


def replace_int32_codes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Replace int32 codes with a constant float32 scale by float32 constants.

    Returns:
        a changed copy; ``proto`` itself if it has no such codes.
    """
    if not any(
        _dequantized_values(q, node) is not None
        for q in all_quantizations(proto)
        for node in find_int32_dequantizers(q)
    ):
        return proto
    made = copy_model(proto)
    for q in all_quantizations(made):
        for node in find_int32_dequantizers(q):
            values = _dequantized_values(q, node)
            if values is not None:
                constant = onnx.helper.make_node("Constant", [], [*node.output], name=node.name)
                constant.attribute.append(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(values)))
                constant.metadata_props.extend(node.metadata_props)
                node.CopyFrom(constant)
    return made


def count_int32_dequantizers(proto: onnx.ModelProto) -> int:
    """Count the DequantizeLinear nodes that read int32, including those in bodies and functions.

    Returns:
        the number of nodes.
    """
    return sum(1 for q in all_quantizations(proto) for _ in find_int32_dequantizers(q))


def _dequantized_values(q: GraphQuantization, node: onnx.NodeProto) -> np.ndarray | None:
    """Compute the output of the node; None if an input is not constant, or the scale is not float32."""
    scheme = q.scheme_of(node)
    codes = q.constant_value(node.input[0])
    if codes is None or scheme.scale is None or scheme.scale.dtype != np.float32 or scheme.is_asymmetric:
        return None
    if scheme.zero_point is None and len(node.input) > 2 and node.input[2]:
        # The zero point is computed.
        return None
    try:
        scale = broadcast_parameter(scheme.scale, codes.shape, scheme.axis, scheme.block)
    except ValueError:
        return None
    return np.asarray(codes.astype(np.float32) * scale, np.float32)
