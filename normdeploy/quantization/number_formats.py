"""Convert ranges to steps, and numbers to codes, in int8, uint8, FP8 and INT4.

A code is the stored integer or FP8 number q. A step is a scale with a zero point. Both follow ONNX's QuantizeLinear-21:

    q = saturate(round_half_even(x / scale) + zero_point)        x' = (q − zero_point) · scale

FP8 rounds x / scale to the nearest FP8 number. The format is E4M3: one sign bit, four bits of exponent, three bits of
fraction, largest number 448, no infinity (Micikevicius et al., arXiv 2209.05433).
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from onnx import TensorProto

_LEAST_HALF = 2.0**-20
# Smallest scale. A smaller scale is useless, and its inverse might overflow.
_TINY = 2.0**-100


@dataclass(frozen=True)
class CodeFormat:
    """Type that numbers are quantized to.

    Symmetric int8 does not use the code -128, because int8 has no code 128.

    Attributes:
        onnx: ONNX elem_type of the format.
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
        the step. Only uint8 has a zero point other than 0.
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
        axis: axis along which scales vary; None for a single scale.
        block: number of consecutive indices along ``axis`` that share a scale; 0 for one scale per index.

    Returns:
        float32. A scalar if ``axis`` is None; [size of ``axis``] for one scale per index; for blocks, the shape of
        ``w`` with ``axis`` divided by ``block``.
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
    """Round scales up to numbers of float16 or bfloat16. Rounding up ensures that no range becomes smaller.

    float16 represents numbers below 2⁻²⁰ with fewer than four binary digits, so smaller scales become 2⁻²⁰. Tensors
    with these scales then use fewer codes.

    Returns:
        float32; if ``dtype`` is float32, the scales unchanged.
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
        block: number of indices along ``axis`` that share a scale.

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
        scales: a single scale, or scales that broadcast to ``x``.

    Returns:
        codes in the shape of ``x`` and the dtype of the format.
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
