"""A norm and the QuantizeLinear behind it, in Triton: what its kernels in int8 and FP8 share.

QuantizeLinear with zero point 0 (ONNX): int8 is saturate(round(y / scale)), a tie going to the even number; FP8 (E4M3,
at most 448) is the nearest number of that type, what is larger saturated. y is the norm as it would be stored in x's
type, so that it is rounded as before QuantizeLinear; the quotient is one of float32, correctly rounded (`quotient`). A
NaN becomes −128 in int8 (ONNX leaves it open; onnxruntime 1.31 does so too) and a NaN in FP8.

The scale is given, one number, or (``DYNAMIC``) made of each row in float32: max(max|y|, least) / 127, or / 448. A NaN
in a row makes its scale a NaN. Of a row of zeros and least = 0 the scale is 0, and the quotient a NaN.
"""

import numpy as np
import triton
import triton.language as tl

from ._math import (
    centered,
    half,
    inside,
    inverse_root,
    is_wide,
    load,
    load_sum,
    mean_square,
    row_mean_square,
    row_moments,
    store,
    tile_rows,
    widened,
)

LARGEST = {"int8": 127.0, "fp8": 448.0}


def quantized(y: np.ndarray, scale: np.ndarray, to: str) -> np.ndarray:
    """QuantizeLinear with zero point 0 in float64: the integers, or the numbers of E4M3 (3 bits behind the point, the
    least exponent −6)."""
    with np.errstate(all="ignore"):
        quotient = y / scale
        if to == "int8":
            return np.clip(np.rint(np.where(np.isnan(quotient), -128.0, quotient)), -128.0, 127.0)
        limited = np.clip(quotient, -LARGEST[to], LARGEST[to])
        step = np.ldexp(1.0, np.maximum(np.frexp(np.nan_to_num(limited))[1] - 1, -6) - 3)
        return np.rint(limited / step) * step


def by_row(y: np.ndarray, axis: int, least: float, to: str) -> tuple[np.ndarray, np.ndarray]:
    """What is quantized by a scale of each row, the dims from ``axis`` on, and these scales."""
    axes = tuple(range(axis % y.ndim, y.ndim))
    scales = np.maximum(np.abs(y).max(axes, keepdims=True, initial=0.0), least) / LARGEST[to]
    return quantized(y, scales, to), scales


@triton.jit
def quotient(y, scale):
    """y / scale, correctly rounded where 2⁻⁶⁰ ≤ scale ≤ 2⁶⁰ and it is not so large or small that it is saturated or
    becomes 0 anyway; else within one place.

    By the correctly rounded reciprocal, which a row has one of, and two corrections, q + (y − q·scale)/scale, whose
    remainders are exact in a fused multiply-add: after the first q is within one place, and the second rounds correctly
    (Markstein, IBM J. Res. Dev. 34, 1990). A division for each element would take twice as many instructions,
    one of them of the slow unit.
    """
    by = tl.zeros_like(y) + scale
    inverse = tl.zeros_like(y) + tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    q = y * inverse
    better = tl.fma(tl.fma(-q, by, y), inverse, q)
    better = tl.fma(tl.fma(-better, by, y), inverse, better)
    return tl.where(tl.abs(q) < 512.0, better, q)  # of an infinity the remainder is none


