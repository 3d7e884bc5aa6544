"""Write numbers in messages: six significant digits, and more only where two numbers differ later."""

from __future__ import annotations

from typing import Any

import numpy as np

DIGITS = 6
# Digits that tell any two float64 numbers apart (IEEE 754-2019, 5.12.2).
_MOST = 17


def format_number(value: Any, digits: int = DIGITS) -> str:
    """Write a number.

    Returns:
        a float with ``digits`` significant digits; integers, booleans and other values as they are.
    """
    array = np.asarray(value)
    if array.ndim == 0 and (array.dtype.kind == "f" or array.dtype.name in ("bfloat16",)):
        return f"{float(array):.{digits}g}"
    return str(value)


def format_pair(left: Any, right: Any) -> tuple[str, str]:
    """Write two numbers that are compared, with as many digits as tell them apart.

    Returns:
        for example ("0.1", "0.25"), or ("1.00000001", "1").
    """
    for digits in range(DIGITS, _MOST):
        texts = format_number(left, digits), format_number(right, digits)
        if texts[0] != texts[1]:
            return texts
    return format_number(left, _MOST), format_number(right, _MOST)
