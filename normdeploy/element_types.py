"""Tells floating types from integers, those of ml_dtypes too, which numpy calls "V" alike, and their unit roundoff."""

from __future__ import annotations

import ml_dtypes
import numpy as np


def unit_roundoff(dtype: np.dtype) -> float:
    """Return half of the distance between 1 and the next larger number of a floating type."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


# By numpy's names of the types that models compute in.
UNIT_ROUNDOFF = {name: unit_roundoff(np.dtype(name)) for name in ("float64", "float32", "float16", "bfloat16")}


def is_float(dtype: np.dtype) -> bool:
    """Whether it is a floating type."""
    return dtype.kind == "f" or (dtype.kind == "V" and not _is_narrow_integer(dtype))


def is_integer(dtype: np.dtype) -> bool:
    """Whether it is an integer type, of 2 and 4 bits too."""
    return dtype.kind in "iu" or (dtype.kind == "V" and _is_narrow_integer(dtype))


def _is_narrow_integer(dtype: np.dtype) -> bool:
    return dtype.name.startswith(("int", "uint"))
