"""How tensors are laid out and sampled: each axis is a product of atoms, and an atom of n places is shown by a few
weighted points.

A region of uniform ops does the same at each place of an axis and sums over whole axes. Where k of n places hold values
of their own and the others all one, a sum over the axis is a sum over k + 1 points with weights. So an identity of
degree d in the elements of an axis that holds for d + 2 points with any weights holds for every length of that axis
(docs/certificates.md has the proof).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..graphs.sizes import ONE, Place, Size
from .degree import ALL, Key, named
from .errors import NotProved, Restart, Why

Atoms = tuple[Size, ...]
Axes = tuple[Atoms, ...]

_FEW = 2  # points of an axis that nothing is summed over
_FEWEST = 4  # points of one that is, before anything is known of degrees
_MOST = 64  # points that an axis may need
_CUTS = 32


@dataclass
class Plan:
    """What evaluations have learned of the axes; it only grows, and each growth begins the evaluation again."""

    points: dict[Size, int] = field(
        default_factory=dict
    )  # of an axis that is summed over: two more than the degree of what is compared
    cuts: dict[Size, tuple[Size, Size]] = field(default_factory=dict)
    summed: set[Size] = field(default_factory=set)
    joins: dict[Size, tuple[Size, ...]] = field(default_factory=dict)  # what a Concat puts one behind the other
    displaced: bool = False  # taps of convolutions are told by what they read (`normdeploy.proof.linear`)
    together: dict[Size, int] = field(
        default_factory=dict
    )  # along how many axes of one tensor an atom lies, where that is more than one
    twice: dict[Size, int] = field(
        default_factory=dict
    )  # the same of atoms that lie along one of them as a part of what is joined
    lengths: dict[Size, Size] = field(
        default_factory=dict
    )  # of atoms of any length: the one that the file has, as its Reshapes say
    named: dict[int, Size] = field(default_factory=dict)  # lengths that are any: what is proved holds whatever they are
    learning: bool = False  # all axes have few points, and only a cut or a join begins the evaluation again

    def at(self, named: dict[int, Size]) -> Plan:
        """The plan for the lengths themselves, of which ``named`` has the sizes that stood for them."""
        number = {size: Size.of(n) for n, size in named.items()}

        def told(sizes: Mapping[Size, Any]) -> dict[Size, Any]:
            return {number.get(size, size): value for size, value in sizes.items()}

        summed = {number.get(size, size) for size in self.summed}
        return Plan(
            told(self.points), {}, summed, {}, self.displaced, told(self.together), told(self.twice), dict(self.lengths)
        )

    def length(self, n: int) -> Size:
        """The size of an axis of which the file says how long it is."""
        return self.named.get(n) or Size.of(n)

    def stated(self, shape: Iterable[Size]) -> tuple[Size, ...]:
        """A shape as the file states it, with `length` for its numbers."""
        return tuple(size if size.number is None else self.length(size.number) for size in shape)

    def places(self, atom: Size) -> int:
        """How many places of the file's own constants an atom has."""
        n = (
            atom.number
            if atom.number is not None
            else next((n for n, size in self.named.items() if size == atom), None)
        )
        if n is None:
            raise NotProved(Why.SIZE, f"a constant has {atom} places, which no file says")
        return n

    def atoms(self, size: Size) -> Atoms:
        """The atoms of an axis of this size, in row-major order; none of an axis of one place."""
        if size == ONE:
            return ()
        if size in self.cuts:
            first, second = self.cuts[size]
            return self.atoms(first) + self.atoms(second)
        return (size,)

    def cut(self, atom: Size, first: Size, second: Size) -> None:
        """Let every axis of this size be two: places i·second + j."""
        if atom in self.cuts or atom in self.joins or len(self.cuts) >= _CUTS:
            raise NotProved(Why.LAYOUT, f"an axis of {atom} is cut in more than one way")
        self.cuts[atom] = (first, second)
        raise Restart

    def join(self, size: Size, parts: tuple[Size, ...]) -> None:
        """Let every axis of this size be these parts, one behind the other."""
        known = self.joins.get(size)
        if known == parts:
            return
        if known is not None or size in self.cuts or len(self.joins) >= _CUTS:
            raise NotProved(Why.LAYOUT, f"an axis of {size} is put together in more than one way")
        self.joins[size] = parts
        raise Restart

    def every_place(self, size: Size) -> None:
        """Let every axis of this size have a point for each place: that of a kernel, whose taps are told apart."""
        if size.number is not None and size.number > 1:
            self.join(size, (ONE,) * size.number)

    def bounds(self, size: Size) -> list[int]:
        """Where the parts of a joined axis begin among its points, and where the last one ends."""
        return list(
            itertools.accumulate((math.prod(self.count(a) for a in self.atoms(p)) for p in self.joins[size]), initial=0)
        )

    def sum_over(self, atom: Size) -> None:
        if atom not in self.summed:
            self.summed.add(atom)
            self._grown()
        for part in self.joins.get(atom, ()):
            for a in self.atoms(part):
                self.sum_over(a)

    def lie_together(self, axes: Axes) -> None:
        """Have a point of its own for each axis of an atom: of k places of which two are one not all are different."""
        atoms = [atom for axis in axes for atom in axis]
        if len(set(atoms)) == len(atoms) and not any(atom in self.joins for atom in atoms):
            return
        parts = Counter(a for atom in atoms for a in {a for part in self.joins.get(atom, ()) for a in self.atoms(part)})
        for a in {*atoms, *parts}:
            k = atoms.count(a) + parts[a]
            if k > self.together.get(a, 1):
                self.together[a] = k
                if parts[a]:
                    self.twice[a] = k
                self._grown()

    def count(self, atom: Size) -> int:
        """How many points stand for the places of an atom; as many as there are where these are few."""
        if atom in self.joins:
            return self.bounds(atom)[-1]
        n, together = atom.number, self.together.get(atom, 1)
        few = self.points.get(atom, _FEWEST) + together - 1 if atom in self.summed else max(_FEW, together)
        few = _FEW if self.learning else few
        return n if n is not None and n <= few else few

    def sampled(self, atom: Size) -> bool:
        n = atom.number
        return n is None or self.count(atom) < n or atom in self.joins

    def need(self, degrees: Mapping[Key, int], by_sums: bool = False) -> None:
        """Have enough points for an identity of this degree in the places of each atom; of all atoms where axes are
        joined, for then a place belongs to several. ``by_sums``: it is a polynomial in sums, of which no root or
        unknown function is taken.
        """
        total = degrees.get(ALL, 0)
        whole = bool(self.joins or self.displaced)
        wanted = {
            atom: (total * self.twice.get(atom, 1) if whole else named(degrees, atom, by_sums)) + 2
            for atom in self.summed
        }
        more = {a: n for a, n in wanted.items() if n > self.points.get(a, _FEWEST) and self.sampled(a)}
        if not more:
            return
        if max(more.values()) > _MOST:
            raise NotProved(Why.LIMIT, f"it is of degree {max(more.values()) - 2}; sizes are proved up to {_MOST - 2}")
        self.points |= more
        self._grown()

    def _grown(self) -> None:
        if not self.learning:
            raise Restart

    def unified(self, one: Atoms, other: Atoms) -> Atoms:
        """The atoms of two axes that lie over each other, element by element."""
        if not other or (one == other and (isinstance(one[0], Place) or not isinstance(other[0], Place))):
            return one
        if not one or one == other:
            return other
        if product(one) != product(other):
            raise NotProved(
                Why.SIZE,
                f"an axis of {product(one)} meets one of {product(other)}, and nothing says that they are equal",
            )
        for a, b in zip(reversed(one), reversed(other), strict=False):
            if a != b:
                self._cut_by(a, b)
        raise NotProved(Why.LAYOUT, f"{one} and {other} are cut differently")

    def _cut_by(self, a: Size, b: Size) -> None:
        for large, small in ((a, b), (b, a)):
            rest = large.over(small)
            if rest is not None and rest != ONE:
                self.cut(large, rest, small)
        raise NotProved(Why.LAYOUT, f"an axis is cut into parts of {a} and of {b}")

    def regrouped(self, atoms: Atoms, sizes: list[Size | None]) -> Axes:
        """The atoms of a whole tensor as axes of the given sizes, at most one of them open (None): what a Reshape
        does."""
        rest = list(atoms)
        if None not in sizes:
            axes = [self._taken(rest, s, 0) for s in sizes]  # type: ignore[arg-type]
            if rest:
                raise NotProved(Why.SIZE, f"a Reshape leaves {product(tuple(rest))} out")
            return tuple(axes)
        gap = sizes.index(None)
        head = [self._taken(rest, s, 0) for s in sizes[:gap]]  # type: ignore[arg-type]
        tail = [self._taken(rest, s, -1) for s in reversed(sizes[gap + 1 :])]  # type: ignore[arg-type]
        return (*head, tuple(rest), *reversed(tail))

    def _taken(self, rest: list[Size], size: Size, end: int) -> Atoms:
        """Take atoms that make up ``size`` from one end of ``rest``."""
        taken: list[Size] = []
        while size != ONE:
            if not rest:
                raise NotProved(Why.SIZE, f"a Reshape asks for an axis of {size} that is not there")
            atom = rest[end]
            left = size.over(atom)
            if left is None and atom in self.lengths:
                left = size.over(self.lengths[atom])
            if left is None:
                other = atom.over(size)
                if other is None:
                    raise NotProved(Why.LAYOUT, f"a Reshape makes an axis of {size} of one of {atom}")
                self.cut(atom, *((size, other) if end == 0 else (other, size)))
                continue
            taken.append(rest.pop(end))
            size = left
        return tuple(taken) if end == 0 else tuple(reversed(taken))


def product(atoms: Atoms) -> Size:
    total = ONE
    for a in atoms:
        total = total * a
    return total
