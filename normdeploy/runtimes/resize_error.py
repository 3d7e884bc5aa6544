"""Bound the error that rounding of the source coordinates causes in a resized tensor.

A linear or cubic Resize of n elements to m elements reads output i at a source coordinate c:

    c = (i + ½)·n/m − ½    or    c = i·(n − 1)/(m − 1)

Kernels compute c in float32. They round the scale, the product with the scale, and the difference. Each rounding is at
most u·c, where u is the unit roundoff. So the error of c is up to 3u·c, and the error of the output is up to 3u·c times
the slope between the neighbors. This error is zero if n/m is a power of two, and otherwise larger than the rounding of
the result.

An antialiased Resize to fewer elements stretches its kernel by n/m, so it reads neighbors n/m times farther away. The
kernel's weights sum to 1, so a shift of the coordinate moves the output by no more than the shift times the steepest
slope among these neighbors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..evaluate.evaluator_core import Array

# Number of roundings in the computation of a coordinate.
_ROUNDINGS = 3.0
# Number of neighbors on either side that an output depends on: a cubic kernel reads four elements.
_REACH = 2


def resize_error_bound(x: Array, shape: Sequence[int], unit: float, *, antialias: bool = False) -> Array:
    """Bound the error of each element of the resized ``x``.

    Args:
        x: the tensor before the resize. It has as many dims as ``shape``.
        shape: shape of the result.
        unit: the unit roundoff of the coordinates.
        antialias: True if the kernel is stretched along axes that shrink.

    Returns:
        float64 array of ``shape``.
    """
    axes = [axis for axis, (n, m) in enumerate(zip(x.shape, shape, strict=True)) if n != m]
    total = np.zeros(tuple(shape))
    if not total.size or not x.size:
        return total
    for axis in axes:
        size = x.shape[axis]
        made = shape[axis]
        stretch = {a: max(1, -(-x.shape[a] // shape[a])) if antialias else 1 for a in axes}
        slope = _largest_slope(x, axis, _REACH * stretch[axis])
        for other in axes:
            if other != axis:
                slope = _window_maximum(slope, other, reach=stretch[other])
        for other in axes:
            n = x.shape[other]
            m = shape[other]
            slope = np.take(slope, np.minimum(np.arange(m) * n // m, n - 1), axis=other)
        coordinates = (np.arange(made) + 1.0) * size / made
        along = [1] * x.ndim
        along[axis] = made
        total += _ROUNDINGS * unit * coordinates.reshape(along) * slope
    return total


def _largest_slope(x: Array, axis: int, reach: int) -> Array:
    """Return the largest difference of adjacent elements among ``reach`` elements on either side along ``axis``.

    Returns:
        Array of the shape of ``x``; 0 for differences that are not finite.
    """
    if x.shape[axis] < 2:
        return np.zeros(x.shape)
    steps = np.nan_to_num(np.abs(np.diff(x, axis=axis)), nan=0.0, posinf=0.0)
    last = np.take(steps, [-1], axis=axis)
    return _window_maximum(np.concatenate([steps, last], axis), axis, reach)


def _window_maximum(values: Array, axis: int, reach: int) -> Array:
    """Return the maximum over ``reach`` elements on either side along ``axis``."""
    found = values
    for away in range(1, min(reach, values.shape[axis] - 1) + 1):
        ahead = np.take(values, np.minimum(np.arange(values.shape[axis]) + away, values.shape[axis] - 1), axis)
        behind = np.take(values, np.maximum(np.arange(values.shape[axis]) - away, 0), axis)
        found = np.maximum(found, np.maximum(ahead, behind))
    return found
