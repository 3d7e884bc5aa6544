"""Convert ranges to steps, and numbers to codes, in int8, uint8, FP8 and INT4 as in ONNX's QuantizeLinear-21.

    q = saturate(round_half_even(x / scale) + zero_point)        x' = (q − zero_point) · scale

FP8 (E4M3: one sign bit, four bits of exponent, three of fraction, largest 448, no infinity; Micikevicius et al., arXiv
2209.05433) rounds x / scale to the nearest of its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from onnx import TensorProto

_LEAST_HALF = 2.0**-20
# A smaller scale is useless, and its inverse might overflow.
_TINY = 2.0**-100


@dataclass(frozen=True)
class CodeFormat:
    """Type that numbers are quantized to.

    Symmetric int8 does not use -128, because it has no positive counterpart.

    Attributes:
        onnx: elem_type of the format.
        low: smallest code that is used.
        high: largest code that is used.
        since: first opset whose QuantizeLinear supports the format.
    """

    name: str
    onnx: int
    dtype: np.dtype
    low: float
    high: float
    since: int

    @property
    def is_integer(self) -> bool:
        """Return True for all formats but FP8."""
        return self.name != "float8e4m3fn"


INT8 = CodeFormat("int8", TensorProto.INT8, np.dtype(np.int8), -127, 127, 13)
UINT8 = CodeFormat("uint8", TensorProto.UINT8, np.dtype(np.uint8), 0, 255, 13)
INT4 = CodeFormat("int4", TensorProto.INT4, np.dtype(ml_dtypes.int4), -7, 7, 21)
FP8 = CodeFormat("float8e4m3fn", TensorProto.FLOAT8E4M3FN, np.dtype(ml_dtypes.float8_e4m3fn), -448, 448, 19)


@dataclass(frozen=True)
class ScaleZeroPoint:
    """Scale and zero point of one tensor."""

    format: CodeFormat
    scale: float
    zero_point: int = 0


def step_for_range(low: float, high: float, form: CodeFormat) -> ScaleZeroPoint:
    """Compute the step for numbers between ``low`` and ``high``.

    Zero is always a code, because padding and masks need it.

    Returns:
        a step with a zero point for uint8, without one for the symmetric formats.
    """
    low = min(low, 0.0)
    high = max(high, 0.0)
    if form is UINT8:
        scale = np.float32(max((high - low) / 255, _TINY))
        return ScaleZeroPoint(form, float(scale), int(np.clip(np.rint(-low / scale), 0, 255)))
    return ScaleZeroPoint(form, float(np.float32(max(-low, high, _TINY * form.high) / form.high)))


def weight_scales(w: np.ndarray, axis: int | None, form: CodeFormat, block: int = 0) -> np.ndarray:
    """Compute the scales of a weight from its largest magnitudes.

    Args:
        axis: axis along which each place has a scale, all other axes reduced; None for a single scale.
        block: places along ``axis`` that share a scale; 0 for one scale per place.

    Returns:
        float32, a scalar for None, [size of ``axis``], or for blocks the shape of ``w`` with ``axis`` divided by
        ``block``.
    """
    magnitude = np.abs(w)
    if axis is None:
        largest = magnitude.max(initial=0.0)
    elif block:
        parts = magnitude.reshape(*w.shape[:axis], w.shape[axis] // block, block, *w.shape[axis + 1 :])
        largest = parts.max(axis=axis + 1)
    else:
        largest = magnitude.max(axis=tuple(i for i in range(w.ndim) if i != axis), initial=0.0)
    return np.maximum(largest / form.high, _TINY).astype(np.float32)


def round_scales_up(scales: np.ndarray | float, dtype: np.dtype) -> np.ndarray:
    """Round scales up to numbers of float16 or bfloat16, so that no range is cut.

    Below 2⁻²⁰ float16 has fewer than four digits, so smaller scales become 2⁻²⁰; fewer codes are then used.

    Returns:
        float32; for float32 the scales themselves.
    """
    wide = np.asarray(scales, np.float32)
    if dtype == np.float32:
        return wide
    near = np.maximum(wide, _LEAST_HALF).astype(dtype)
    above = np.nextafter(near, np.array(np.inf, dtype))
    return np.where(near.astype(np.float32) < wide, above, near).astype(np.float32)


def broadcast_scales(scales: np.ndarray, shape: tuple[int, ...], axis: int | None, block: int = 0) -> np.ndarray:
    """Broadcast scales to multiply them with a tensor of this shape.

    Args:
        axis: axis of the scales; None for a single scale.
        block: places along ``axis`` that share a scale.

    Returns:
        scales that broadcast to ``shape``.
    """
    if axis is None:
        return scales
    if block:
        return np.repeat(scales, block, axis=axis)
    return scales.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def quantize_to_codes(x: np.ndarray, scales: np.ndarray | float, form: CodeFormat, zero_point: int = 0) -> np.ndarray:
    """Quantize ``x`` to codes of ``form``.

    Args:
        scales: one scale, or scales that broadcast to ``x``.

    Returns:
        codes in the shape of ``x`` and the format's own dtype.
    """
    divided = (x / np.float32(scales) if np.ndim(scales) == 0 else x / scales).astype(np.float32)
    if not form.is_integer:
        return np.clip(divided, form.low, form.high).astype(form.dtype)
    return np.clip(np.rint(divided) + zero_point, form.low, form.high).astype(form.dtype)


def quantize_dequantize(x: np.ndarray, step: ScaleZeroPoint) -> np.ndarray:
    """Round ``x`` to the numbers that a quantizer with this step can represent.

    Returns:
        float32 in the shape of ``x``.
    """
    back = quantize_to_codes(x, step.scale, step.format, step.zero_point).astype(np.float32)
    return (back - np.float32(step.zero_point)) * np.float32(step.scale)


def quantize_dequantize_weight(w: np.ndarray, axis: int | None, form: CodeFormat, block: int = 0) -> np.ndarray:
    """Round a weight to the numbers that its codes and scales can represent.

    Returns:
        float32 in the shape of ``w``.
    """
    scales = broadcast_scales(weight_scales(w, axis, form, block), w.shape, axis, block)
    return quantize_to_codes(w, scales, form).astype(np.float32) * scales
