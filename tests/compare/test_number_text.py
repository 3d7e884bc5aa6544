"""Numbers in messages have six digits, and more only where two numbers differ later."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from normdeploy.compare.number_text import format_number, format_pair


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1119726300239563, "0.111973"),
        (np.float32(0.1), "0.1"),
        (np.float16(1) / 3, "0.333252"),
        (ml_dtypes.bfloat16(0.1), "0.100098"),
        (float("nan"), "nan"),
        (np.int64(123456789), "123456789"),
        (np.True_, "True"),
        ("nan", "nan"),
    ],
)
def test_numbers(value: Any, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("left", "right", "texts"),
    [
        (np.nan, 0.1119726300239563, ("nan", "0.111973")),
        (1.0, 1.00000001, ("1", "1.00000001")),
        (1.0, np.nextafter(1.0, 2), ("1", "1.0000000000000002")),
        (0.25, 0.25, ("0.25", "0.25")),
        (np.int64(2), np.int64(1), ("2", "1")),
    ],
)
def test_compared_numbers_are_told_apart(left: Any, right: Any, texts: tuple[str, str]) -> None:
    assert format_pair(left, right) == texts
