"""Decide how the axes of tensors are divided and sampled in a proof.

A place is one position along an axis, and an atom is a set of n places. An axis is a product of atoms. A few weighted
points represent the n places of an atom.

The ops of a proof treat all places of an axis alike and sum over whole axes. Suppose k of n places hold different
values and the remaining n − k places share one value. Then a sum over the axis is a weighted sum over k + 1 points.
Next, suppose an identity of degree d in the elements of an axis holds for d + 2 points with any weights. Then it holds
for every length of that axis (docs/explanation/certificates.md has the proof).
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

# Number of points of an axis that is not summed over
_FEW = 2
# Number of points of a summed axis before the degree of the identity is known
_FEWEST = 4
# Maximum number of points of an axis; a proof that needs more points fails.
_MOST = 64
_CUTS = 32


@dataclass
class AxisPlan:
    """Layout of the axes, as learned by evaluations. It only grows, and each growth restarts the evaluation.

    Attributes:
        points: points of each summed atom: the degree of the compared identity plus two.
        cuts: the two factors of each atom that a Reshape splits, in row-major order.
        summed: atoms that are summed over.
        joins: the parts of each size that a Concat joins, in order.
        displaced: True if taps of convolutions are identified by their displacement (`normdeploy.proof.convolutions`).
        together: number of axes of one tensor that share an atom, if more than one.
        twice: the same number, for atoms that are also a part of a joined axis.
        lengths: for each atom of arbitrary length, its length in the file. The file's Reshapes contain this length.
        named: symbols that replace lengths, keyed by length. The proof holds for any value of a symbol.
        learning: True while all axes have few points and only a cut or a join restarts the evaluation.
    """

    points: dict[Size, int] = field(default_factory=dict)
    cuts: dict[Size, tuple[Size, Size]] = field(default_factory=dict)
    summed: set[Size] = field(default_factory=set)
    joins: dict[Size, tuple[Size, ...]] = field(default_factory=dict)
    displaced: bool = False
    together: dict[Size, int] = field(default_factory=dict)
    twice: dict[Size, int] = field(default_factory=dict)
    lengths: dict[Size, Size] = field(default_factory=dict)
    named: dict[int, Size] = field(default_factory=dict)
    learning: bool = False

    def substitute_sizes(self, named: dict[int, Size]) -> AxisPlan:
        """Build the plan for the file's lengths.

        Args:
            named: the symbols of this plan, keyed by the length that each symbol replaced.

        Returns:
            a new plan without cuts and joins, with lengths in place of the symbols.
        """
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
        """Return the symbol of length ``n``, or the number itself.

        Returns:
            the size to use for an axis whose length the file states as ``n``.
        """
        return self.named.get(n) or Size.from_int(n)

    def shape_of_file(self, shape: Iterable[Size]) -> tuple[Size, ...]:
        """Replace the numbers in a shape from the file by their symbols (`size_of_length`).

        Returns:
            the shape with a symbol for each length in ``named``.
        """
        return tuple(
            size if size.constant_value is None else self.size_of_length(size.constant_value) for size in shape
        )

    def place_count(self, atom: Size) -> int:
        """Count the places of an atom, with the lengths that the file's constants have.

        Returns:
            the number of places.

        Raises:
            NotProved: the file gives no number for this size.
        """
        n = (
            atom.constant_value
            if atom.constant_value is not None
            else next((n for n, size in self.named.items() if size == atom), None)
        )
        if n is None:
            raise NotProved(
                ProofFailure.SIZE,
                f"a constant has {atom} elements along an axis, but the file does not specify this size",
            )
        return n

    def atoms_of(self, size: Size) -> Atoms:
        """List the atoms of an axis of this size in row-major order.

        Returns:
            the atoms; empty for an axis of size 1.
        """
        if size == ONE:
            return ()
        if size in self.cuts:
            first, second = self.cuts[size]
            return self.atoms_of(first) + self.atoms_of(second)
        return (size,)

    def split_axis(self, atom: Size, first: Size, second: Size) -> None:
        """Split every axis of this size in two, place i·second + j being place (i, j).

        Raises:
            RestartEvaluation: always, if the split is possible.
            NotProved: the axis is already split or joined, or the plan has too many cuts.
        """
        if atom in self.cuts or atom in self.joins or len(self.cuts) >= _CUTS:
            raise NotProved(ProofFailure.LAYOUT, f"an axis of size {atom} is split in more than one way")
        self.cuts[atom] = (first, second)
        raise RestartEvaluation

    def join_axes(self, size: Size, parts: tuple[Size, ...]) -> None:
        """Treat every axis of this size as the concatenation of ``parts``.

        Raises:
            RestartEvaluation: if the join is new.
            NotProved: the axis is already split or joined otherwise, or the plan has too many joins.
        """
        known = self.joins.get(size)
        if known == parts:
            return
        if known is not None or size in self.cuts or len(self.joins) >= _CUTS:
            raise NotProved(ProofFailure.LAYOUT, f"an axis of size {size} is concatenated in more than one way")
        self.joins[size] = parts
        raise RestartEvaluation

    def sample_every_place(self, size: Size) -> None:
        """Give every axis of this size one point per place. Kernels need this, because their taps differ."""
        if size.constant_value is not None and size.constant_value > 1:
            self.join_axes(size, (ONE,) * size.constant_value)

    def part_bounds(self, size: Size) -> list[int]:
        """Return the bounds of a joined axis's parts among its points.

        Returns:
            the first point of each part, then the total number of points.
        """
        return list(
            itertools.accumulate(
                (math.prod(self.point_count(a) for a in self.atoms_of(p)) for p in self.joins[size]), initial=0
            )
        )

    def sum_over(self, atom: Size) -> None:
        """Record that an atom is summed over, with the atoms of its joined parts.

        Raises:
            RestartEvaluation: if the plan did not know of this sum.
        """
        if atom not in self.summed:
            self.summed.add(atom)
            self._restart_if_grown()
        for part in self.joins.get(atom, ()):
            for a in self.atoms_of(part):
                self.sum_over(a)

    def separate_axes(self, axes: Axes) -> None:
        """Provide enough points that all axes of one atom in a tensor can take different points.

        k axes of one atom need k points. With fewer points, at least two axes would always take the same point.

        Raises:
            RestartEvaluation: if the plan grows.
        """
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
        """Count the points that represent the places of an atom.

        Returns:
            the number of points; the number of places if that is smaller.
        """
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
        """Return True if an atom has fewer points than places, or its length is open.

        Returns:
            True for joined axes too.
        """
        n = atom.constant_value
        return n is None or self.point_count(atom) < n or atom in self.joins

    def require_degree(self, degrees: Mapping[Key, int], by_sums: bool = False) -> None:
        """Require enough points for an identity of this degree in the places of each atom.

        If axes are joined, or ``displaced`` is set, a place belongs to several atoms. Then the total degree counts for
        each atom.

        Args:
            degrees: degree by atom, and the total under ``ALL``.
            by_sums: the identity is a polynomial in sums. No sum is the argument of a root or of an unknown function.

        Raises:
            RestartEvaluation: more points are needed.
            NotProved: more than `_MOST` points are needed.
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
                ProofFailure.LIMIT,
                f"its polynomial degree is {max(more.values()) - 2}; sizes are proved up to degree {_MOST - 2}",
            )
        self.points |= more
        self._restart_if_grown()

    def _restart_if_grown(self) -> None:
        if not self.learning:
            raise RestartEvaluation

    def unify_atoms(self, one: Atoms, other: Atoms) -> Atoms:
        """Unify the atoms of two axes that broadcast to each other element by element.

        Returns:
            the common atoms.

        Raises:
            RestartEvaluation: an axis must be split first.
            NotProved: the sizes differ, or the axes are cut differently.
        """
        if not other or (one == other and (isinstance(one[0], AxisSize) or not isinstance(other[0], AxisSize))):
            return one
        if not one or one == other:
            return other
        if product_of_sizes(one) != product_of_sizes(other):
            raise NotProved(
                ProofFailure.SIZE,
                f"axes of sizes {product_of_sizes(one)} and {product_of_sizes(other)} are combined, but "
                "these sizes may differ",
            )
        for a, b in zip(reversed(one), reversed(other), strict=False):
            if a != b:
                self._split_by(a, b)
        raise NotProved(ProofFailure.LAYOUT, f"{one} and {other} are split differently")

    def _split_by(self, a: Size, b: Size) -> None:
        for large, small in ((a, b), (b, a)):
            rest = large.divide_exactly(small)
            if rest is not None and rest != ONE:
                self.split_axis(large, rest, small)
        raise NotProved(ProofFailure.LAYOUT, f"an axis is split into parts of sizes {a} and {b}")

    def regroup_atoms(self, atoms: Atoms, sizes: list[Size | None]) -> Axes:
        """Regroup the atoms of a whole tensor into axes of the given sizes, as a Reshape does.

        Args:
            sizes: size of each new axis; at most one size is None, and it is computed from the others.

        Returns:
            the atoms of each new axis.

        Raises:
            NotProved: the atoms do not make up these sizes.
        """
        rest = list(atoms)
        if None not in sizes:
            axes = [self._take_atoms(rest, s, 0) for s in sizes]  # type: ignore[arg-type]
            if rest:
                raise NotProved(ProofFailure.SIZE, f"a Reshape omits an axis of size {product_of_sizes(tuple(rest))}")
            return tuple(axes)
        gap = sizes.index(None)
        head = [self._take_atoms(rest, s, 0) for s in sizes[:gap]]  # type: ignore[arg-type]
        tail = [self._take_atoms(rest, s, -1) for s in reversed(sizes[gap + 1 :])]  # type: ignore[arg-type]
        return (*head, tuple(rest), *reversed(tail))

    def _take_atoms(self, rest: list[Size], size: Size, end: int) -> Atoms:
        """Take the atoms that make up ``size`` from one end of ``rest``."""
        taken: list[Size] = []
        while size != ONE:
            if not rest:
                raise NotProved(ProofFailure.SIZE, f"a Reshape needs an axis of size {size}, but no axis is left")
            atom = rest[end]
            left = size.divide_exactly(atom)
            if left is None and atom in self.lengths:
                left = size.divide_exactly(self.lengths[atom])
            if left is None:
                other = atom.divide_exactly(size)
                if other is None:
                    raise NotProved(
                        ProofFailure.LAYOUT,
                        f"a Reshape needs an axis of size {size}, which does not align with one of size {atom}",
                    )
                self.split_axis(atom, *((size, other) if end == 0 else (other, size)))
                continue
            taken.append(rest.pop(end))
            size = left
        if end == 0:
            return tuple(taken)
        return tuple(reversed(taken))
