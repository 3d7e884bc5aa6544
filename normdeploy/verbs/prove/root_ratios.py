"""Relate roots whose arguments differ by a number: if t = c·s for a rational c > 0, then 1/√t = 1/√c · 1/√s.

So an unbiased and a biased variance, or a sum and a mean, have roots that differ by a constant. The numerator and the
denominator of c are found from its residues: they are unique if both are small in comparison with the product of all
primes. Source: Wang, Guy, Davenport, P-adic reconstruction of rational numbers, ACM SIGSAM Bulletin 16, 1982.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from .residues import Array, Residues

# Bits of the numerator and of the denominator of a ratio
_BITS = 60
# A number that is not such a ratio passes for one with a probability of 2^(2·60 + 1) divided by the product of the
# primes, which has to be at most 2^-100.
_LEAST_BITS = 2 * _BITS + 101


@dataclass
class RootArguments:
    """Arguments of roots that were evaluated at a random point.

    Attributes:
        arithmetic: arithmetic modulo the primes.
    """

    arithmetic: Residues
    _known: dict[bytes, list[Array]] = field(default_factory=dict)

    def ratio_to_known(self, t: Array) -> tuple[Fraction, Array] | None:
        """Find an earlier argument s with t = c·s for a rational c > 0.

        An argument without one is kept for later calls.

        Args:
            t: residues with shape (primes, ...).

        Returns:
            c, which is not 1, and the residues of s in the shape of ``t``; None if there is no such argument.
        """
        flat = t.reshape(len(t), -1)
        if not flat[:, :1].all() or not flat.size:
            return None
        first = flat[:, :1]
        direction = self.arithmetic.multiply(flat, self.arithmetic.inverse(first))
        earlier = self._known.setdefault(direction.tobytes(), [])
        for s in earlier:
            ratio = self.arithmetic.multiply(first, self.arithmetic.inverse(s[:, :1]))
            found = reconstruct_fraction(ratio[:, 0].tolist(), self.arithmetic.primes)
            if found == 1:
                return None
            if found is not None and found > 0:
                return found, s.reshape(t.shape)
        earlier.append(flat)
        return None


def reconstruct_fraction(residues: Sequence[int], primes: Sequence[int]) -> Fraction | None:
    """Find the fraction with the given residues whose numerator and denominator are below 2^60.

    Returns:
        the fraction; None if there is none, or if the primes are too few.
    """
    modulus = math.prod(primes)
    if modulus.bit_length() < _LEAST_BITS:
        return None
    # The Chinese remainder theorem
    number = sum(r * (modulus // p) * pow(modulus // p, -1, p) for r, p in zip(residues, primes, strict=True)) % modulus
    above, below = modulus, number
    t_above, t_below = 0, 1
    while below.bit_length() > _BITS:
        quotient = above // below
        above, below = below, above - quotient * below
        t_above, t_below = t_below, t_above - quotient * t_below
    if not t_below or abs(t_below).bit_length() > _BITS:
        return None
    return Fraction(below, t_below)


def root_of_square(number: Fraction) -> Fraction | None:
    """Compute √number.

    Returns:
        the root; None if it is not rational.
    """
    numerator, denominator = math.isqrt(number.numerator), math.isqrt(number.denominator)
    if numerator**2 != number.numerator or denominator**2 != number.denominator:
        return None
    return Fraction(numerator, denominator)


def fraction_residues(number: Fraction, primes: Sequence[int]) -> Array:
    """Compute a fraction modulo each prime."""
    return np.array([number.numerator * pow(number.denominator, -1, p) % p for p in primes], np.int64)
