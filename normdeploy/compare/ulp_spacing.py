"""Compute the distance between neighboring numbers of a floating type, and the allowed error that follows from the
error of eager.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ..types import Array
from .element_errors import difference_from_float64, finite_magnitude

EAGER_MULTIPLE = 4.0
ULPS = 4.0


def ulp_at(size: float, dtype: np.dtype) -> float:
    """Compute the distance between the numbers of ``dtype`` around ``size``.

    Returns:
        distance, at least that of subnormals.
    """
    info = ml_dtypes.finfo(dtype)
    if size:
        exponent = int(np.frexp(min(size, float(info.max)))[1]) - 1
    else:
        exponent = info.minexp
    return float(2.0 ** (max(exponent, info.minexp) - info.nmant))


def float_spacing(values: Array, dtype: np.dtype) -> Array:
    """Compute the distance between the numbers of ``dtype`` around each value.

    Returns:
        float64 of the same shape, at least the smallest normal number of float32 and wider types: smaller numbers may
        be flushed to zero.
    """
    info = ml_dtypes.finfo(dtype)
    with np.errstate(all="ignore"):
        size = np.minimum(finite_magnitude(values), float(info.max))
        exponent = np.where(size > 0, np.frexp(size)[1] - 1, info.minexp)
    # float16 has few exponents, so kernels keep its subnormals.
    if info.minexp > -64:
        least = info.minexp - info.nmant
    else:
        least = info.minexp
    return np.maximum(np.ldexp(1.0, np.maximum(exponent, info.minexp) - info.nmant), 2.0**least)


def allowed_beside_peer(error: float, size: float, dtype: np.dtype) -> float:
    """Compute the allowed error if a correct evaluation has the error ``error``: 4 times ``error`` plus 4 ulp.

    Another correct evaluation rounds differently and may have an error of the same size. The factor 4 leaves room for
    this.

    Args:
        error: largest error of eager, one evaluation in the model's own type.
        size: largest |reference|.
        dtype: dtype of the output.

    Returns:
        absolute error.
    """
    return EAGER_MULTIPLE * error + ULPS * ulp_at(size, dtype)


def allowed_beside_eager(eager: Array, reference: Array, dtype: np.dtype) -> float:
    """Compute the allowed error (`allowed_beside_peer`) of a tensor inside a model, given eager's value.

    Returns:
        absolute error.
    """
    return allowed_beside_peer(
        difference_from_float64(eager, reference).error, largest_rounded(eager, reference), dtype
    )


def largest_rounded(eager: Array, reference: Array) -> float:
    """Return the largest finite |reference| among the elements that eager rounds, or of all elements if it rounds none.

    For example, the -10000 of a mask is exact, and its size does not affect the rounding of elements around 1.

    Returns:
        float64 as a Python number.
    """
    rounded = np.isfinite(reference) & (eager.astype(np.float64) != reference)
    return float(finite_magnitude(reference).max(initial=0, where=rounded if rounded.any() else True))
