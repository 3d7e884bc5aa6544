"""Bound how many places of an atom one monomial can name; the bound gives the number of points that a proof needs.

docs/explanation/certificates.md has the lemma ("few points"), and `normdeploy.proof` defines the terms. Two counts
bound the number of places:

- Factors: each factor names the places of its element, including those of the result.
- Sums: each sum names one place. A factor outside all sums names only the result's own places, which are parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..graphs.symbolic_sizes import Size

# Count in the numerator, count in the denominator
Pair = tuple[int, int]
# Key of the count of all factors, whatever their atoms
ALL = None
# Key of a count. An atom is the key of the factors with a place in this atom; a pair is the key of the sums over the
# atom.
Key = Size | tuple[str, Size] | None

_NONE: Pair = (0, 0)


@dataclass(frozen=True, slots=True)
class Degree:
    """Degree by atom and in total, for numerator and denominator.

    In a product that is multiplied out, a sum over an atom names one of the atom's places.
    """

    counts: Mapping[Key, Pair]

    @staticmethod
    def of_element(atoms: Iterable[Size]) -> Degree:
        """Count one element that has a place in each of these atoms.

        Returns:
            the degree; an element of S×S names two places of S.
        """
        named = Counter(atoms)
        return Degree({ALL: (max(named.values(), default=1), 0), **{atom: (n, 0) for atom, n in named.items()}})

    @staticmethod
    def of_sums(atoms: Iterable[Size]) -> Degree:
        """Count sums over these atoms, but not the summed terms.

        Returns:
            the degree, under the keys of sums.
        """
        return Degree({_sum_key(atom): (n, 0) for atom, n in Counter(atoms).items()})

    @staticmethod
    def of_each(axes: Iterable[Iterable[Size]]) -> Degree:
        """Count a product of one element per axis, with a place in each atom of its axis.

        Returns:
            the degree of the product.
        """
        made = ZERO
        for axis in axes:
            made = made.times(Degree.of_element(axis))
        return made

    def _combine(self, other: Degree, by: Callable[[int, int, int, int], Pair]) -> Degree:
        keys = self.counts.keys() | other.counts.keys()
        return Degree({k: by(*self.counts.get(k, _NONE), *other.counts.get(k, _NONE)) for k in keys})

    def times(self, other: Degree) -> Degree:
        """Multiply.

        Returns:
            the degree of the product of two values.
        """
        return self._combine(other, lambda n, d, m, e: (n + m, d + e))

    def plus(self, other: Degree) -> Degree:
        """Add: n/d + m/e = (n·e + m·d)/(d·e).

        Returns:
            the degree of the sum of two values.
        """
        return self._combine(other, lambda n, d, m, e: (max(n + e, m + d), d + e))

    def repeat_sum(self, times: int) -> Degree:
        """Add ``times`` copies, each with its own denominator: n/d + … + n′/d′.

        Returns:
            the degree of that sum.
        """
        return Degree({k: (n + (times - 1) * d, times * d) for k, (n, d) in self.counts.items()})

    def sum_over(self, atoms: Iterable[Size]) -> Degree:
        """Sum over these atoms. The denominator of a summed element names places of these atoms too.

        Returns:
            the degree of the sum.
        """
        named = Counter(atoms)
        inner = {k: (n + d, d) if k is ALL or k in named else (n, d) for k, (n, d) in self.counts.items()}
        return Degree(inner).times(Degree({_sum_key(atom): (n, 0) for atom, n in named.items()}))

    def with_places_in(self, atoms: Iterable[Size]) -> Degree:
        """Treat an element that varies along these atoms as one factor.

        Returns:
            a degree that names at least one place per atom; a_i + a_j counts as an element of S×S.
        """
        least: dict[Key, int] = dict(Counter(atoms))
        least[ALL] = max(least.values(), default=0)
        return self._combine(Degree({k: (n, 0) for k, n in least.items()}), lambda n, d, m, _: (max(n, m), d))

    @property
    def has_denominator(self) -> bool:
        """Return True if the denominator names any place."""
        return any(d for _, d in self.counts.values())

    @property
    def has_sums(self) -> bool:
        """Return True if the value holds sums, including those of gathers."""
        return any(isinstance(k, tuple) and any(pair) for k, pair in self.counts.items())

    def union(self, other: Degree) -> Degree:
        """Combine the degrees of two values that are concatenated.

        Returns:
            the larger count of both, for numerator and denominator.
        """
        return self._combine(other, lambda n, d, m, e: (max(n, m), max(d, e)))

    def inverse(self) -> Degree:
        """Swap numerator and denominator.

        Returns:
            the degree of 1/x.
        """
        return Degree({k: (d, n) for k, (n, d) in self.counts.items()})

    def root(self) -> Degree:
        """Take a root: √(n/d) = √(n·d)/d. A root counts for at least one place.

        Returns:
            the degree of the root.
        """
        return Degree({k: ((n + d + 1) // 2, d) for k, (n, d) in self.counts.items()})

    def of_unknown_function(self) -> Degree:
        """Apply an unknown function.

        Returns:
            a degree without denominator and without sums; each count is at least 1.
        """
        return Degree(
            {k: (max(n, 1), 0) for k, (n, _) in (self.counts or {ALL: _NONE}).items() if not isinstance(k, tuple)}
        )

    def total_counts(self) -> dict[Key, int]:
        """Add the counts of numerator and denominator.

        Returns:
            one count per key.
        """
        return {k: n + d for k, (n, d) in self.counts.items()}

    def larger_counts(self) -> dict[Key, int]:
        """Take the larger count of numerator and denominator.

        Returns:
            one count per key.
        """
        return {k: max(pair) for k, pair in self.counts.items()}

    def cross_multiply(self, other: Degree) -> dict[Key, int]:
        """Multiply n/d = m/e crosswise.

        Returns:
            the larger count of n·e and m·d per key.
        """
        return {k: max(n + e, m + d) for k, (n, d, m, e) in self._paired_counts(other).items()}

    def _paired_counts(self, other: Degree) -> dict[Key, tuple[int, int, int, int]]:
        keys = self.counts.keys() | other.counts.keys()
        return {k: (*self.counts.get(k, _NONE), *other.counts.get(k, _NONE)) for k in keys}


ZERO = Degree({})


def _sum_key(atom: Size) -> tuple[str, Size]:
    return "sum", atom


def places_named(counts: Mapping[Key, int], atom: Size, by_sums: bool) -> int:
    """Count the places of an atom that a monomial names.

    Args:
        by_sums: sums bound the count too.

    Returns:
        the number of factors, or the smaller of factors and sums.
    """
    factors = counts.get(atom, 0)
    if by_sums:
        return min(factors, counts.get(_sum_key(atom), 0))
    return factors


def scale_counts(counts: Mapping[Key, int], factor: int) -> dict[Key, int]:
    """Multiply all counts by ``factor``.

    Returns:
        a new mapping.
    """
    return {k: factor * n for k, n in counts.items()}


def add_counts(one: Mapping[Key, int], other: Mapping[Key, int]) -> dict[Key, int]:
    """Add the counts of two mappings.

    Returns:
        a new mapping with the keys of both.
    """
    return {k: one.get(k, 0) + other.get(k, 0) for k in one.keys() | other.keys()}
