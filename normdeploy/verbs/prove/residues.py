"""Compute with residues modulo several random primes at once.

An array of residues has the primes on its first axis. The primes have 31 bits, so the product of two residues fits
into int64. A matrix product splits each residue into two parts of 16 bits. Then float64 computes the products of the
parts exactly.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from ...proof.prime_field import is_probable_prime

Array = np.ndarray[Any, Any]

# Bits of a prime. Every prime is larger than 2^30.
BITS = 31
# Largest number of terms of a sum of products of 17-bit numbers that float64 adds exactly
_TERMS = 2**18
# Number of the primes between 2^30 and 2^31, as a power of two, rounded down
PRIME_BITS = 25


def draw_primes(count: int, rng: random.Random) -> tuple[int, ...]:
    """Draw distinct primes of 31 bits.

    Returns:
        the primes.
    """
    found = set[int]()
    while len(found) < count:
        n = rng.randrange(2**30 + 1, 2**31, 2)
        if is_probable_prime(n, rng):
            found.add(n)
    return tuple(sorted(found))


class Residues:
    """Arithmetic modulo ``primes``. Every array is int64 with shape (primes, ...)."""

    def __init__(self, primes: tuple[int, ...]) -> None:
        self.primes = primes
        self._column = np.array(primes, np.int64)
        # Powers of two modulo each prime, for exponents from -1200 to 1199
        self._powers = np.empty((len(primes), 2400), np.int64)
        for j, p in enumerate(primes):
            power = pow(2, -1200, p)
            for i in range(2400):
                self._powers[j, i] = power
                power = power * 2 % p

    def column(self, rank: int) -> Array:
        """Shape the primes so that they broadcast over arrays of ``rank`` axes besides that of the primes."""
        return self._column.reshape((-1,) + (1,) * rank)

    def reduce(self, a: Array) -> Array:
        """Reduce integers of 0 or more modulo the primes.

        Returns:
            the residues.
        """
        return np.stack([_remainder(a[j], p) for j, p in enumerate(self.primes)])

    def from_integers(self, x: Array) -> Array:
        """Convert integers of any shape.

        Returns:
            the residues.
        """
        if x.dtype == np.uint64:
            return np.stack([(x % np.uint64(p)).astype(np.int64) for p in self.primes])
        wide = x.astype(np.int64)
        return np.stack([wide % p for p in self.primes])

    def from_floats(self, x: Array) -> Array:
        """Convert finite floats exactly.

        Returns:
            the residues.
        """
        if x.dtype == np.float32:
            return np.stack([self.floats_modulo(x, j) for j in range(len(self.primes))])
        mantissa, exponent = np.frexp(x.astype(np.float64))
        whole = np.ldexp(mantissa, 53).astype(np.int64)
        index = exponent.astype(np.int64) + (1200 - 53)
        made = np.empty((len(self.primes), *x.shape), np.int64)
        for j, p in enumerate(self.primes):
            made[j] = whole % p * self._powers[j][index] % p
        return made

    def floats_modulo(self, x: Array, j: int) -> Array:
        """Convert finite floats modulo the prime at ``j`` only."""
        if x.dtype != np.float32:
            return Residues(self.primes[j : j + 1]).from_floats(x)[0]
        p = self.primes[j]
        bits = np.ascontiguousarray(x).view(np.uint32)
        exponent = (bits >> np.uint32(23)) & np.uint32(0xFF)
        fraction = bits & np.uint32(0x7FFFFF)
        # Normal numbers have a hidden leading bit.
        fraction |= (exponent != 0).astype(np.uint32) << np.uint32(23)
        # 2^(exponent - 150); the smallest normal numbers and the subnormal numbers share the exponent 1.
        powers = self._powers[j, 1200 - 150 : 1200 - 150 + 256].astype(np.uint64)
        powers[0] = powers[1]
        product = powers[exponent]
        product *= fraction
        made = _remainder(product, p)
        np.subtract(p, made, out=made, where=(bits >> np.uint32(31)).astype(bool) & (made != 0))
        return made.reshape(x.shape)

    def add(self, a: Array, b: Array) -> Array:
        """Add."""
        return self.reduce(a + b)

    def subtract(self, a: Array, b: Array) -> Array:
        """Subtract."""
        return self.reduce(a - b + self.column(max(a.ndim, b.ndim) - 1))

    def multiply(self, a: Array, b: Array) -> Array:
        """Multiply element by element."""
        return self.reduce(a * b)

    def power(self, a: Array, exponent: int) -> Array:
        """Raise to a whole power of 0 or more."""
        made = np.ones_like(a)
        square = a
        while exponent:
            if exponent & 1:
                made = self.multiply(made, square)
            exponent >>= 1
            if exponent:
                square = self.multiply(square, square)
        return made

    def inverse(self, a: Array) -> Array:
        """Invert. The inverse of 0 is not defined.

        Raises:
            ZeroDivisionError: an element is 0.
        """
        if not a.all():
            raise ZeroDivisionError
        made = np.empty_like(a)
        for j, p in enumerate(self.primes):
            made[j] = _inverse_modulo(a[j], p)
        return made

    def sum(self, a: Array, axes: tuple[int, ...], *, keepdims: bool = True) -> Array:
        """Add along axes, which are counted without the axis of the primes."""
        # 2^32 terms of 31 bits fit into int64.
        return self.reduce(np.sum(a, axis=tuple(i + 1 for i in axes), keepdims=keepdims))

    def matmul(self, a: Array, b: Array) -> Array:
        """Multiply stacks of matrices as numpy's matmul does, for each prime."""
        return np.stack([matmul_modulo(a[j], b[j], p) for j, p in enumerate(self.primes)])


