"""Represent sizes as polynomials of the dims that a file leaves open, so that proofs hold for every size.

A named dim is a symbol. An unknown dim, or a dim whose expression is not a polynomial, is a unique symbol that equals
only itself. A computed size that is not a polynomial, such as the length after a strided convolution, is a unique
symbol too. Unique symbols can't collide with a name in a file. Every symbol denotes a size of 1 or more.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

# Product of symbols, as a sorted tuple. A power repeats its symbol: x²·y is (x, x, y).
Monomial = tuple[str, ...]
# Maximum number of terms of a product. Polynomials of real sizes have a handful of terms.
_TERMS = 2**12
# Maximum number of factors of a term, equal to the maximum number of axes of a numpy array.
_FACTORS = 64
# Prefix of symbols for sizes without a name in the file.
UNKNOWN = "\0"


class Size:
    """Polynomial with integer coefficients; immutable, and equal if the terms are equal."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self.terms: tuple[tuple[Monomial, int], ...] = tuple(sorted((m, c) for m, c in terms.items() if c))
        self._hash = hash(self.terms)

    @staticmethod
    def from_int(value: int | Size) -> Size:
        """Convert a number to a constant polynomial.

        Returns: the size; a Size is returned unchanged.
        """
        if isinstance(value, Size):
            return value
        return Size({(): int(value)})

    @staticmethod
    def symbol(name: str) -> Size:
        """Return the size that is one symbol."""
        return Size({(name,): 1})

    @staticmethod
    def opaque(of: str, *by: Any) -> Size:
        """Return a size that is not a polynomial.

        Args:
            of: name of the function that computes the size.
            by: arguments of that function: numbers, texts and sizes.

        Returns: a symbol that is equal for equal arguments.
        """
        return Size.symbol(f"{UNKNOWN}{of}{UNKNOWN}{tuple(n.terms if isinstance(n, Size) else n for n in by)!r}")

    @property
    def constant_value(self) -> int | None:
        """Return the size as a number; None if it depends on a symbol."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and self.terms[0][0] == ():
            return self.terms[0][1]
        return None

    @property
    def is_positive(self) -> bool:
        """Return whether the size is provably 1 or more for all values of its symbols."""
        return self._least_value()[0] and self._least_value()[1] > 0

    @property
    def is_nonnegative(self) -> bool:
        """Return whether the size is provably 0 or more for all values of its symbols."""
        return self._least_value()[0]

    def _least_value(self) -> tuple[bool, int]:
        """Substitute 1 + t for every symbol.

        Returns: whether no coefficient is negative, and the value at t = 0, which then is the minimum.
        """
        if len(self.terms) <= 1:
            if self.terms:
                c = self.terms[0][1]
            else:
                c = 0
            return c >= 0, c
        if all(c > 0 for _, c in self.terms):
            return True, sum(c for _, c in self.terms)
        try:
            return self._least_value_expanded()
        except OverflowError:
            # The expanded polynomial has too many terms, so the sign stays unknown.
            return False, 0

    def _least_value_expanded(self) -> tuple[bool, int]:
        total = Size({})
        for monomial, c in self.terms:
            product = Size.from_int(c)
            for s in monomial:
                product = product * Size({(): 1, (s,): 1})
            total = total + product
        return all(c >= 0 for _, c in total.terms), dict(total.terms).get((), 0)

    def symbols(self) -> frozenset[str]:
        """Return the symbols that occur.

        Returns: an empty set for a number.
        """
        return frozenset(s for m, _ in self.terms for s in m)

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """Compute the value for given symbols.

        Args:
            values: symbol → value of any type that adds and multiplies.

        Returns: a value of that type.
        """
        total: Any = 0
        for monomial, c in self.terms:
            product: Any = c
            for s in monomial:
                product = product * values[s]
            total = total + product
        return total

    def substitute(self, values: Mapping[str, Size]) -> Size:
        """Substitute polynomials for some symbols.

        Returns: the resulting polynomial.
        """
        total = Size({})
        for monomial, c in self.terms:
            product = Size({tuple(s for s in monomial if s not in values): c})
            for s in monomial:
                if s in values:
                    product = product * values[s]
            total = total + product
        return total

    def __add__(self, other: int | Size) -> Size:
        terms = dict(self.terms)
        for m, c in Size.from_int(other).terms:
            terms[m] = terms.get(m, 0) + c
        return Size(terms)

    __radd__ = __add__

    def __neg__(self) -> Size:
        return Size({m: -c for m, c in self.terms})

    def __sub__(self, other: int | Size) -> Size:
        return self + -Size.from_int(other)

    def __rsub__(self, other: int) -> Size:
        return Size.from_int(other) - self

    def __mul__(self, other: int | Size) -> Size:
        terms: dict[Monomial, int] = {}
        other = Size.from_int(other)
        if len(self.terms) * len(other.terms) > _TERMS or _longest_term(self) + _longest_term(other) > _FACTORS:
            raise OverflowError(
                f"too large: a size would have {len(self.terms) * len(other.terms):,} terms of up to "
                f"{_longest_term(self) + _longest_term(other)} factors; the limit is {_TERMS:,} terms of "
                f"{_FACTORS} factors"
            )
        for m, c in self.terms:
            for n, d in other.terms:
                key = tuple(sorted(m + n))
                terms[key] = terms.get(key, 0) + c * d
        return Size(terms)

    __rmul__ = __mul__

    def divide_exactly(self, other: int | Size) -> Size | None:
        """Divide by a monomial or an equal polynomial.

        Returns: the quotient; None if it is not a polynomial or ``other`` has several terms.
        """
        other = Size.from_int(other)
        if self == other:
            return Size.from_int(1)
        if len(other.terms) != 1:
            return None
        monomial, factor = other.terms[0]
        terms: dict[Monomial, int] = {}
        for m, c in self.terms:
            rest = list(m)
            for s in monomial:
                if s not in rest:
                    return None
                rest.remove(s)
            if c % factor:
                return None
            terms[tuple(rest)] = c // factor
        return Size(terms)

    # An AxisSize equals a Size with the same terms.
    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            other = Size.from_int(other)
        return isinstance(other, Size) and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return (
            " + ".join(
                "·".join((*([str(c)] if c != 1 or not m else []), *map(_display_symbol, m))) for m, c in self.terms
            )
            or "0"
        )


def _longest_term(size: Size) -> int:
    """Return the number of factors of the longest term."""
    return max((len(monomial) for monomial, _ in size.terms), default=0)


def _display_symbol(symbol: str) -> str:
    if symbol.startswith(UNKNOWN):
        return symbol.split(UNKNOWN)[1]
    return symbol


class AxisSize(Size):
    """Size that records the leaf's axis from which it was read. It equals any Size with the same terms."""

    __slots__ = ("label",)

    def __init__(self, size: Size, label: tuple[Any, ...]) -> None:
        super().__init__(dict(size.terms))
        self.label = label


ONE = Size.from_int(1)


class NoPolynomial(Exception):
    """Raised if the result of an op on sizes is not a polynomial. The text gives the reason; ``op`` is the op type."""

    def __init__(self, reason: str, op: str) -> None:
        super().__init__(reason)
        self.op = op


def product_of_sizes(sizes: Iterable[Size]) -> Size:
    """Multiply sizes.

    Returns: the product; 1 without sizes.

    Raises:
        OverflowError: the product has too many terms.
    """
    return reduce(operator.mul, sizes, ONE)
