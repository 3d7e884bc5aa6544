"""Evaluate quantization ops in float64.

The ops are QuantizeLinear 10 to 25, DequantizeLinear 10 to 25, DynamicQuantizeLinear 11, MatMulInteger 10 and
ConvInteger 10 (https://onnx.ai/onnx/operators).

    Q(x) = saturate(round(x / scale) + zero point)        DQ(q) = (q − zero point) · scale

Rounding is half to even. Quantized tensors keep their dtype: an integer type of numpy, or a type of ml_dtypes if numpy
lacks it (int4, uint4, float8 and so on). The quotient is float64 for every ``precision`` and every type of the scale.
If a runtime divides in float32, it may round a quotient near a tie to the other neighbor.

`evaluator.is_supported` returns False for these ops because they round. So neither proofs nor the recognition pass
through them, and a dequantized weight is not replaced by a constant.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from . import contractions
from .evaluator_core import Array, Attrs, Inputs, Result, Table, UnsupportedOp, is_quantized_type, optional_input

# elem_type → dtype, for the attribute `output_dtype`.
TYPES: dict[int, np.dtype[Any]] = {
    2: np.dtype(np.uint8),
    3: np.dtype(np.int8),
    4: np.dtype(np.uint16),
    5: np.dtype(np.int16),
    17: np.dtype(ml_dtypes.float8_e4m3fn),
    18: np.dtype(ml_dtypes.float8_e4m3fnuz),
    19: np.dtype(ml_dtypes.float8_e5m2),
    20: np.dtype(ml_dtypes.float8_e5m2fnuz),
    21: np.dtype(ml_dtypes.uint4),
    22: np.dtype(ml_dtypes.int4),
}
# Types without infinity: an infinite input becomes NaN, with or without saturation.
_NO_INFINITY = frozenset({"float8_e4m3fnuz", "float8_e5m2fnuz"})
# Largest number up to which float64 represents all integers. Every zero point is in this range.
_LARGEST_INTEGER = 2.0**53


def finite_limits(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return the smallest and the largest finite number of a quantized type.

    Returns: (low, high), for example (-128.0, 127.0) for int8.
    """
    if "int" in dtype.name:
        info = ml_dtypes.iinfo(dtype)
        return float(info.min), float(info.max)
    largest = float(ml_dtypes.finfo(dtype).max)
    return -largest, largest


def broadcast_parameter(parameter: Any, shape: tuple[int, ...], axis: int, block: int) -> Array:
    """Shape a scale or zero point so that it broadcasts over a tensor.

    Args:
        parameter: one number for the tensor, one per element along ``axis``, or one per ``block`` of elements there.
        shape: shape of the tensor.
        block: size of a block along ``axis``; 0 without blocks.

    Returns: a scalar, (1, …, n, …, 1) with n along ``axis``, or an array of the whole ``shape`` for blocks.

    Raises:
        ValueError: the parameter has another shape.
    """
    parameter = np.asarray(parameter)
    if parameter.size == 1 and (parameter.ndim <= 1 or not block):
        return parameter.reshape(())
    if axis < 0:
        axis = axis + len(shape)
    if not 0 <= axis < len(shape):
        raise ValueError(f"axis {axis} is out of range for a tensor of {len(shape)} dims")
    if not block:
        if parameter.shape != (shape[axis],):
            raise ValueError(
                f"a scale of shape {parameter.shape} along axis {axis} of {shape}: expected one value per index"
            )
        return parameter.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    wanted = tuple(math.ceil(n / block) if i == axis else n for i, n in enumerate(shape))
    if parameter.shape != wanted:
        raise ValueError(f"a scale of shape {parameter.shape} in blocks of {block} of {shape}: expected shape {wanted}")
    return np.repeat(parameter, block, axis)[tuple(slice(0, n) for n in shape)]


def quantized_dtype(zero_point: Any, attrs: Attrs) -> np.dtype[Any]:
    """Return the output type of a QuantizeLinear.

    Returns: the zero point's type. Without a zero point, the type is ``output_dtype``; without either, it is uint8.

    Raises:
        UnsupportedOp: the type is unknown here.
    """
    number = attrs.get("output_dtype") or 0
    dtype = np.asarray(zero_point).dtype if zero_point is not None else TYPES.get(number) if number else TYPES[2]
    if dtype is None or dtype not in TYPES.values():
        raise UnsupportedOp(f"QuantizeLinear to {dtype if dtype is not None else f'type {number}'}")
    return dtype


def scaled_quotient(inputs: Inputs, attrs: Attrs) -> tuple[Array, Array]:
    """Compute x / scale for a QuantizeLinear.

    Returns: the quotient, and the zero point (0 if absent), both float64.
    """
    x = np.asarray(inputs[0])
    scale = inputs[1]
    zero_point = optional_input(inputs, 2)
    axis = attrs.get("axis", 1)
    block = attrs.get("block_size", 0)
    if zero_point is None:
        zero = np.zeros(())
    else:
        zero = broadcast_parameter(zero_point, x.shape, axis, block).astype(np.float64)
    return x.astype(np.float64) / broadcast_parameter(scale, x.shape, axis, block).astype(np.float64), zero


