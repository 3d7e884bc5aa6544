"""What numpy does not tell of the types of ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from normdeploy.dtypes import UNIT_ROUNDOFF, is_float_dtype, is_integer_dtype, unit_roundoff


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (np.float64, 2.0**-53),
        (np.float32, 2.0**-24),
        (np.float16, 2.0**-11),
        (ml_dtypes.bfloat16, 2.0**-8),
        (ml_dtypes.float8_e4m3fn, 2.0**-4),
        (ml_dtypes.float8_e5m2, 2.0**-3),
    ],
)
def test_unit_roundoff_is_half_of_the_spacing_at_one(dtype: Any, wanted: float) -> None:
    assert unit_roundoff(np.dtype(dtype)) == wanted
    assert UNIT_ROUNDOFF.get(np.dtype(dtype).name, wanted) == wanted
    assert is_float_dtype(np.dtype(dtype))


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, ml_dtypes.int4, ml_dtypes.uint2])
def test_integers_of_a_few_bits_are_integers(dtype: Any) -> None:
    assert is_integer_dtype(np.dtype(dtype))
    assert not is_float_dtype(np.dtype(dtype))
