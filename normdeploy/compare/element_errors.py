"""Measure the distance of two arrays, element by element, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..dtypes import is_float_dtype
from ..types import Array
from .number_text import format_pair


def absolute_difference(value: Array, reference: Array, *, one_sided: float = math.inf) -> Array:
    """Compute |value − reference| of each element.

    Args:
        value: same shape as the reference.
        one_sided: distance of two elements of which exactly one is finite. If neither is finite, the distance is 0.

    Returns:
        float64, of the reference's shape. For types without arithmetic, equal elements give 0 and others infinity.
    """
    if reference.dtype.kind in "iub" and value.dtype.kind in "iub":
        # Different 64-bit integers may be equal as float64, so they count as at least 1 apart.
        apart = np.abs(value.astype(np.float64) - reference.astype(np.float64))
        return np.where(value == reference, 0.0, np.maximum(apart, 1.0))
    if not (is_float_dtype(reference.dtype) or reference.dtype.kind in "iub"):
        return np.where(value == reference, 0.0, math.inf)
    a = np.asarray(value, np.float64)
    b = np.asarray(reference, np.float64)
    with np.errstate(all="ignore"):
        apart = np.asarray(a - b)
    np.abs(apart, out=apart)
    finite = np.isfinite(a)
    expected = np.isfinite(b)
    apart[~(finite & expected)] = 0.0
    apart[finite != expected] = one_sided
    return apart


def nonfinite_mismatch(value: Array, reference: Array) -> Array:
    """Find elements that are NaN or infinite in one array, but differ in the other array.

    Returns:
        mask of the arrays' shape.
    """
    a = np.asarray(value, np.float64)
    b = np.asarray(reference, np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    return ~finite & ~(np.isnan(a) & np.isnan(b)) & (a != b)


def finite_magnitude(values: Array) -> Array:
    """Compute |values|.

    Returns:
        float64, 0 for elements that are not finite.
    """
    wide = np.abs(values.astype(np.float64))
    return np.where(np.isfinite(wide), wide, 0.0)


def largest_finite(values: Array) -> float:
    """Return the largest finite |value|, 0 if there is none.

    Returns:
        float64 as a Python number.
    """
    return float(finite_magnitude(values).max(initial=0.0))


def largest_of_rows(values: Array) -> Array:
    """Return the largest element of each row along the last axis.

    Returns:
        same shape with a last axis of size 1; scalars and empty arrays stay as they are.
    """
    if values.ndim and values.size:
        return values.max(axis=-1, keepdims=True)
    return values


def first_true_index(mask: Array) -> tuple[int, ...]:
    """Find the first true element.

    Returns:
        its index; () for a scalar.
    """
    return tuple(int(i) for i in np.argwhere(mask)[0])


@dataclass(frozen=True)
class Difference:
    """Largest error of an output, over the elements that are finite in the output and in the reference.

    Attributes:
        scale: largest finite |reference|.
        reason: mismatch of NaN or infinities; "" if there is none.
    """

    error: float
    scale: float
    reason: str


def difference_from_float64(value: Array, reference: Array) -> Difference:
    """Compare a tensor with the float64 reference of the same shape.

    Returns:
        largest error, scale and mismatch.
    """
    got = value.astype(np.float64)
    expected = reference.astype(np.float64)
    wrong = nonfinite_mismatch(got, expected)
    reason = ""
    if wrong.any():
        first = first_true_index(wrong)
        texts = format_pair(got[first], expected[first])
        reason = f"{texts[0]} where float64 has {texts[1]} ({int(wrong.sum())} of {wrong.size} elements)"
    error = float(absolute_difference(got, expected, one_sided=0.0).max(initial=0.0))
    return Difference(error, largest_finite(expected), reason)