def saturate_to_dtype(values: Array, dtype: np.dtype[Any], saturate: bool = True) -> Array:
    """Convert to a quantized type, clamping to its range.

    The specification does not define NaN → integer. Here NaN becomes the type's smallest number, as in onnxruntime.
    Float types keep NaN.

    Args:
        values: whole numbers for an integer type, any numbers for a float type.
        saturate: for float types. If False, a number that is too large becomes Inf, or NaN if the type has no Inf.

    Returns: an array of ``dtype``.
    """
    low, high = finite_limits(dtype)
    if "int" in dtype.name:
        # If one operand is NaN, fmin and fmax return the other operand, so NaN becomes ``low``.
        bounded = np.fmin(np.fmax(values, low), high)
        if dtype.kind in "iu":
            return bounded.astype(dtype)
        return bounded.astype(np.int64).astype(dtype)
    if saturate:
        if dtype.name not in _NO_INFINITY:
            kept = values
        else:
            kept = np.where(np.isinf(values), np.nan, values)
        # np.clip keeps NaN.
        values = np.clip(kept, low, high)
    return _round_to_odd(np.asarray(values)).astype(dtype)


def _round_to_odd(values: Array) -> Array:
    """Round to float32, setting the last bit to 1 if the rounding is inexact.

    A second rounding to a narrower type then gives the same result as a single rounding (Boldo and Melquiond, "When
    double rounding is odd", 2005). ml_dtypes 0.6 converts float64 to 8 bits by way of float32. This could round a value
    near a tie to the tie itself.
    """
    near = values.astype(np.float32)
    even = (near.view(np.uint32) & 1) == 0
    beside = np.nextafter(near, np.where(values > near, np.inf, -np.inf).astype(np.float32))
    return np.where((near != values) & even & ~np.isnan(values), beside, near)


def _quantize(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    dtype = quantized_dtype(optional_input(inputs, 2), attrs)
    divided, zero = scaled_quotient(inputs, attrs)
    if "int" in dtype.name:
        bounded = np.clip(np.rint(divided), -_LARGEST_INTEGER, _LARGEST_INTEGER)
        return saturate_to_dtype(bounded + zero, dtype)
    return saturate_to_dtype(divided, dtype, bool(attrs.get("saturate", 1)))


def _dequantize(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    q = np.asarray(inputs[0])
    scale = inputs[1]
    zero_point = optional_input(inputs, 2)
    axis = attrs.get("axis", 1)
    block = attrs.get("block_size", 0)
    values = q.astype(np.float64)
    if zero_point is not None:
        values = values - broadcast_parameter(zero_point, q.shape, axis, block).astype(np.float64)
    return values * broadcast_parameter(scale, q.shape, axis, block).astype(np.float64)


def _dynamic_quantize_linear(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """Evaluate DynamicQuantizeLinear.

    The range is the input's range, extended to include 0. A range of width 0 gets the scale 1/255, as in
    onnx.reference.
    """
    x = inputs[0]
    low = min(0.0, float(x.min(initial=0.0)))
    high = max(0.0, float(x.max(initial=0.0)))
    scale = np.asarray((high - low if high != low else 1.0) / 255)
    zero = np.rint(np.clip(0.0 - low / scale, 0, 255))
    y = saturate_to_dtype(np.rint(x / scale) + zero, TYPES[2])
    return y, scale, saturate_to_dtype(np.asarray(zero), TYPES[2])


def subtract_zero_points(inputs: Inputs) -> tuple[Array, Array]:
    """Subtract the zero points of MatMulInteger's or ConvInteger's operands.

    Returns: both operands as float64, which represents the differences exactly.
    """
    a, b = (np.asarray(value).astype(np.float64) for value in inputs[:2])
    zero_a = optional_input(inputs, 2)
    zero_b = optional_input(inputs, 3)
    # Several zero points are one per row.
    if zero_a is not None:
        zero = np.asarray(zero_a).astype(np.float64)
        a = a - (zero.reshape(()) if zero.size == 1 else zero.reshape(*zero.shape, 1) if zero.ndim == 1 else zero)
    if zero_b is not None:
        zero = np.asarray(zero_b).astype(np.float64)
        # Several zero points are one per column.
        b = b - (zero.reshape(()) if zero.size == 1 else zero)
    return a, b


def _matmul_integer(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    a, b = subtract_zero_points(inputs)
    return _to_int32(a @ b, inputs)


def _conv_integer(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    if len(inputs) > 3 and inputs[3] is not None and np.size(inputs[3]) > 1:
        raise UnsupportedOp("ConvInteger with one zero point per channel")
    result = contractions.TABLE[("", "Conv")](subtract_zero_points(inputs), attrs, opset, outputs)
    return _to_int32(np.asarray(result), inputs)


def _to_int32(values: Array, inputs: Inputs) -> Array:
    """Convert the result of integer operands to int32.

    Callers may deliberately pass operands that are not rounded to integers. Then the result stays float64.
    """
    whole = all(np.asarray(value).dtype.kind != "f" for value in inputs[:2])
    if whole:
        return values.astype(np.int64).astype(np.int32)
    return values


_OPS = {
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
}

TABLE: Table = {
    **{(domain, op): function for op, function in _OPS.items() for domain in ("", "com.microsoft")},
    ("", "DynamicQuantizeLinear"): _dynamic_quantize_linear,
    ("", "MatMulInteger"): _matmul_integer,
    ("", "ConvInteger"): _conv_integer,
}

__all__ = [
    "TABLE",
    "TYPES",
    "broadcast_parameter",
    "finite_limits",
    "is_quantized_type",
    "quantized_dtype",
    "saturate_to_dtype",
    "scaled_quotient",
    "subtract_zero_points",
]
