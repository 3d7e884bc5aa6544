"""Sizes of tensors as polynomials of the dims that a file leaves open: what is proved of them holds for every size.

A dim that is named is a symbol; one that is not known, or is written as something else than a polynomial, is a symbol
of its own and equals nothing but itself. So is a size that is no polynomial, such as the length behind a convolution
with strides: no name that a file may write is the symbol of one. Every symbol stands for a size of 1 or more.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

# symbols in order, repeated for powers
Monomial = tuple[str, ...]
# of a product: polynomials of sizes have a handful
_TERMS = 2**12
# of a term, as many as an array has axes
_FACTORS = 64
# begins the symbol of a size that the file has no name for
UNKNOWN = "\0"


class Size:
    """A polynomial with whole coefficients; immutable, equal where it is the same polynomial."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self.terms: tuple[tuple[Monomial, int], ...] = tuple(sorted((m, c) for m, c in terms.items() if c))
        self._hash = hash(self.terms)

    @staticmethod
    def from_int(value: int | Size) -> Size:
        if isinstance(value, Size):
            return value
        return Size({(): int(value)})

    @staticmethod
    def symbol(name: str) -> Size:
        return Size({(name,): 1})

    @staticmethod
    def opaque(of: str, *by: Any) -> Size:
        """A size that is no polynomial: a function of ``by`` (numbers, texts and sizes), which says with ``of`` which
        one it is."""
        return Size.symbol(f"{UNKNOWN}{of}{UNKNOWN}{tuple(n.terms if isinstance(n, Size) else n for n in by)!r}")

    @property
    def constant_value(self) -> int | None:
        """The size, where it does not depend on a symbol."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and self.terms[0][0] == ():
            return self.terms[0][1]
        return None

    @property
    def is_positive(self) -> bool:
        """True only where it is 1 or more whatever its symbols are."""
        return self._least_value()[0] and self._least_value()[1] > 0

    @property
    def is_nonnegative(self) -> bool:
        """True only where it is 0 or more whatever its symbols are."""
        return self._least_value()[0]

    def _least_value(self) -> tuple[bool, int]:
        """With every symbol written as 1 + t: whether no coefficient is negative, so that the least value is at t = 0;
        and that value."""
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
            # Too many terms to tell: nothing is said of its sign.
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
        return frozenset(s for m, _ in self.terms for s in m)

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """Its value where the symbols have the given ones, of any type that adds and multiplies."""
        total: Any = 0
        for monomial, c in self.terms:
            product: Any = c
            for s in monomial:
                product = product * values[s]
            total = total + product
        return total

    def substitute(self, values: Mapping[str, Size]) -> Size:
        """The polynomial where some symbols are polynomials themselves."""
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
                f"too large: a size would have {len(self.terms) * len(other.terms):,} terms of up to"
                f" {_longest_term(self) + _longest_term(other)} factors, and {_TERMS:,} of {_FACTORS} are "
                "followed at most"
            )
        for m, c in self.terms:
            for n, d in other.terms:
                key = tuple(sorted(m + n))
                terms[key] = terms.get(key, 0) + c * d
        return Size(terms)

    __rmul__ = __mul__

    def divide_exactly(self, other: int | Size) -> Size | None:
        """The exact quotient by a monomial or an equal polynomial; None where there is none that holds for every
        size."""
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

    # of a Place, too
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
    """Factors of the longest term."""
    return max((len(monomial) for monomial, _ in size.terms), default=0)


def _display_symbol(symbol: str) -> str:
    if symbol.startswith(UNKNOWN):
        return symbol.split(UNKNOWN)[1]
    return symbol


class AxisSize(Size):
    """The size of an axis of a leaf that says which axis it is; equal to any size that is the same."""

    __slots__ = ("label",)

    def __init__(self, size: Size, label: tuple[Any, ...]) -> None:
        super().__init__(dict(size.terms))
        self.label = label


ONE = Size.from_int(1)


class NoPolynomial(Exception):
    """What an op makes of sizes changes from size to size; ``op`` names it. The text is the reason."""

    def __init__(self, reason: str, op: str) -> None:
        super().__init__(reason)
        self.op = op


def product_of_sizes(sizes: Iterable[Size]) -> Size:
    return reduce(operator.mul, sizes, ONE)
