"""Steps of quantization: what a range becomes in int8, uint8, FP8 and INT4, as ONNX's QuantizeLinear-21 has it.

    q = saturate(round_half_even(x / scale) + zero_point)        x' = (q − zero_point) · scale

FP8 (E4M3: one sign, four bits of exponent, three of fraction, largest 448, no infinity; Micikevicius et al., arXiv
2209.05433) rounds x / scale to the nearest of its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from onnx import TensorProto

_LEAST_HALF = 2.0**-20
# a scale below is as good as none, and its inverse might overflow
_TINY = 2.0**-100


@dataclass(frozen=True)
class CodeFormat:
    """A type that numbers are quantized to. ``low``, ``high``: the codes that are used; of symmetric int8 not -128, for
    which there would be no positive counterpart."""

    name: str
    onnx: int
    dtype: np.dtype
    low: float
    high: float
    # the opset
    since: int

    @property
    def is_integer(self) -> bool:
        return self.name != "float8e4m3fn"


INT8 = CodeFormat("int8", TensorProto.INT8, np.dtype(np.int8), -127, 127, 13)
UINT8 = CodeFormat("uint8", TensorProto.UINT8, np.dtype(np.uint8), 0, 255, 13)
INT4 = CodeFormat("int4", TensorProto.INT4, np.dtype(ml_dtypes.int4), -7, 7, 21)
FP8 = CodeFormat("float8e4m3fn", TensorProto.FLOAT8E4M3FN, np.dtype(ml_dtypes.float8_e4m3fn), -448, 448, 19)


@dataclass(frozen=True)
class ScaleZeroPoint:
    """A scale and a zero point for one tensor."""

    format: CodeFormat
    scale: float
    zero_point: int = 0


def step_for_range(low: float, high: float, form: CodeFormat) -> ScaleZeroPoint:
    """The step for numbers between ``low`` and ``high``; zero is always a code, for padding and masks need it."""
    low = min(low, 0.0)
    high = max(high, 0.0)
    if form is UINT8:
        scale = np.float32(max((high - low) / 255, _TINY))
        return ScaleZeroPoint(form, float(scale), int(np.clip(np.rint(-low / scale), 0, 255)))
    return ScaleZeroPoint(form, float(np.float32(max(-low, high, _TINY * form.high) / form.high)))


def weight_scales(w: np.ndarray, axis: int | None, form: CodeFormat, block: int = 0) -> np.ndarray:
    """float32 scales: one for each place of ``axis`` (all others reduced), or of ``block`` places along it, or a single
    one for None."""
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
    """``scales`` as numbers of float16 or bfloat16, each rounded up, so that no range is cut; float32 of float32.

    Below 2⁻²⁰ float16 has fewer than four digits, so that a smaller scale becomes that; codes are then fewer.
    """
    wide = np.asarray(scales, np.float32)
    if dtype == np.float32:
        return wide
    near = np.maximum(wide, _LEAST_HALF).astype(dtype)
    above = np.nextafter(near, np.array(np.inf, dtype))
    return np.where(near.astype(np.float32) < wide, above, near).astype(np.float32)


def broadcast_scales(scales: np.ndarray, shape: tuple[int, ...], axis: int | None, block: int = 0) -> np.ndarray:
    """``scales`` in the shape of the tensor, to multiply with."""
    if axis is None:
        return scales
    if block:
        return np.repeat(scales, block, axis=axis)
    return scales.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def quantize_to_codes(x: np.ndarray, scales: np.ndarray | float, form: CodeFormat, zero_point: int = 0) -> np.ndarray:
    """x as codes of ``form``, in its own type."""
    divided = (x / np.float32(scales) if np.ndim(scales) == 0 else x / scales).astype(np.float32)
    if not form.is_integer:
        return np.clip(divided, form.low, form.high).astype(form.dtype)
    return np.clip(np.rint(divided) + zero_point, form.low, form.high).astype(form.dtype)


def quantize_dequantize(x: np.ndarray, step: ScaleZeroPoint) -> np.ndarray:
    """What is left of float32 ``x`` after it was quantized."""
    back = quantize_to_codes(x, step.scale, step.format, step.zero_point).astype(np.float32)
    return (back - np.float32(step.zero_point)) * np.float32(step.scale)


def quantize_dequantize_weight(w: np.ndarray, axis: int | None, form: CodeFormat, block: int = 0) -> np.ndarray:
    scales = broadcast_scales(weight_scales(w, axis, form, block), w.shape, axis, block)
    return quantize_to_codes(w, scales, form).astype(np.float32) * scales
