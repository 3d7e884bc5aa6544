"""The distance between neighbours of a floating type, and what a peer's error allows for."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ..types import Array
from .element_errors import difference_from_float64, finite_magnitude

EAGER_MULTIPLE = 4.0
ULPS = 4.0


def ulp_at(size: float, dtype: np.dtype) -> float:
    """Return the distance between the numbers of ``dtype`` around ``size``, at least that of its subnormals."""
    info = ml_dtypes.finfo(dtype)
    if size:
        exponent = int(np.frexp(min(size, float(info.max)))[1]) - 1
    else:
        exponent = info.minexp
    return float(2.0 ** (max(exponent, info.minexp) - info.nmant))


def float_spacing(values: Array, dtype: np.dtype) -> Array:
    """Return the distance between the numbers of ``dtype`` around each value.

    It is at least the smallest normal number of float32 and wider types: numbers below may be flushed to zero.
    """
    info = ml_dtypes.finfo(dtype)
    with np.errstate(all="ignore"):
        size = np.minimum(finite_magnitude(values), float(info.max))
        exponent = np.where(size > 0, np.frexp(size)[1] - 1, info.minexp)
    # float16 has no numbers to spare.
    if info.minexp > -64:
        least = info.minexp - info.nmant
    else:
        least = info.minexp
    return np.maximum(np.ldexp(1.0, np.maximum(exponent, info.minexp) - info.nmant), 2.0**least)


def allowed_beside_peer(error: float, size: float, dtype: np.dtype) -> float:
    """Return the largest error that passes where a correct evaluation errs by ``error``: 4 times that, and 4 ulp.

    Another evaluation is another draw of roundings of the same size; 4 is the room between two draws.

    Args:
        error: of eager, one evaluation in the model's own type.
        size: the largest |reference|.
        dtype: of the output.
    """
    return EAGER_MULTIPLE * error + ULPS * ulp_at(size, dtype)


def allowed_beside_eager(eager: Array, reference: Array, dtype: np.dtype) -> float:
    """Return what `allowed_beside_peer` allows for a tensor inside of a model, of which eager's value is known."""
    return allowed_beside_peer(
        difference_from_float64(eager, reference).error, largest_rounded(eager, reference), dtype
    )


def largest_rounded(eager: Array, reference: Array) -> float:
    """Return the largest finite |reference| of the elements that eager rounds, of all elements where it rounds none.

    The -10000 of a mask is exact, and says nothing of how elements around 1 are rounded.
    """
    rounded = np.isfinite(reference) & (eager.astype(np.float64) != reference)
    return float(finite_magnitude(reference).max(initial=0, where=rounded if rounded.any() else True))
