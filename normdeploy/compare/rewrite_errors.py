"""Bound the error of one norm or one fold by the roundings of its own formula.

``unit`` is the unit roundoff u of the type in which the norm or fold is computed.
"""

from __future__ import annotations

import numpy as np

from ..types import Array

_UNITS = 8
# Factor by which a fold in a linear op may exceed the error of the nodes before the fold.
TIMES = 4
ULPS = 4


def norm_rounding_error(x: Array, y: Array, epsilon: float, *, centered: bool, gamma: float, unit: float) -> Array:
    """Compute the largest error that rounding explains in each row of a norm:

        8u · (1 + max|x|/σ) · max|γ| + u · max|y| + 2⁻²⁵ · ε/(σ² + ε) · max|y|

    The statistics are accurate to a few u of the largest element, and the result is rounded once more. Epsilon is a
    float32 attribute. Half an ulp of epsilon changes the root by a relative 2⁻²⁵·ε/(σ² + ε), which matters only in
    float64.

    Args:
        x: rows of the input, float64.
        y: rows of the result, float64.
        centered: whether the mean is subtracted.
        gamma: largest |γ|.

    Returns:
        absolute error of each row, shape [rows].
    """
    spread = np.square(x - x.mean(axis=1, keepdims=True) if centered else x).mean(axis=1)
    scale = 1 + np.abs(x).max(axis=1) / np.sqrt(spread + epsilon + 1e-300)
    largest = np.nan_to_num(np.abs(y)).max(axis=1)
    return _UNITS * unit * scale * gamma + (unit + 2.0**-25 * epsilon / (spread + epsilon + 1e-300)) * largest


def sum_rounding_error(terms: float, unit: float) -> float:
    """Compute the largest error that rounding explains in a sum: 8 roundings of its terms.

    Args:
        terms: sum of the terms' magnitudes.

    Returns:
        absolute error.
    """
    return _UNITS * unit * terms
