"""How many places of an atom a monomial speaks of at most: what says how many points show an identity
(docs/certificates.md, few points).

Two counts bound it. Factors: each names the places of its element, those of the result included. Sums: each speaks of
one place; what is no sum speaks of the result's own places, which are parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..graphs.symbolic_sizes import Size

# in the numerator and in the denominator
Pair = tuple[int, int]
# the key of the factors, whichever atoms they have places of
ALL = None
# an atom: factors that have a place in it; a pair: sums over it
Key = Size | tuple[str, Size] | None

_NONE: Pair = (0, 0)


@dataclass(frozen=True, slots=True)
class Degree:
    """Counts by atom, and for any atom. Multiplied out, a sum over an atom names one of its places."""

    counts: Mapping[Key, Pair]

    @staticmethod
    def of_element(atoms: Iterable[Size]) -> Degree:
        """Of an element that has a place in each of these atoms: one of S×S names two of S."""
        named = Counter(atoms)
        return Degree({ALL: (max(named.values(), default=1), 0), **{atom: (n, 0) for atom, n in named.items()}})

    @staticmethod
    def of_sums(atoms: Iterable[Size]) -> Degree:
        """Of sums over these atoms, what is summed not counted."""
        return Degree({_sum_key(atom): (n, 0) for atom, n in Counter(atoms).items()})

    @staticmethod
    def of_each(axes: Iterable[Iterable[Size]]) -> Degree:
        """Of a product of elements, one for each axis, that have a place in each atom of it."""
        made = ZERO
        for axis in axes:
            made = made.times(Degree.of_element(axis))
        return made

    def _combine(self, other: Degree, by: Callable[[int, int, int, int], Pair]) -> Degree:
        keys = self.counts.keys() | other.counts.keys()
        return Degree({k: by(*self.counts.get(k, _NONE), *other.counts.get(k, _NONE)) for k in keys})

    def times(self, other: Degree) -> Degree:
        return self._combine(other, lambda n, d, m, e: (n + m, d + e))

    def plus(self, other: Degree) -> Degree:
        """n/d + m/e = (n·e + m·d)/(d·e)."""
        return self._combine(other, lambda n, d, m, e: (max(n + e, m + d), d + e))

    def repeat_sum(self, times: int) -> Degree:
        """Of a sum of so many of it, each with a denominator of its own: n/d + … + n′/d′."""
        return Degree({k: (n + (times - 1) * d, times * d) for k, (n, d) in self.counts.items()})

    def sum_over(self, atoms: Iterable[Size]) -> Degree:
        """Of a sum over these atoms: what stands in an element's own denominator names its places as well."""
        named = Counter(atoms)
        inner = {k: (n + d, d) if k is ALL or k in named else (n, d) for k, (n, d) in self.counts.items()}
        return Degree(inner).times(Degree({_sum_key(atom): (n, 0) for atom, n in named.items()}))

    def with_places_in(self, atoms: Iterable[Size]) -> Degree:
        """Of an element that varies along these atoms and is one factor from here on: of a_i + a_j as of S×S."""
        least: dict[Key, int] = dict(Counter(atoms))
        least[ALL] = max(least.values(), default=0)
        return self._combine(Degree({k: (n, 0) for k, n in least.items()}), lambda n, d, m, _: (max(n, m), d))

    @property
    def has_denominator(self) -> bool:
        return any(d for _, d in self.counts.values())

    @property
    def has_sums(self) -> bool:
        """Whether it holds sums, those of gathers too."""
        return any(isinstance(k, tuple) and any(pair) for k, pair in self.counts.items())

    def union(self, other: Degree) -> Degree:
        """Of what is the one at some places and the other at others."""
        return self._combine(other, lambda n, d, m, e: (max(n, m), max(d, e)))

    def inverse(self) -> Degree:
        return Degree({k: (d, n) for k, (n, d) in self.counts.items()})

    def root(self) -> Degree:
        """√(n/d) = √(n·d)/d; a root counts for one at least."""
        return Degree({k: ((n + d + 1) // 2, d) for k, (n, d) in self.counts.items()})

    def of_unknown_function(self) -> Degree:
        """Of an unknown function of it."""
        return Degree(
            {k: (max(n, 1), 0) for k, (n, _) in (self.counts or {ALL: _NONE}).items() if not isinstance(k, tuple)}
        )

    def total_counts(self) -> dict[Key, int]:
        """Numerator and denominator together."""
        return {k: n + d for k, (n, d) in self.counts.items()}

    def larger_counts(self) -> dict[Key, int]:
        return {k: max(pair) for k, pair in self.counts.items()}

    def cross_multiply(self, other: Degree) -> dict[Key, int]:
        """Of n/d = m/e, multiplied crosswise."""
        return {k: max(n + e, m + d) for k, (n, d, m, e) in self._paired_counts(other).items()}

    def _paired_counts(self, other: Degree) -> dict[Key, tuple[int, int, int, int]]:
        keys = self.counts.keys() | other.counts.keys()
        return {k: (*self.counts.get(k, _NONE), *other.counts.get(k, _NONE)) for k in keys}


ZERO = Degree({})


def _sum_key(atom: Size) -> tuple[str, Size]:
    return "sum", atom


def places_named(counts: Mapping[Key, int], atom: Size, by_sums: bool) -> int:
    """Places of an atom that a monomial speaks of; ``by_sums``: sums may be counted, too."""
    factors = counts.get(atom, 0)
    if by_sums:
        return min(factors, counts.get(_sum_key(atom), 0))
    return factors


def scale_counts(counts: Mapping[Key, int], factor: int) -> dict[Key, int]:
    return {k: factor * n for k, n in counts.items()}


def add_counts(one: Mapping[Key, int], other: Mapping[Key, int]) -> dict[Key, int]:
    return {k: one.get(k, 0) + other.get(k, 0) for k in one.keys() | other.keys()}
