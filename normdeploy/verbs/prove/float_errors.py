"""Bound the rounding errors of constants that another program computed in floats.

The bounds are running error bounds: each operation adds the error of its operands and its own rounding. They hold for
each element and for every order of the additions. They hold for the steps in either form, such as g/√v and g·(1/√v).
Source: Higham, Accuracy and Stability of Numerical Algorithms, 2002, chapters 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# ONNX's number of a floating type → half an ulp of 1
UNITS = {1: 2.0**-24, 10: 2.0**-11, 11: 2.0**-53, 16: 2.0**-8}
# Half ulps that a library function, such as expf, may be off: twice the 4 ulp that glibc states at most for float32
_LIBRARY = 8.0


@dataclass(frozen=True)
class Approx:
    """Numbers of a constant that was computed from constants.

    Attributes:
        numbers: float64.
        error: largest difference between the result of a computation in floats and the exact number.
        unit: half an ulp of 1 in the type of the computation; 0 for a number of an attribute.
    """

    numbers: Array
    error: Array
    unit: float

    def moved(self, function: Callable[[Array], Array]) -> Approx:
        """Move the elements."""
        return Approx(function(self.numbers), function(self.error), self.unit)

    def rounded(self, unit: float) -> Approx:
        """Round to a type whose half ulp of 1 is ``unit``."""
        return Approx(self.numbers, self.error + unit * (np.abs(self.numbers) + self.error), unit)

    def plus(self, other: Approx) -> Approx:
        """Add."""
        return self._sum_with(other, self.numbers + other.numbers)

    def minus(self, other: Approx) -> Approx:
        """Subtract."""
        return self._sum_with(other, self.numbers - other.numbers)

    def _sum_with(self, other: Approx, numbers: Array) -> Approx:
        unit = max(self.unit, other.unit)
        error = self.error + other.error
        # The magnitudes of both terms, instead of that of the sum, cover other orders of the additions. A sum of two
        # stored numbers has one order only.
        terms = np.where(error > 0, np.abs(self.numbers) + np.abs(other.numbers), np.abs(numbers))
        exact = self._is_exactly(0.0) | other._is_exactly(0.0)
        return Approx(numbers, error + np.where(exact, 0.0, unit * (terms + error)), unit)

    def _is_exactly(self, mantissa: float) -> Array:
        """Find the numbers without an error that are 0, or a power of two for the mantissa 0.5."""
        return np.asarray((np.abs(np.frexp(self.numbers)[0]) == mantissa) & (self.error == 0))

    def times(self, other: Approx) -> Approx:
        """Multiply."""
        unit = max(self.unit, other.unit)
        numbers = self.numbers * other.numbers
        error = np.abs(self.numbers) * other.error + np.abs(other.numbers) * self.error + self.error * other.error
        exact = self._is_exactly(0.5) | other._is_exactly(0.5)
        return Approx(numbers, error + np.where(exact, 0.0, unit * (np.abs(numbers) + error)), unit)

    def inverse(self) -> Approx:
        """Compute 1/x."""
        return self.mapped(lambda v: 1.0 / v, 1.0)

    def inverse_root(self) -> Approx:
        """Compute 1/√x, by a root and a quotient."""
        return self.mapped(lambda v: 1.0 / np.sqrt(v), 2.0)

    def mapped(self, function: Callable[[Array], Array], half_ulps: float = _LIBRARY) -> Approx:
        """Apply a function of one number that is monotonic within the error of each number.

        Args:
            half_ulps: error of the function itself.
        """
        numbers = np.asarray(function(self.numbers), np.float64)
        above = np.abs(function(self.numbers + self.error) - numbers)
        below = np.abs(function(self.numbers - self.error) - numbers)
        error = np.maximum(above, below)
        # A function may have a pole or an end of its domain within the error.
        crosses = (np.abs(self.numbers) <= self.error) & (self.error > 0)
        error = np.where(crosses | ~np.isfinite(error), np.inf, error)
        return Approx(numbers, error + half_ulps * self.unit * (np.abs(numbers) + error), self.unit)

    def choose(self, other: Approx, function: Callable[[Array, Array], Array]) -> Approx:
        """Compute the larger or smaller numbers."""
        numbers = function(self.numbers, other.numbers)
        error = np.maximum(self.error, other.error) + np.zeros(numbers.shape)
        return Approx(numbers, error, max(self.unit, other.unit))

    def sum(self, axes: tuple[int, ...], *, keepdims: bool) -> Approx:
        """Add along axes, in any order."""

        def add(a: Array) -> Array:
            return np.asarray(np.sum(a, axis=axes, keepdims=keepdims))

        numbers = add(self.numbers)
        terms = self.numbers.size // max(numbers.size, 1)
        error = add(self.error)
        growth = _growth(terms - 1, self.unit)
        return Approx(numbers, error + growth * (add(np.abs(self.numbers)) + error), self.unit)

    def matmul(self, other: Approx) -> Approx:
        """Multiply matrices, with sums in any order."""
        unit = max(self.unit, other.unit)
        a, b = np.abs(self.numbers), np.abs(other.numbers)
        error = a @ other.error + self.error @ (b + other.error)
        growth = _growth(self.numbers.shape[-1], unit)
        return Approx(self.numbers @ other.numbers, error + growth * (a @ b + error), unit)


def _growth(roundings: int, unit: float) -> float:
    """Compute γ_n = n·u / (1 − n·u)."""
    total = roundings * unit
    return total / (1 - total) if total < 1 else float("inf")


def concatenate(parts: Sequence[Approx], axis: int) -> Approx:
    """Concatenate along an axis."""
    numbers = np.concatenate([x.numbers for x in parts], axis)
    return Approx(numbers, np.concatenate([x.error for x in parts], axis), max(x.unit for x in parts))
