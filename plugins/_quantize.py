"""Shared parts of the kernels for a norm followed by QuantizeLinear, in int8 and FP8.

QuantizeLinear has the zero point 0 (ONNX). For int8 the result is saturate(round(y / scale)), with ties to even. For
FP8 (E4M3, at most 448) it is the nearest number of that type; larger quotients saturate. y is the norm rounded to x's
type, as QuantizeLinear would read it. The quotient is a correctly rounded float32 (`quotient`). In int8, a NaN becomes
−128, as in onnxruntime 1.31; ONNX does not define this case. In FP8, a NaN stays a NaN.

The scale is one number, which is an input. With ``DYNAMIC``, the scale is computed for each row in float32: max(max|y|,
least) / 127 for int8, or / 448 for FP8. If a row contains a NaN, its scale is a NaN. If a row is zero and ``least`` is
0, its scale is 0 and its quotients are NaN.
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
    """Compute QuantizeLinear with zero point 0 in float64.

    Returns:
        the integers, or the numbers of E4M3 (3 fraction bits, smallest exponent −6).
    """
    with np.errstate(all="ignore"):
        quotient = y / scale
        if to == "int8":
            return np.clip(np.rint(np.where(np.isnan(quotient), -128.0, quotient)), -128.0, 127.0)
        limited = np.clip(quotient, -LARGEST[to], LARGEST[to])
        step = np.ldexp(1.0, np.maximum(np.frexp(np.nan_to_num(limited))[1] - 1, -6) - 3)
        return np.rint(limited / step) * step


def by_row(y: np.ndarray, axis: int, least: float, to: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantize by one scale per row. A row consists of the dims from ``axis`` on.

    Returns:
        quantized values and scales.
    """
    axes = tuple(range(axis % y.ndim, y.ndim))
    scales = np.maximum(np.abs(y).max(axes, keepdims=True, initial=0.0), least) / LARGEST[to]
    return quantized(y, scales, to), scales


@triton.jit
def quotient(y, scale):
    """Compute y / scale. The quotient is correctly rounded if 2⁻⁶⁰ ≤ scale ≤ 2⁶⁰, and if it is neither so large that it
    saturates nor so small that it becomes 0. Otherwise, its error is at most one unit in the last place.

    y is multiplied by the correctly rounded reciprocal of the scale, which is computed once per row. Two corrections q
    + (y − q·scale)/scale follow; their remainders are exact in a fused multiply-add. After the first correction, the
    error of q is at most one unit in the last place. The second correction rounds correctly (Markstein, IBM J. Res.
    Dev. 34, 1990). A division for each element would take twice as many instructions, one of them on the slow unit.

    Returns:
        float32.
    """
    by = tl.zeros_like(y) + scale
    inverse = tl.zeros_like(y) + tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    q = y * inverse
    better = tl.fma(tl.fma(-q, by, y), inverse, q)
    better = tl.fma(tl.fma(-better, by, y), inverse, better)
    # The remainder of an infinite quotient is NaN, so quotients from 512 on are not corrected.
    return tl.where(tl.abs(q) < 512.0, better, q)


@triton.jit
def store_quantized(ptr, offset, y, scale, mask):
    """Divide ``y`` (float32) by ``scale`` and store it in the type of ``ptr``."""
    q = quotient(y, scale)
    if ptr.dtype.element_ty == tl.int8:
        # From 2²³ on, a float32 has no fraction digits. So adding 1.5 · 2²³ rounds to an integer, with ties to even,
        # and the low bits of the sum are this integer. A comparison with a NaN is false, so a NaN becomes −128.
        limited = tl.minimum(tl.where(q > -128.0, q, -128.0), 127.0)
        bits = (limited + 12582912.0).to(tl.int32, bitcast=True)
        tl.store(ptr + offset, bits.to(tl.int8), mask=mask)
    else:
        # Below sm_90, Triton first truncates to float16. If the truncation drops nonzero bits, the last kept bit is set
        # to 1, so that no number becomes a false tie (round to odd: Boldo, Melquiond 2008).
        bits = q.to(tl.int32, bitcast=True)
        odd = tl.where((bits & 0x1FFF) != 0, bits | 0x2000, bits).to(tl.float32, bitcast=True)
        tl.store(ptr + offset, odd.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def magnitude(y, mask):
    """Return the bits of |y|, 0 for masked elements. The bits, as integers, are ordered like the numbers, and a NaN is
    larger than all numbers.

    Returns:
        int32.
    """
    return tl.where(mask, y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def row_scale(scale_ptr, row, rows, bits, LEAST: tl.constexpr, TO: tl.constexpr):
    """Compute and store the scales of rows from the ``bits`` ``[ROWS]`` of their largest magnitudes.

    Returns:
        scales ``[ROWS, 1]``.
    """
    largest = bits.to(tl.float32, bitcast=True)
    largest = tl.where(largest < LEAST, LEAST, largest)
    limit: tl.constexpr = 127.0 if TO == tl.int8 else 448.0  # noqa: SIM300 (a type is not a constant)
    scale = tl.div_rn(largest, tl.full([1], limit, tl.float32))
    # Rows without elements get a scale too, so only the rows are masked here.
    tl.store(scale_ptr + row, scale, mask=row < rows)
    return scale[:, None]


@triton.jit
def as_stored(y, ptr):
    """Round ``y`` to the type of ``ptr``.

    Returns:
        float32.
    """
    return y.to(ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def normalized(x, mean, inverse, gamma_ptr, beta_ptr, x_ptr, at, known, CENTERED: tl.constexpr):
    """Compute the norm of ``x``, rounded to the data's type.

    Returns:
        float32.
    """
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
    """Compute LayerNorm (``CENTERED``) or RMSNorm of rows of x, or of x + residual with ``ADD``, and quantize the
    result. The scale is one number, which is an input. With ``DYNAMIC``, there is one scale per row, and the scales are
    an output. For an unused pointer, any other pointer may be passed.
    """
    # An empty batch still launches one program (`_launch.programs`).
    if rows == 0:
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
