"""Rewrite weights that plain ops dequantize as DequantizeLinear.

    (Cast(q) − z)·s          q: stored codes; z and s: constants, one number or one per element along an axis

Weight-only quantizers export this form. The rewritten model is only for evaluation. The evaluation randomly draws how
each code may have been rounded, and recognizes codes by the DequantizeLinear that reads them.
"""

from __future__ import annotations

import numpy as np
import onnx

from ..storage.onnx_domains import default_domain_opset, is_standard
from ..storage.proto_traversal import copy_model
from ..storage.shared_weights import tensor_array
from .quantization_info import DEQUANTIZE

_CODES = frozenset({onnx.TensorProto.INT8, onnx.TensorProto.UINT8})
# Stored codes count as a weight only if they have at least this many elements.
MANY = 64
# First opset in which DequantizeLinear has an axis.
_PER_CHANNEL = 13


def has_code_casts(proto: onnx.ModelProto) -> bool:
    """Return whether a Cast reads stored codes.

    Returns: True if it reads an int8 or uint8 initializer of at least `MANY` elements.
    """
    codes = {t.name for t in proto.graph.initializer if t.data_type in _CODES and np.prod(t.dims) >= MANY}
    return any(node.op_type == "Cast" and node.input[0] in codes for node in proto.graph.node)


def rewrite_as_dequantize(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Rewrite decomposed dequantization as DequantizeLinear.

    Args:
        proto: model with its weights loaded.

    Returns: a changed copy; ``proto`` itself if nothing matches.
    """
    if not has_code_casts(proto):
        return proto
    tensors = {t.name: t for t in proto.graph.initializer}
    makers = {name: node for node in proto.graph.node for name in node.output}
    pairs = {}
    for place, node in enumerate(proto.graph.node):
        if node.op_type == "Mul" and is_standard(node):
            for codes, scale in (node.input, reversed(node.input)):
                pair = _match_dequantize(node, codes, scale, makers, tensors, default_domain_opset(proto))
                if pair is not None:
                    pairs[place] = pair
    if not pairs:
        return proto
    proto = copy_model(proto)
    for place, (pair, constants) in pairs.items():
        proto.graph.node[place].CopyFrom(pair)
        proto.graph.initializer.extend(constants)
    return proto


def _match_dequantize(
    node: onnx.NodeProto,
    codes: str,
    scale: str,
    makers: dict[str, onnx.NodeProto],
    tensors: dict[str, onnx.TensorProto],
    opset: int,
) -> tuple[onnx.NodeProto, list[onnx.TensorProto]] | None:
    """Match a Mul of dequantized codes.

    Returns: the equivalent DequantizeLinear, and its scale and zero point; None if the Mul is anything else.
    """
    zero: np.ndarray = np.zeros(())
    cast = makers.get(codes)
    if cast is not None and cast.op_type == "Sub" and cast.input[1] in tensors:
        zero = tensor_array(tensors[cast.input[1]])
        cast = makers.get(cast.input[0])
    if cast is not None and cast.op_type == "Cast":
        stored = tensors.get(cast.input[0])
    else:
        stored = None
    if stored is None or scale not in tensors or tensors[scale].data_type != onnx.TensorProto.FLOAT:
        return None
    if stored.data_type not in _CODES or np.prod(stored.dims) < MANY:
        return None
    step = tensor_array(tensors[scale])
    kind = onnx.helper.tensor_dtype_to_np_dtype(stored.data_type)
    axes = {axis for each in (step, zero) for axis in _varying_axes(each, len(stored.dims))}
    whole = zero.astype(kind)
    if len(axes) > 1 or (axes and opset < _PER_CHANNEL) or (whole != zero).any() or (step <= 0).any():
        return None
    axis = next(iter(axes), 0)
    shape = (stored.dims[axis],) if axes else ()
    names = f"{node.output[0]}_scale", f"{node.output[0]}_zero_point"
    constants = []
    for value, name in zip((step, whole), names, strict=True):
        numbers = np.broadcast_to(value.reshape(-1 if axes else ()), shape)
        constants.append(onnx.numpy_helper.from_array(np.ascontiguousarray(numbers).reshape(shape), name))
    pair = onnx.helper.make_node(DEQUANTIZE, [stored.name, *names], list(node.output), name=node.name)
    if axes:
        pair.attribute.append(onnx.helper.make_attribute("axis", axis))
    return pair, constants


def _varying_axes(constant: np.ndarray, rank: int) -> list[int]:
    """Return the axes of a weight along which a constant varies if it is broadcast to the weight's shape."""
    return [rank - constant.ndim + i for i, size in enumerate(constant.shape) if size > 1]
