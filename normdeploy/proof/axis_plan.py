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

from ..graphs.symbolic_sizes import ONE, AxisSize, Size, product_of_sizes
from .degree import ALL, Key, places_named
from .proof_errors import NotProved, ProofFailure, RestartEvaluation

Atoms = tuple[Size, ...]
Axes = tuple[Atoms, ...]

# points of an axis that nothing is summed over
_FEW = 2
# points of one that is, before anything is known of degrees
_FEWEST = 4
# points that an axis may need
_MOST = 64
_CUTS = 32


@dataclass
class AxisPlan:
    """What evaluations have learned of the axes; it only grows, and each growth begins the evaluation again."""

    # of an axis that is summed over: two more than the degree of what is compared
    points: dict[Size, int] = field(default_factory=dict)
    cuts: dict[Size, tuple[Size, Size]] = field(default_factory=dict)
    summed: set[Size] = field(default_factory=set)
    # what a Concat puts one behind the other
    joins: dict[Size, tuple[Size, ...]] = field(default_factory=dict)
    # taps of convolutions are told by what they read (`normdeploy.proof.convolutions`)
    displaced: bool = False
    # along how many axes of one tensor an atom lies, where that is more than one
    together: dict[Size, int] = field(default_factory=dict)
    # the same of atoms that lie along one of them as a part of what is joined
    twice: dict[Size, int] = field(default_factory=dict)
    # of atoms of any length: the one that the file has, as its Reshapes say
    lengths: dict[Size, Size] = field(default_factory=dict)
    # lengths that are any: what is proved holds whatever they are
    named: dict[int, Size] = field(default_factory=dict)
    # all axes have few points, and only a cut or a join begins the evaluation again
    learning: bool = False

    def substitute_sizes(self, named: dict[int, Size]) -> AxisPlan:
        """The plan for the lengths themselves, of which ``named`` has the sizes that stood for them."""
        number = {size: Size.from_int(n) for n, size in named.items()}

        def substitute_keys(sizes: Mapping[Size, Any]) -> dict[Size, Any]:
            return {number.get(size, size): value for size, value in sizes.items()}

        summed = {number.get(size, size) for size in self.summed}
        return AxisPlan(
            substitute_keys(self.points),
            {},
            summed,
            {},
            self.displaced,
            substitute_keys(self.together),
            substitute_keys(self.twice),
            dict(self.lengths),
        )

    def size_of_length(self, n: int) -> Size:
        """The size of an axis of which the file says how long it is."""
        return self.named.get(n) or Size.from_int(n)

    def shape_of_file(self, shape: Iterable[Size]) -> tuple[Size, ...]:
        """A shape as the file states it, with `length` for its numbers."""
        return tuple(
            size if size.constant_value is None else self.size_of_length(size.constant_value) for size in shape
        )

    def place_count(self, atom: Size) -> int:
        """How many places of the file's own constants an atom has."""
        n = (
            atom.constant_value
            if atom.constant_value is not None
            else next((n for n, size in self.named.items() if size == atom), None)
        )
        if n is None:
            raise NotProved(ProofFailure.SIZE, f"a constant has {atom} places, which no file says")
        return n

    def atoms_of(self, size: Size) -> Atoms:
        """The atoms of an axis of this size, in row-major order; none of an axis of one place."""
        if size == ONE:
            return ()
        if size in self.cuts:
            first, second = self.cuts[size]
            return self.atoms_of(first) + self.atoms_of(second)
        return (size,)

    def split_axis(self, atom: Size, first: Size, second: Size) -> None:
        """Let every axis of this size be two: places i·second + j."""
        if atom in self.cuts or atom in self.joins or len(self.cuts) >= _CUTS:
            raise NotProved(ProofFailure.LAYOUT, f"an axis of {atom} is cut in more than one way")
        self.cuts[atom] = (first, second)
        raise RestartEvaluation

    def join_axes(self, size: Size, parts: tuple[Size, ...]) -> None:
        """Let every axis of this size be these parts, one behind the other."""
        known = self.joins.get(size)
        if known == parts:
            return
        if known is not None or size in self.cuts or len(self.joins) >= _CUTS:
            raise NotProved(ProofFailure.LAYOUT, f"an axis of {size} is put together in more than one way")
        self.joins[size] = parts
        raise RestartEvaluation

    def sample_every_place(self, size: Size) -> None:
        """Let every axis of this size have a point for each place: that of a kernel, whose taps are told apart."""
        if size.constant_value is not None and size.constant_value > 1:
            self.join_axes(size, (ONE,) * size.constant_value)

    def part_bounds(self, size: Size) -> list[int]:
        """Where the parts of a joined axis begin among its points, and where the last one ends."""
        return list(
            itertools.accumulate(
                (math.prod(self.point_count(a) for a in self.atoms_of(p)) for p in self.joins[size]), initial=0
            )
        )

    def sum_over(self, atom: Size) -> None:
        if atom not in self.summed:
            self.summed.add(atom)
            self._restart_if_grown()
        for part in self.joins.get(atom, ()):
            for a in self.atoms_of(part):
                self.sum_over(a)

    def separate_axes(self, axes: Axes) -> None:
        """Have a point of its own for each axis of an atom: of k places of which two are one not all are different."""
        atoms = [atom for axis in axes for atom in axis]
        if len(set(atoms)) == len(atoms) and not any(atom in self.joins for atom in atoms):
            return
        parts = Counter(
            a for atom in atoms for a in {a for part in self.joins.get(atom, ()) for a in self.atoms_of(part)}
        )
        for a in {*atoms, *parts}:
            k = atoms.count(a) + parts[a]
            if k > self.together.get(a, 1):
                self.together[a] = k
                if parts[a]:
                    self.twice[a] = k
                self._restart_if_grown()

    def point_count(self, atom: Size) -> int:
        """How many points stand for the places of an atom; as many as there are where these are few."""
        if atom in self.joins:
            return self.part_bounds(atom)[-1]
        n = atom.constant_value
        together = self.together.get(atom, 1)
        if atom in self.summed:
            few = self.points.get(atom, _FEWEST) + together - 1
        else:
            few = max(_FEW, together)
        if self.learning:
            few = _FEW
        if n is not None and n <= few:
            return n
        return few

    def is_sampled(self, atom: Size) -> bool:
        n = atom.constant_value
        return n is None or self.point_count(atom) < n or atom in self.joins

    def require_degree(self, degrees: Mapping[Key, int], by_sums: bool = False) -> None:
        """Have enough points for an identity of this degree in the places of each atom; of all atoms where axes are
        joined, for then a place belongs to several. ``by_sums``: it is a polynomial in sums, of which no root or
        unknown function is taken.
        """
        total = degrees.get(ALL, 0)
        whole = bool(self.joins or self.displaced)
        wanted = {
            atom: (total * self.twice.get(atom, 1) if whole else places_named(degrees, atom, by_sums)) + 2
            for atom in self.summed
        }
        more = {a: n for a, n in wanted.items() if n > self.points.get(a, _FEWEST) and self.is_sampled(a)}
        if not more:
            return
        if max(more.values()) > _MOST:
            raise NotProved(
                ProofFailure.LIMIT, f"it is of degree {max(more.values()) - 2}; sizes are proved up to {_MOST - 2}"
            )
        self.points |= more
        self._restart_if_grown()

    def _restart_if_grown(self) -> None:
        if not self.learning:
            raise RestartEvaluation

    def unify_atoms(self, one: Atoms, other: Atoms) -> Atoms:
        """The atoms of two axes that lie over each other, element by element."""
        if not other or (one == other and (isinstance(one[0], AxisSize) or not isinstance(other[0], AxisSize))):
            return one
        if not one or one == other:
            return other
        if product_of_sizes(one) != product_of_sizes(other):
            raise NotProved(
                ProofFailure.SIZE,
                f"an axis of {product_of_sizes(one)} meets one of {product_of_sizes(other)}, and nothing says "
                "that they are equal",
            )
        for a, b in zip(reversed(one), reversed(other), strict=False):
            if a != b:
                self._split_by(a, b)
        raise NotProved(ProofFailure.LAYOUT, f"{one} and {other} are cut differently")

    def _split_by(self, a: Size, b: Size) -> None:
        for large, small in ((a, b), (b, a)):
            rest = large.divide_exactly(small)
            if rest is not None and rest != ONE:
                self.split_axis(large, rest, small)
        raise NotProved(ProofFailure.LAYOUT, f"an axis is cut into parts of {a} and of {b}")

    def regroup_atoms(self, atoms: Atoms, sizes: list[Size | None]) -> Axes:
        """The atoms of a whole tensor as axes of the given sizes, at most one of them open (None): what a Reshape
        does."""
        rest = list(atoms)
        if None not in sizes:
            axes = [self._take_atoms(rest, s, 0) for s in sizes]  # type: ignore[arg-type]
            if rest:
                raise NotProved(ProofFailure.SIZE, f"a Reshape leaves {product_of_sizes(tuple(rest))} out")
            return tuple(axes)
        gap = sizes.index(None)
        head = [self._take_atoms(rest, s, 0) for s in sizes[:gap]]  # type: ignore[arg-type]
        tail = [self._take_atoms(rest, s, -1) for s in reversed(sizes[gap + 1 :])]  # type: ignore[arg-type]
        return (*head, tuple(rest), *reversed(tail))

    def _take_atoms(self, rest: list[Size], size: Size, end: int) -> Atoms:
        """Take atoms that make up ``size`` from one end of ``rest``."""
        taken: list[Size] = []
        while size != ONE:
            if not rest:
                raise NotProved(ProofFailure.SIZE, f"a Reshape asks for an axis of {size} that is not there")
            atom = rest[end]
            left = size.divide_exactly(atom)
            if left is None and atom in self.lengths:
                left = size.divide_exactly(self.lengths[atom])
            if left is None:
                other = atom.divide_exactly(size)
                if other is None:
                    raise NotProved(ProofFailure.LAYOUT, f"a Reshape makes an axis of {size} of one of {atom}")
                self.split_axis(atom, *((size, other) if end == 0 else (other, size)))
                continue
            taken.append(rest.pop(end))
            size = left
        if end == 0:
            return tuple(taken)
        return tuple(reversed(taken))