@triton.jit
def store_quantized(ptr, offset, y, scale, mask):
    """``y``, float32, divided by ``scale`` and stored in the type of ``ptr``."""
    q = quotient(y, scale)
    if ptr.dtype.element_ty == tl.int8:
        # at and above 2²² a float32 has no digits behind the point: adding 1.5 · 2²³ rounds to the even number, and the
        # low bits of the sum are the integer; a comparison with a NaN is false
        limited = tl.minimum(tl.where(q > -128.0, q, -128.0), 127.0)
        bits = (limited + 12582912.0).to(tl.int32, bitcast=True)
        tl.store(ptr + offset, bits.to(tl.int8), mask=mask)
    else:
        # below sm_90 Triton cuts to float16 first: what is cut off is left as an odd last digit, so that no number
        # becomes a tie that is none (round to odd: Boldo, Melquiond 2008)
        bits = q.to(tl.int32, bitcast=True)
        odd = tl.where((bits & 0x1FFF) != 0, bits | 0x2000, bits).to(tl.float32, bitcast=True)
        tl.store(ptr + offset, odd.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def magnitude(y, mask):
    """The bits of |y|, 0 where masked: as whole numbers they are ordered as the numbers are, and a NaN is above all."""
    return tl.where(mask, y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def row_scale(scale_ptr, row, rows, bits, LEAST: tl.constexpr, TO: tl.constexpr):
    """The scales ``[ROWS, 1]`` of rows whose largest magnitudes have these ``bits`` ``[ROWS]``, which are stored."""
    largest = bits.to(tl.float32, bitcast=True)
    largest = tl.where(largest < LEAST, LEAST, largest)
    limit: tl.constexpr = 127.0 if TO == tl.int8 else 448.0  # noqa: SIM300 (a type is no constant)
    scale = tl.div_rn(largest, tl.full([1], limit, tl.float32))
    tl.store(scale_ptr + row, scale, mask=row < rows)  # of rows without elements too
    return scale[:, None]


@triton.jit
def as_stored(y, ptr):
    """``y`` rounded as a tensor of the type of ``ptr`` would hold it, in float32."""
    return y.to(ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def normalized(x, mean, inverse, gamma_ptr, beta_ptr, x_ptr, at, known, CENTERED: tl.constexpr):
    """The norm of ``x``, rounded to the data's type."""
    y = (x - mean) * inverse * load(gamma_ptr, at, known)
    return as_stored(y + load(beta_ptr, at, known) if CENTERED else y, x_ptr)


@triton.jit
def norm_quantize(
    x_ptr,
    residual_ptr,
    gamma_ptr,
    beta_ptr,
    scale_ptr,
    rows,
    n,
    y_ptr,
    sum_ptr,
    EPSILON: tl.constexpr,
    CENTERED: tl.constexpr,
    ADD: tl.constexpr,
    DYNAMIC: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOP: tl.constexpr,
):
    """LayerNorm (``CENTERED``) or RMSNorm of rows, of x + residual with ``ADD``, quantized by one scale, or
    (``DYNAMIC``) by one of each row, which is an output. A pointer that is not used is any other."""
    if rows == 0:  # of the one program that a grid then has
        return
    TO: tl.constexpr = y_ptr.dtype.element_ty
    scale = tl.full([1, 1], 1.0, tl.float32) if DYNAMIC else tl.load(scale_ptr + tl.zeros([1, 1], tl.int32))
    for WIDE in tl.static_range(2):
        if is_wide(n, x_ptr) == WIDE:
            length = widened(n, x_ptr, WIDE)
            SIZE: tl.constexpr = BLOCK if WIDE or not LOOP else half(BLOCK)
            row, exists = tile_rows(rows, length, ROWS)
            base, live = (row * length)[:, None], exists[:, None]
            col = tl.arange(0, SIZE)[None, :]
            mean = 0.0
            if LOOP:
                if CENTERED:
                    first = load_sum(x_ptr, residual_ptr, row * length, exists, ADD)[:, None]
                    mean, m2 = row_moments(x_ptr, residual_ptr, base, live, first, length, ROWS, SIZE, ADD)
                    variance = m2 / length
                else:
                    variance = row_mean_square(x_ptr, residual_ptr, base, live, length, ROWS, SIZE, ADD)
                inverse = inverse_root(variance, EPSILON)
                by = scale
                if DYNAMIC:
                    most = tl.zeros([ROWS, SIZE], tl.int32)
                    for start in range(0, length, SIZE):
                        at = start + col
                        mask = inside(live, at < length, ROWS)
                        x = load_sum(x_ptr, residual_ptr, base + at, mask, ADD)
                        y = normalized(x, mean, inverse, gamma_ptr, beta_ptr, x_ptr, at, at < length, CENTERED)
                        most = tl.maximum(most, magnitude(y, mask))
                    by = row_scale(scale_ptr, row, rows, tl.max(most, axis=1), LEAST, TO)
                for start in range(0, length, SIZE):
                    at = start + col
                    mask = inside(live, at < length, ROWS)
                    x = load_sum(x_ptr, residual_ptr, base + at, mask, ADD)
                    if ADD:
                        store(sum_ptr, base + at, x, mask)
                    y = normalized(x, mean, inverse, gamma_ptr, beta_ptr, x_ptr, at, at < length, CENTERED)
                    store_quantized(y_ptr, base + at, y, by, mask)
            else:
                mask = inside(live, col < length, ROWS)
                x = load_sum(x_ptr, residual_ptr, base + col, mask, ADD)
                if ADD:
                    store(sum_ptr, base + col, x, mask)
                if CENTERED:
                    first = load_sum(x_ptr, residual_ptr, row * length, exists, ADD)[:, None]
                    x, m2 = centered(x, first, mask, length, 1)
                    variance = m2 / length
                else:
                    variance = mean_square(x, mask, length)
                inverse = inverse_root(variance, EPSILON)
                y = normalized(x, mean, inverse, gamma_ptr, beta_ptr, x_ptr, col, col < length, CENTERED)
                by = scale
                if DYNAMIC:
                    by = row_scale(scale_ptr, row, rows, tl.max(magnitude(y, mask), axis=1), LEAST, TO)
                store_quantized(y_ptr, base + col, y, by, mask)
