"""Record which elements of a radicand are squares modulo p, to show that no product of elements is always a square.

Of the two roots of an element, the field uses the root that is a square itself. Suppose a product of radicands is the
square s² of some s at every input. In the reals, the product of their roots is |s|. In the field it is s or −s,
depending on whether s is a square, so an identity might be misjudged. If no such product exists, the roots are
independent of each other (docs/explanation/certificates.md).

The product of a set of elements is always a square only if the number of nonsquares in the set is always even. Each
evaluation gives one set of nonsquares. If these sets span all sets under addition modulo 2, no nonempty set has this
property. This conclusion does not depend on how the elements were drawn.
"""

from __future__ import annotations

from .value import Array


class ResidueCharacters:
    """Span of the sets of nonsquares that the evaluations of one radicand gave."""

    def __init__(self) -> None:
        # Basis of the span: highest element of a set -> the set as a bit mask
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
        """Return True if the recorded sets span all sets of distinct elements."""
        return len(self._basis) >= self._different
