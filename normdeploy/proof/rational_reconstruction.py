"""Read constants as the fractions that they round: a float32 near 1/n is not 1/n, but was written for it.

A norm may divide by n through a constant, or take an unbiased variance through n/(n − 1). The file then holds a rounded
number, and it computes a norm only up to that rounding. Such a constant is read as the fraction, or the root of a
fraction, whose nearest float it is. The certificate lists each one, and applies to the program as read. Only numbers
that are made of element counts are read this way, never an epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

# Maximum number of elements of a constant that may be read as a fraction
FEW = 4


@dataclass(frozen=True)
class RationalReading:
    """Fraction, or √``square`` if ``root``."""

    fraction: Fraction = Fraction(0)
    square: Fraction = Fraction(0)
    root: bool = False

    def __str__(self) -> str:
        if self.root:
            return f"√({self.square})"
        return str(self.fraction)


def axis_products(shapes: Iterable[Iterable[int | None]]) -> frozenset[int]:
    """Collect the numbers of elements that some axes of a tensor have together, over all tensors.

    Axes of unknown size are left out.

    Returns:
        the products between 2 and 2^31 − 1.
    """
    numbers: set[int] = set()
    for shape in shapes:
        some = {1}
        for n in shape:
            if n is not None and len(some) < 256:
                some |= {a * n for a in some}
        numbers |= some
    return frozenset(n for n in numbers if 1 < n < 2**31)


def read_rational(number: float, known: frozenset[int], half: bool) -> RationalReading | None:
    """Read a number as the fraction or root that it rounds.

    Args:
        known: element counts to build fractions from.
        half: also accept the nearest float16.

    Returns:
        the reading if ``number`` is its nearest float64 or float32; None if nothing fits, or the number is a fraction
        with a denominator of at most 64.
    """
    if number == 0 or not math.isfinite(number) or Fraction(number).denominator <= 64:
        return None
    for n in sorted(known):
        fractions = [
            Fraction(1, n),
            Fraction(n - 1, n),
            Fraction(1, n - 1),
            Fraction(n, n - 1),
            Fraction(n, n + 1),
            Fraction(1, n + 1),
        ]
        for q in fractions:
            if _is_nearest(float(q), abs(number), half):
                return RationalReading(fraction=q if number > 0 else -q)
        for q in (Fraction(n), Fraction(n - 1), *fractions[:4]):
            if _is_nearest(math.sqrt(q), abs(number), half):
                return RationalReading(square=q, root=True)
    return None


def _is_nearest(exact: float, number: float, half: bool) -> bool:
    with np.errstate(all="ignore"):
        near = number in (exact, float(np.float32(exact))) or (half and number == float(np.float16(exact)))
        # A subnormal is the nearest float of many numbers.
        return near and abs(number - exact) <= 2.0**-10 * exact
