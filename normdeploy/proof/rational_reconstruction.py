"""Read constants as exact fractions: the float32 nearest to 1/n is not 1/n, but it stands for 1/n.

A norm may multiply by a constant 1/n instead of a mean, or by n/(n − 1) for an unbiased variance. The file then holds a
rounded number, so it computes a norm only up to this rounding. Such a constant is read as the fraction, or the root of
a fraction, to which it is the nearest float. The certificate lists each constant that was read this way, and holds for
the model with the fractions instead. Only fractions made of element counts are considered. An epsilon is never read
this way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

# Maximum number of elements of a constant whose elements are read as fractions
FEW = 4


@dataclass(frozen=True)
class RationalReading:
    """Exact number of which a constant is the rounded value: ``fraction``, or √``square`` if ``root`` is True."""

    fraction: Fraction = Fraction(0)
    square: Fraction = Fraction(0)
    root: bool = False

    def __str__(self) -> str:
        if self.root:
            return f"√({self.square})"
        return str(self.fraction)


def axis_products(shapes: Iterable[Iterable[int | None]]) -> frozenset[int]:
    """Collect the element counts of all subsets of axes of each tensor.

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
    """Find the fraction, or the root of a fraction, of which ``number`` is the rounded value.

    Args:
        known: element counts to build fractions from.
        half: also accept a reading if ``number`` is its nearest float16.

    Returns:
        a reading to which ``number`` is the nearest float64 or float32. None if there is no such reading, or if the
        number itself is a fraction with a denominator of at most 64.
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
        # A subnormal float is the nearest float of many different fractions, so require a small relative error too.
        return near and abs(number - exact) <= 2.0**-10 * exact
