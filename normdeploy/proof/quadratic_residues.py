"""Which elements of a radicand are squares modulo p, over all that was drawn: whether a product of some of them always
is one.

A root is the one that is a square itself. So where a product of radicands is the square of some s at every input, the
product of their roots is s or −s as the character of s has it, and not |s|. With no such product the roots are
independent of each other (docs/certificates.md). A product over a set of elements is always a square where the number
of those that are none is always even; no set is such where the sets that were seen to be no squares span all sets,
added up modulo 2, however they were drawn.
"""

from __future__ import annotations

from .value import Array


class ResidueCharacters:
    """Of one radicand: the span of the sets of its elements that were seen to be no squares."""

    def __init__(self) -> None:
        # highest element -> a set, as bits
        self._basis: dict[int, int] = {}
        self._different = 0

    def record_nonsquares(self, elements: Array, bad: Array) -> None:
        """Take down an evaluation. ``elements``, ``bad`` (which are no squares): (draws, …). Elements that are one
        polynomial, and so equal in every draw, count once."""
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
        return len(self._basis) >= self._different
