"""Compute modulo a random prime p of 160 bits or more, p ≡ 3 (mod 4), on numpy arrays of Python integers.

One prime of this length is simpler than five primes of 31 bits, and Python integers are fast enough for the small
arrays. An identity of degree D that fails over the rationals holds at a random point with a probability of at most D/p
(Schwartz 1980, Zippel 1979). −1 is not a square modulo p, so exactly one of the two roots of a square is a square
itself, the principal root: √t = t^((p+1)/4). Principal roots multiply: √a·√b = √(ab).
"""

from __future__ import annotations

import math
import random
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

BITS = 160
# Number of rounds of the Miller-Rabin test: a composite candidate passes with a probability of at most 4^-24
_WITNESSES = 24
# Maximum number of roots in the cache of a field
_KEPT = 4096
_SMALL = tuple(q for q in range(3, 400, 2) if all(q % d for d in range(3, q, 2)))


class PrimeField:
    """Integers modulo ``p``. Arrays have dtype object and hold Python integers in [0, p)."""

    def __init__(self, p: int) -> None:
        self.p = p
        self._powers: dict[int, int] = {}
        # Cache of roots: the rows that have a root are evaluated again while other rows are redrawn.
        self._roots: dict[int, int] = {}

    def inverse(self, a: Array) -> Array:
        """Invert all elements with a single modular inversion (Montgomery, 1987).

        Returns:
            1/a; 0 for elements that are 0.
        """
        p = self.p
        values = [v or 1 for v in a.reshape(-1).tolist()]
        ahead = [1]
        for v in values:
            ahead.append(ahead[-1] * v % p)
        rest = pow(ahead.pop(), -1, p)
        out = np.empty(a.shape, dtype=object)
        flat = out.reshape(-1)
        for i in range(len(values) - 1, -1, -1):
            flat[i] = rest * ahead[i] % p
            rest = rest * values[i] % p
        out[a == 0] = 0
        return out

    def root(self, a: Array) -> Array:
        """Take the principal root of each element.

        Returns:
            the roots; −1 for nonsquares.
        """
        p = self.p
        exponent = (p + 1) // 4
        known = self._roots
        if len(known) > _KEPT:
            known.clear()

        def square_root(v: int) -> int:
            r = known.get(v)
            if r is None:
                r = pow(v, exponent, p)
                r = known[v] = r if r * r % p == v else -1
            return r

        return self._map_elements(square_root, a)

    def count_rootless(self, a: Array) -> int:
        """Count the elements whose root is not cached yet.

        Returns:
            the number of distinct elements.
        """
        return len(set(a.reshape(-1).tolist()) - self._roots.keys())

    def is_square(self, v: int) -> bool:
        """Return True if ``v`` is a nonzero square."""
        return pow(v, (self.p - 1) // 2, self.p) == 1

    def from_fraction(self, q: Fraction | int) -> int:
        """Convert a fraction to its residue.

        Returns:
            the residue in [0, p).
        """
        q = Fraction(q)
        return q.numerator * pow(q.denominator, -1, self.p) % self.p

    def from_floats(self, x: Array) -> Array:
        """Convert finite floats, which are dyadic rationals, to residues.

        Returns:
            an array of dtype object.
        """
        mantissa, exponent = np.frexp(np.asarray(x, dtype=np.float64))
        whole = np.asarray(mantissa * 2.0**53).astype(np.int64).astype(object)
        return np.asarray(whole * self._map_elements(self._power_of_two, exponent - 53) % self.p, dtype=object)

    def _power_of_two(self, e: int) -> int:
        if e not in self._powers:
            self._powers[e] = pow(2, e, self.p)
        return self._powers[e]

    def to_rational(self, v: int) -> Fraction | None:
        """Reconstruct a fraction from its residue (Wang, 1981).

        Returns:
            the only fraction a/b with |a|, b < √(p/2) that equals ``v`` modulo p; None if no such fraction exists.
        """
        most = math.isqrt(self.p // 2)
        r0 = self.p
        r1 = v % self.p
        s0 = 0
        s1 = 1
        while r1 > most:
            quotient = r0 // r1
            r0, r1, s0, s1 = r1, r0 - quotient * r1, s1, s0 - quotient * s1
        if s1 and abs(s1) <= most and math.gcd(r1, abs(s1)) == 1:
            return Fraction(r1, s1)
        return None

    @staticmethod
    def _map_elements(function: Any, a: Array) -> Array:
        out = np.empty(a.shape, dtype=object)
        out.reshape(-1)[:] = [function(v) for v in a.reshape(-1).tolist()]
        return out


@lru_cache(maxsize=16)
def make_field(number: int, length: int = BITS) -> PrimeField:
    """Return field ``number`` of this process, with a random prime of ``length`` bits.

    The prime comes from the system's random generator. So nobody can construct a file for which a known prime gives a
    wrong proof.

    Returns:
        the field; equal arguments return the same field.
    """
    rng = random.SystemRandom()
    while True:
        # The two lowest bits, 11, make p ≡ 3 (mod 4).
        p = rng.getrandbits(length) | (1 << (length - 1)) | 3
        if all(p % q for q in _SMALL) and is_probable_prime(p, rng):
            return PrimeField(p)


def is_probable_prime(n: int, rng: random.Random) -> bool:
    """Decide whether an odd number above 3 is prime, by Miller and Rabin's test with random bases.

    Returns:
        True for each prime, and for another number with a probability of at most 4^-`_WITNESSES`.
    """
    d = n - 1
    s = (d & -d).bit_length() - 1
    d >>= s
    for _ in range(_WITNESSES):
        x = pow(rng.randrange(2, n - 1), d, n)
        if x in (1, n - 1):
            continue
        for _ in range(s - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True