def _remainder(a: Array, p: int) -> Array:
    """Reduce numbers of 0 or more. numpy divides by a constant faster than it computes a remainder."""
    words = a.astype(np.uint64) if a.dtype != np.uint64 else a
    quotient = words // np.uint64(p)
    quotient *= np.uint64(p)
    return (words - quotient).astype(np.int64)


def _inverse_modulo(a: Array, p: int) -> Array:
    """Invert by Fermat's theorem; equal elements along a long array are computed once."""
    flat, places = np.unique(a, return_inverse=True)
    made = np.ones_like(flat)
    square = flat
    exponent = p - 2
    while exponent:
        if exponent & 1:
            made = _remainder(made * square, p)
        exponent >>= 1
        square = _remainder(square * square, p)
    return made[places].reshape(a.shape)


def matmul_modulo(a: Array, b: Array, p: int) -> Array:
    """Multiply matrices of residues modulo one prime.

    Returns:
        the residues of the product.
    """
    inner = a.shape[-1]
    if inner > _TERMS:
        half = inner // 2
        first = matmul_modulo(a[..., :half], b[..., :half, :], p)
        return (first + matmul_modulo(a[..., half:], b[..., half:, :], p)) % p
    a_high = (a >> 16).astype(np.float64)
    a_low = (a & 0xFFFF).astype(np.float64)
    b_high = (b >> 16).astype(np.float64)
    b_low = (b & 0xFFFF).astype(np.float64)
    high = np.matmul(a_high, b_high)
    low = np.matmul(a_low, b_low)
    # Karatsuba: the mixed products are (a_high + a_low)(b_high + b_low) - high - low.
    a_high += a_low
    b_high += b_low
    middle = np.matmul(a_high, b_high)
    middle -= high
    middle -= low
    top = _remainder(high, p)
    top *= 2**32 % p
    mixed = _remainder(middle, p)
    mixed <<= 16
    # The three terms are below 2^62, 2^47 and 2^53.
    top += mixed
    top += low.astype(np.int64)
    return _remainder(top, p)


_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


def _scramble(x: Array) -> Array:
    """Permute 64-bit words (the output function of SplitMix64)."""
    made = x >> np.uint64(30)
    made ^= x
    made *= _MIX[0]
    made ^= made >> np.uint64(27)
    made *= _MIX[1]
    made ^= made >> np.uint64(31)
    return made


