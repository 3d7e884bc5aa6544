"""Measures how far two arrays are apart, element by element, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..dtypes import is_float_dtype
from ..types import Array


def absolute_difference(value: Array, reference: Array, *, one_sided: float = math.inf) -> Array:
    """Return |value − reference| of each element, as float64.

    Args:
        value: of the reference's shape.
        one_sided: the distance where one of the two is finite and the other is not; it is 0 where neither is.
    """
    if reference.dtype.kind in "iub" and value.dtype.kind in "iub":
        # Integers of 64 bits may be closer than float64 tells.
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
    """Return a mask of the elements of which one is NaN or infinite, and the other is not the same."""
    a = np.asarray(value, np.float64)
    b = np.asarray(reference, np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    return ~finite & ~(np.isnan(a) & np.isnan(b)) & (a != b)


def finite_magnitude(values: Array) -> Array:
    """Return |values| as float64, 0 where they are not finite."""
    wide = np.abs(values.astype(np.float64))
    return np.where(np.isfinite(wide), wide, 0.0)


def largest_finite(values: Array) -> float:
    """Return the largest finite |value|, 0 where there is none."""
    return float(finite_magnitude(values).max(initial=0.0))


def largest_of_rows(values: Array) -> Array:
    """Return the largest element of each row along the last axis, which stays with size 1."""
    if values.ndim and values.size:
        return values.max(axis=-1, keepdims=True)
    return values


def first_true_index(mask: Array) -> tuple[int, ...]:
    """Return the index of the first true element; () of a scalar."""
    return tuple(int(i) for i in np.argwhere(mask)[0])


@dataclass(frozen=True)
class Difference:
    """The largest error of an output where it and the reference are finite.

    ``scale``: the largest finite |reference|. ``reason`` says what is wrong with NaN and infinities, "" where nothing
    is.
    """

    error: float
    scale: float
    reason: str


def difference_from_float64(value: Array, reference: Array) -> Difference:
    """Compare a tensor with the float64 reference of the same shape."""
    got = value.astype(np.float64)
    expected = reference.astype(np.float64)
    wrong = nonfinite_mismatch(got, expected)
    reason = ""
    if wrong.any():
        first = first_true_index(wrong)
        reason = f"{got[first]} where float64 has {expected[first]:.6g} ({int(wrong.sum())} of {wrong.size} elements)"
    error = float(absolute_difference(got, expected, one_sided=0.0).max(initial=0.0))
    return Difference(error, largest_finite(expected), reason)
