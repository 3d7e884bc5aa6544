"""Constants that are roundings: a float32 near 1/n is not 1/n, but was written for it.

Where a norm divides by n through a constant, or takes an unbiased variance through n/(n − 1), the file holds a rounded
number, and what the file computes is a norm up to that rounding alone. Such a constant is read as the fraction, or the
root of one, that it is the nearest float of; the certificate lists each, and speaks of the program as read. Only
numbers that are made of how many elements there are are read so, never an epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

# elements of a constant that may be read so
FEW = 4


@dataclass(frozen=True)
class RationalReading:
    """A fraction, or with ``root`` the root of ``square``."""

    fraction: Fraction = Fraction(0)
    square: Fraction = Fraction(0)
    root: bool = False

    def __str__(self) -> str:
        if self.root:
            return f"√({self.square})"
        return str(self.fraction)


def axis_products(shapes: Iterable[Iterable[int | None]]) -> frozenset[int]:
    """How many elements some axes of a tensor have together, of every tensor; an axis of unknown size belongs to
    none."""
    numbers: set[int] = set()
    for shape in shapes:
        some = {1}
        for n in shape:
            if n is not None and len(some) < 256:
                some |= {a * n for a in some}
            else:
                some |= set()
        numbers |= some
    return frozenset(n for n in numbers if 1 < n < 2**31)


def read_rational(number: float, known: frozenset[int], half: bool) -> RationalReading | None:
    """What the number is the nearest float64 or float32 of, or with ``half`` the nearest float16; None where it is that
    exactly, or of nothing known."""
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
        # a subnormal is near to many
        return near and abs(number - exact) <= 2.0**-10 * exact