def _pack_residues(x: Array) -> list[Array]:
    """Pack the residues of an element into words; two residues of 31 bits fit into one word."""
    words = []
    for j in range(0, len(x), 2):
        word = x[j].astype(np.uint64)
        if j + 1 < len(x):
            word = word | (x[j + 1].astype(np.uint64) << np.uint64(31))
        words.append(word)
    return words


class RandomFunctions:
    """Unknown functions, one per name. A function has a random residue for each argument.

    An argument is one element or several. Its key consists of two words of 64 bits that depend on all residues of the
    element, so elements that differ modulo any prime get independent results.
    """

    def __init__(self, field: Residues, seed: int) -> None:
        self._field = field
        self._seed = seed

    def seeds(self, name: str) -> tuple[int, int]:
        """Draw two words for a name.

        Returns:
            the words; equal for equal names.
        """
        rng = random.Random(f"{self._seed} {name}")
        return rng.getrandbits(64), rng.getrandbits(64)

    @np.errstate(over="ignore")
    def keys(self, name: str, *arguments: Array) -> Array:
        """Compute the keys of all elements.

        Args:
            name: name of the function.
            arguments: residues of equal shapes.

        Returns:
            uint64 with shape (2, ...).
        """
        shape = np.broadcast_shapes(*(x.shape[1:] for x in arguments))
        made = np.empty((2, *shape), np.uint64)
        packed = [word for x in arguments for word in _pack_residues(x)]
        for lane, start in enumerate(self.seeds(name)):
            key = np.full(shape, start, np.uint64)
            for word in packed:
                key += np.uint64(_GOLDEN)
                key ^= word
                key = _scramble(key)
            made[lane] = key
        return made

    @np.errstate(over="ignore")
    def from_keys(self, keys: Array) -> Array:
        """Draw one residue per prime for each key.

        Args:
            keys: uint64 with shape (2, ...).

        Returns:
            residues.
        """
        made = np.empty((len(self._field.primes), *keys.shape[1:]), np.int64)
        for j, p in enumerate(self._field.primes):
            step = np.uint64((j + 1) * _GOLDEN & _WORD)
            word = _scramble(keys[0] + step)
            word ^= _scramble(keys[1] ^ step)
            made[j] = _remainder(word, p)
        return made

    @np.errstate(over="ignore")
    def row_keys(self, name: str, argument: Array) -> Array:
        """Compute one key for each row of the last axis.

        Returns:
            uint64 with shape (2, ...) without the last axis.
        """
        keys = self.keys(name, argument)
        places = self.fill(f"{name} places", (argument.shape[-1],))[:2].astype(np.uint64)
        odd = (places << np.uint64(32)) | (_scramble(places) >> np.uint64(32)) | np.uint64(1)
        shape = (2,) + (1,) * (keys.ndim - 2) + (argument.shape[-1],)
        return _scramble(np.add.reduce(_scramble(keys * odd.reshape(shape)), axis=-1))

    @np.errstate(over="ignore")
    def extend_keys(self, keys: Array, count: int) -> Array:
        """Derive ``count`` keys from each key.

        Args:
            keys: uint64 with shape (2, n).

        Returns:
            uint64 with shape (2, n, count).
        """
        index = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        return _scramble(keys[:, :, None] + index)

    def apply(self, name: str, *arguments: Array) -> Array:
        """Apply the function ``name`` element by element.

        Returns:
            residues.
        """
        return self.from_keys(self.keys(name, *arguments))

    @np.errstate(over="ignore")
    def fill(self, name: str, shape: tuple[int, ...]) -> Array:
        """Draw an array of independent residues for a name.

        Returns:
            residues with shape (primes, *shape).
        """
        index = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
        one, other = self.seeds(name)
        first = _scramble(index * np.uint64(_GOLDEN) + np.uint64(one))
        second = _scramble(index + np.uint64(other))
        return self.from_keys(np.stack([first, second]) if shape else np.stack([first, second]).reshape(2))
