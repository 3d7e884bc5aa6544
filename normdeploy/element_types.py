"""Tells floating types from integers, those of ml_dtypes too, which numpy calls "V" alike, and their unit roundoff."""

from __future__ import annotations

import numpy as np

# Half of the distance between 1 and the next larger number, by numpy's name of a floating type.
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def is_float(dtype: np.dtype) -> bool:
    """Whether it is a floating type."""
    return dtype.kind == "f" or (dtype.kind == "V" and not _is_narrow_integer(dtype))


def is_integer(dtype: np.dtype) -> bool:
    """Whether it is an integer type, of 2 and 4 bits too."""
    return dtype.kind in "iu" or (dtype.kind == "V" and _is_narrow_integer(dtype))


def _is_narrow_integer(dtype: np.dtype) -> bool:
    return dtype.name.startswith(("int", "uint"))
