"""Record which elements of a radicand are squares modulo p, to exclude that a product of some is always a square.

A root is the one that is a square itself. Suppose a product of radicands is the square of some s at every input. Then
the product of their roots is s or −s, depending on the character of s, and not |s|. Without such a product the roots
are independent of each other (docs/explanation/certificates.md).

A product over a set of elements is always a square only if the number of nonsquares in the set is always even. No
nonempty set has this property if the observed sets of nonsquares span all sets under addition modulo 2, however they
were drawn.
"""

from __future__ import annotations

from .value import Array


class ResidueCharacters:
    """Span of the sets of elements of one radicand that were seen to be nonsquares."""

    def __init__(self) -> None:
        # Highest element -> a set as a bit mask
        self._basis: dict[int, int] = {}
        self._different = 0

    def record_nonsquares(self, elements: Array, bad: Array) -> None:
        """Record one evaluation.

        Elements that are equal in every draw are one polynomial and count once.

        Args:
            elements: elements of the radicand, (draws, …).
            bad: True for nonsquares, (draws, …).
        """
        columns = elements.reshape(len(elements), -1)
        first: dict[tuple[int, ...], int] = {}
        for i in range(columns.shape[1]):
            first.setdefault(tuple(columns[:, i].tolist()), i)
        self._different = len(first)
        told = bad.reshape(len(bad), -1)
        for row in told:
            self._add_character(sum(1 << i for i in first.values() if row[i]))

    def _add_character(self, character: int) -> None:
        while character:
            highest = character.bit_length()
            if highest not in self._basis:
                self._basis[highest] = character
                return
            character ^= self._basis[highest]

    @property
    def are_independent(self) -> bool:
        """Return True if the observed sets span all sets of different elements."""
        return len(self._basis) >= self._different
