"""Compute with `Value`s and sum them over axes; each division checks that its divisor cannot be zero.

The package `normdeploy.proof` defines the terms (atom, draw, field, radicand). docs/explanation/certificates.md has the
rules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..graphs.symbolic_sizes import ONE, Size, product_of_sizes
from .axis_plan import Atoms, Axes, AxisPlan
from .degree import Degree, add_counts
from .modular_products import contract
from .prime_field import PrimeField
from .proof_errors import NotProved, ProofFailure, RedrawRows
from .sampler import RandomDraws, Sampler, sign_of_size
from .value import NEGATIVE, NOT_NEGATIVE, POSITIVE, Array, Value, axis_identity


@dataclass
class Radicand:
    """Radicand W = V + ε of a root, with V a sum of squares and ε a number.

    Attributes:
        w: W.
        root: √W.
        node: id of the node whose epsilon is ε; 0 if ε is not a node's epsilon.
        epsilon: ε as a value; None if W is the sum of squares alone.
    """

    w: Value
    root: Value
    node: int
    epsilon: Value | None = None


class Arithmetic(Sampler):
    """Compute with `Value`s. Without a field, divisors are not checked.

    Attributes:
        radicands: all radicands so far, in the order in which their roots were taken.
        divided: indices of the radicands that may be zero and whose roots are divisors.
        zeros: sizes that are divisors and may be zero.
    """

    def __init__(self, plan: AxisPlan, draws: RandomDraws, gf: PrimeField | None, real: type = np.float64) -> None:
        super().__init__(plan, draws, gf, real)
        self.radicands: list[Radicand] = []
        self.divided: set[int] = set()
        self.zeros: list[Size] = []

    def broadcast_values(self, *values: Value) -> tuple[Axes, list[tuple[Array | None, Array]]]:
        """Broadcast values to each other.

        Returns:
            the common axes, and for each value its arrays (a, f) in a shape that numpy broadcasts along these axes.
        """
        rank = max(len(v.axes) for v in values)
        padded = [((),) * (rank - len(v.axes)) + v.axes for v in values]
        common: list[Any] = []
        for i in range(rank):
            # Index of this axis in each value; negative if the value has too few axes.
            numbers = [i - rank + len(v.axes) for v in values]
            varying = [n >= 0 and v.varies_along(n) for v, n in zip(values, numbers, strict=True)]
            common.append(self._unify_axis([axes[i] for axes in padded], varying))
        self.plan.separate_axes(tuple(common))
        arrays: list[tuple[Array | None, Array]] = []
        for v, axes in zip(values, padded, strict=True):
            shape = []
            at = 1
            for own, atoms in zip(axes, common, strict=True):
                lengths = v.f.shape[at : at + len(own)]
                if any(n > 1 for n in lengths):
                    shape += list(lengths)
                else:
                    shape += [1] * len(atoms)
                at += len(own)
            f = v.f.reshape([v.f.shape[0], *shape])
            arrays.append((None if v.a is None else v.a.reshape([v.a.shape[0], *shape]), f))
        return tuple(common), arrays

    def _unify_axis(self, column: Sequence[Atoms], varying: Sequence[bool]) -> Atoms:
        """Unify the atoms of axes that broadcast to each other.

        If an axis is split into several atoms in one value, it is split in all values. That includes a value that does
        not vary along the axis, such as the result of an Expand.
        """
        atoms: Atoms = ()
        # Process the varying values first, so that they decide how the axis is split.
        for i in sorted(range(len(column)), key=lambda i: not varying[i]):
            if varying[i] or not atoms or not column[i] or product_of_sizes(atoms) != product_of_sizes(column[i]):
                atoms = self.plan.unify_atoms(atoms, column[i])
        return atoms

    def _combine(
        self,
        x: Value,
        y: Value,
        exact: Callable[[Array, Array], Array],
        real: Callable[[Array, Array], Array],
        degree: Degree,
    ) -> Value:
        axes, ((a, f), (b, g)) = self.broadcast_values(x, y)
        if a is None or b is None:
            self.work.count_floats(_broadcast_count(f, g))
        else:
            self.work.count_product(_broadcast_count(a, b), self.bits)
        if a is None or b is None:
            made = None
        else:
            made = exact(a, b)
        z = Value(axes, made, real(f, g), x.data or y.data, degree=degree, sized=x.sized or y.sized)
        z.sums, z.fixed = x.sums | y.sums, fixed_axes(axes, x, y)
        return z

    def add(self, x: Value, y: Value) -> Value:
        """Add two values.

        Returns:
            x + y. Its sign follows from the signs of x and y, or, for sizes, from the polynomial x + y.
        """
        return self._add_signed(x, y, 1)

    def sub(self, x: Value, y: Value) -> Value:
        """Subtract two values.

        Returns:
            x − y, with its sign as in `add`.
        """
        return self._add_signed(x, y, -1)

    def _add_signed(self, x: Value, y: Value, by: int) -> Value:
        if self.gf is not None:
            p = self.gf.p
        else:
            p = 0
        exact, real = ((lambda a, b: (a + b) % p), np.add) if by == 1 else ((lambda a, b: (a - b) % p), np.subtract)
        z = self._combine(x, y, exact, real, x.degree.plus(y.degree))
        if by == 1:
            other = y.sign
        else:
            other = y.below
        if x.sign and other:
            z.sign = max(x.sign, other)
        if by == 1:
            z.drawn = _shifted_draw(x, y) or _shifted_draw(y, x)
        if x.size is not None and y.size is not None:
            if by == 1:
                z.size = x.size + y.size
            else:
                z.size = x.size - y.size
            z.sign = max(z.sign, sign_of_size(z.size))
        return z

    def mul(self, x: Value, y: Value) -> Value:
        """Multiply two values.

        Returns:
            x·y; known to be non-negative if ``x`` and ``y`` are the same object.
        """
        if self.gf is not None:
            p = self.gf.p
        else:
            p = 0
        z = self._combine(x, y, lambda a, b: a * b % p, np.multiply, x.degree.times(y.degree))
        z.sign = min(x.sign, y.sign) or (NOT_NEGATIVE if x is y else NEGATIVE)
        z.nonzero = x.nonzero and y.nonzero
        if (
            (x.roots is not None or x.nonzero)
            and (y.roots is not None or y.nonzero)
            and not (x.roots is y.roots is None)
        ):
            z.roots = (x.roots or frozenset()) | (y.roots or frozenset())
        if x.size is not None and y.size is not None:
            z.size = x.size * y.size
        return z

    def neg(self, x: Value) -> Value:
        """Negate a value.

        Returns:
            −x, with ``sign`` and ``below`` swapped.
        """
        if x.a is None or self.gf is None:
            made = None
        else:
            made = (-x.a) % self.gf.p
        z = replace(x, a=made, f=-x.f, size=None if x.size is None else -x.size, sign=x.below, below=x.sign, drawn=None)
        if z.size is not None:
            z.sign, z.below = sign_of_size(z.size), sign_of_size(-z.size)
        return z

    def inverse(self, y: Value) -> Value:
        """Invert a value that is never zero, or is zero only at inputs at which both sides give NaN.

        Returns:
            1/y.

        Raises:
            NotProved: ``y`` may be zero.
            RedrawRows: a drawn element of ``y`` is zero in the field.
        """
        made = None
        if self.gf is not None and y.a is not None:
            self._require_nonzero(y)
            if (y.a == 0).any():
                if not y.data:
                    raise NotProved(ProofFailure.SIGN, "it divides by a constant 0")
                raise RedrawRows(None, ())
            made = self.gf.inverse(y.a)
        with np.errstate(all="ignore"):
            f = np.asarray(1, dtype=self.real) / y.f
        z = Value(y.axes, made, f, y.data, y.sign, y.degree.with_places_in(y.varying_atoms()).inverse(), sized=y.sized)
        # In all other cases 1/y may be zero: if y is Inf, 1/y is 0.
        z.nonzero = y.nonzero or y.sign == POSITIVE
        z.sums, z.fixed = y.sums, y.fixed | (y.varying_axes() if y.sums else frozenset())
        return z

    def div(self, x: Value, y: Value) -> Value:
        """Divide two values.

        Returns:
            x/y. In the field it is computed as x·(1/y), in floats by a division.

        Raises:
            NotProved: ``y`` may be zero.
        """
        z = self.mul(x, self.inverse(y))
        with np.errstate(all="ignore"):
            _, ((_, f), (_, g)) = self.broadcast_values(x, y)
            # IEEE division: x·(1/y) differs if y is Inf.
            z.f = f / g
        if x.size is not None and y.size is not None:
            if y.size != 0:
                z.size = x.size.divide_exactly(y.size)
            else:
                z.size = None
        return z

    def _require_nonzero(self, y: Value) -> None:
        if y.nonzero or y.sign == POSITIVE:
            return
        if y.roots is not None:
            self.divided |= {i for i in y.roots if self.radicands[i].w.sign != POSITIVE}
            return
        if not y.data:
            if not y.sized:
                raise NotProved(ProofFailure.SIGN, "it divides by a constant that may be zero")
            elif y.size is None:
                raise NotProved(ProofFailure.SIZE, "it divides by an expression of sizes that may be zero")
            elif not y.size.is_positive:
                self.zeros.append(y.size)
            return
        for i, radicand in enumerate(self.radicands):
            power = y
            # Test y² = r·W^j for j = 1 … 4.
            for j in range(1, 5):
                if (
                    self.constant_ratio(
                        self.mul(y, y),
                        radicand.w if j == 1 else (power := self.mul(power if j > 2 else radicand.w, radicand.w)),
                    )
                    is not None
                ):
                    if radicand.w.sign != POSITIVE:
                        self.divided |= {i}
                    return
        raise NotProved(ProofFailure.SIGN, "it divides by a value that may be zero")

    def sum_over(self, x: Value, axes: Sequence[int]) -> Value:
        """Sum over axes; they stay as axes of size 1.

        Args:
            axes: numbers of the axes, non-negative.

        Returns:
            the sum, with as many axes as ``x``.
        """
        a = x.a
        f = x.f
        summed = frozenset(atom for axis in axes for atom in x.axes[axis])
        own = self._quotient_count([atom for axis in axes for atom in x.axes[axis]], x.fixed)
        for axis in axes:
            for slot, atom in zip(x.array_axes(axis), x.axes[axis], strict=True):
                a, f = self._sum_slot(a, f, slot, atom)
        kept = tuple(() if i in axes else axis for i, axis in enumerate(x.axes))
        slots = [s for i in range(len(x.axes)) if i in axes for s in x.array_axes(i)]
        for slot in sorted(slots, reverse=True):
            if a is not None:
                a = a.squeeze(slot)
            f = f.squeeze(slot)
        sized = x.sized or any(atom.symbols() for atom in summed)
        degree = x.degree.repeat_sum(own).sum_over(atom for axis in axes for atom in x.axes[axis])
        return Value(kept, a, f, x.data, x.sign, degree, sized=sized, sums=x.sums | summed, fixed=x.fixed)

    def inner_product(self, x: Value, y: Value, axes: Sequence[int]) -> Value:
        """Sum x·y over axes without storing the product.

        Args:
            axes: numbers of the common axes to sum over; they stay as axes of size 1.

        Returns:
            the sum, with the broadcast axes of x and y.
        """
        common, ((a, f), (b, g)) = self.broadcast_values(x, y)
        summed = frozenset(atom for axis in axes for atom in common[axis])
        fixed = fixed_axes(common, x, y)
        own = self._quotient_count([atom for axis in axes for atom in common[axis]], fixed)
        starts = list(itertools.accumulate((len(axis) for axis in common), initial=1))
        slots = []
        for axis in axes:
            for slot, atom in enumerate(common[axis], starts[axis]):
                slots.append(slot)
                still = f.shape[slot] == g.shape[slot] == 1
                n = self.size_value(atom)
                exact, real = (n.a, n.f) if still else self._point_weights(atom)
                shape = [-1 if i == slot else 1 for i in range(g.ndim)]
                if b is not None and exact is not None:
                    b = b * exact.reshape(shape)
                g = g if real is None else g * real.reshape(shape)
        kept = [i for i in range(f.ndim) if i not in slots]
        made = None
        self.work.count_operations(_broadcast_count(f, g))
        if a is not None and b is not None and self.gf is not None:
            self.work.count_operations(_broadcast_count(a, b) * 2 * (self.bits // 30 + 1) ** 2)
            made = contract(a, b % self.gf.p, slots, self.gf.p)
            made = made.reshape([made.shape[i] for i in kept])
        with np.errstate(all="ignore"):
            floats = contract(f, g, slots)
        z = Value(
            tuple(() if i in axes else axis for i, axis in enumerate(common)),
            made,
            floats.reshape([floats.shape[i] for i in kept]),
        )
        z.data = x.data or y.data
        z.degree = x.degree.times(y.degree).repeat_sum(own).sum_over(atom for axis in axes for atom in common[axis])
        z.sign = min(x.sign, y.sign) or (NOT_NEGATIVE if x is y else NEGATIVE)
        z.sized = x.sized or y.sized or any(atom.symbols() for atom in summed)
        z.sums = x.sums | y.sums | summed
        z.fixed = fixed
        return z

    def _quotient_count(self, atoms: Sequence[Size], fixed: frozenset[Any]) -> int:
        """Count the quotients with different denominators that a sum over these atoms adds up.

        Returns:
            the product of the point counts of the atoms in ``fixed``.

        Raises:
            NotProved: an atom in ``fixed`` has fewer points than places.
        """
        for atom in atoms:
            self.plan.sum_over(atom)
        own = [atom for atom in atoms if axis_identity(atom) in fixed]
        if any(self.plan.is_sampled(atom) for atom in own):
            raise NotProved(ProofFailure.LIMIT, "it sums over rows with different denominators")
        return math.prod(self.plan.point_count(atom) for atom in own)

    def _sum_slot(self, a: Array | None, f: Array, slot: int, atom: Size) -> tuple[Array | None, Array]:
        if self.gf is not None:
            p = self.gf.p
        else:
            p = 0
        if f.shape[slot] == 1:
            n = self.size_value(atom)
            return (None if a is None else a * n.a[0] % p), f * n.f[0]  # type: ignore[index]
        exact, real = self._point_weights(atom)
        shape = [-1 if i == slot else 1 for i in range(f.ndim)]
        if exact is not None and a is not None:
            a = a * exact.reshape(shape)
        if a is not None:
            a = np.add.reduce(a, axis=slot, keepdims=True) % p
        with np.errstate(all="ignore"):
            return a, np.add.reduce(f if real is None else f * real.reshape(shape), axis=slot, keepdims=True)

    def split_joined_axis(self, x: Value, axis: int) -> list[Value]:
        """Split an axis that is joined from parts (`AxisPlan.join_axes`), the inverse of a Concat.

        Args:
            axis: number of the axis, which is one joined atom.

        Returns:
            the parts in order.
        """
        (atom,) = x.axes[axis]
        (slot,) = x.array_axes(axis)
        bounds = self.plan.part_bounds(atom)
        parts = []
        for i, size in enumerate(self.plan.joins[atom]):
            atoms = self.plan.atoms_of(size)
            places = slice(bounds[i], bounds[i + 1])
            axes = (*x.axes[:axis], atoms, *x.axes[axis + 1 :])
            a = None if x.a is None else self._take_points(x.a, slot, places, atoms)
            f = self._take_points(x.f, slot, places, atoms)
            made = replace(x, axes=axes, a=a, f=f, size=None, drawn=None)
            if axis_identity(atom) in x.fixed:
                made.fixed = x.fixed | {axis_identity(each) for each in atoms}
            parts.append(made)
        return parts

    def _take_points(self, array: Array, slot: int, places: slice, atoms: Atoms) -> Array:
        """Take points along one axis of an array, and lay them out along ``atoms``."""
        if array.shape[slot] == 1:
            taken = array
            counts = [1] * len(atoms)
        else:
            taken = array[(slice(None),) * slot + (places,)]
            counts = [self.plan.point_count(each) for each in atoms]
        return taken.reshape(*array.shape[:slot], *counts, *array.shape[slot + 1 :])

    def count(self, x: Value, axes: Sequence[int]) -> Value:
        """Count the elements along axes.

        Returns:
            the product of the sizes of ``axes`` as a value.
        """
        size = ONE
        for axis in axes:
            for atom in x.axes[axis]:
                size = size * atom
        return self.size_value(size)

    def mean(self, x: Value, axes: Sequence[int]) -> Value:
        """Average over axes; they stay as axes of size 1.

        Returns:
            `sum_over` divided by `count`.
        """
        return self.div(self.sum_over(x, axes), self.count(x, axes))

    def constant_product(self, t: Value, w: Value) -> tuple[int, float] | None:
        """Compute t·w if it is the same number at all points and positive.

        Returns:
            the number as a residue and as a float; None if t·w varies or is not shown to be positive.
        """
        if t.a is None or w.a is None or self.gf is None:
            return None
        (mine, a), (theirs, b) = t.drop_constant_axes(t.a), w.drop_constant_axes(w.a)
        if mine != theirs or a.shape != b.shape or a.size < 2:
            return None
        made = (a * b % self.gf.p).reshape(-1)
        if (made != made[0]).any():
            return None
        self.plan.require_degree(add_counts(t.degree.total_counts(), w.degree.total_counts()))
        return self._require_positive(int(made[0]), float(t.f.reshape(-1)[0] * w.f.reshape(-1)[0]), t, w)

    def positive_ratio(self, t: Value, w: Value) -> tuple[int, float] | None:
        """Compute t/w if it is the same number at all points and positive.

        Returns:
            the number as a residue and as a float; None if t/w varies or is not shown to be positive.
        """
        known = self.constant_ratio(t, w)
        if known is None:
            return None
        return self._require_positive(*known, t, w)

    def constant_ratio(self, t: Value, w: Value) -> tuple[int, float] | None:
        """Compute t/w if it is the same number at all points. The first point gives the number; the other points test
        it.

        Returns:
            the number as a residue and as a float; None if t/w varies.
        """
        if t.a is None or w.a is None or self.gf is None:
            return None
        (mine, a), (theirs, b) = t.drop_constant_axes(t.a), w.drop_constant_axes(w.a)
        if mine != theirs or a.shape != b.shape or (b == 0).any() or (a.size < 2 and (a != b).any()):
            return None
        r = int(a.reshape(-1)[0]) * pow(int(b.reshape(-1)[0]), -1, self.gf.p) % self.gf.p
        if ((a - r * b) % self.gf.p != 0).any():
            return None
        self.plan.require_degree(add_counts(t.degree.total_counts(), w.degree.total_counts()))
        with np.errstate(all="ignore"):
            value = float(t.f.reshape(-1)[0] / w.f.reshape(-1)[0])
        return r, value

    def _require_positive(self, r: int, value: float, t: Value, w: Value) -> tuple[int, float] | None:
        """Return ``r`` and ``value`` if the number is positive at every size and for the constants in the file.

        The number is t/w or t·w, with residue ``r`` and float ``value``. Its sign is shown in one of two ways. Either
        both factors are positive by their structure, or the number is a positive fraction of at most `_HEIGHT` bits, or
        such a fraction times or divided by a size. The float alone proves nothing, because it holds at one size only.

        Returns:
            (r, value), or None if the number is not shown to be positive.
        """
        assert self.gf is not None
        if t.sign == w.sign == POSITIVE and value > 0:
            return r, value
        for size, number in self._size_factors():
            q = self.gf.to_rational(r * size % self.gf.p)
            small = q is not None and q.numerator.bit_length() + q.denominator.bit_length() <= _HEIGHT
            if small and q is not None and math.isclose(float(q), value * number, rel_tol=1e-9):
                if q > 0:
                    return (r, value)
                return None
        return None

    def _size_factors(self) -> list[tuple[int, float]]:
        """Return 1, each size, and the inverse of each size, as pairs of a residue and a float."""
        assert self.gf is not None
        sizes = [(1, 1.0)]
        for q, n in self.draws.symbols.values():
            square = q * q % self.gf.p
            sizes += [(square, n), (pow(square, -1, self.gf.p), 1 / n)]
        return sizes


# Maximum bits of a fraction that is read from its residue. Of 160-bit residues, only a share of 2^-60 represent such a
# small fraction by chance, and the float must agree as well.
_HEIGHT = 100


def _shifted_draw(x: Value, number: Value) -> tuple[Any, int] | None:
    """Return `Value.drawn` of x + number; None if ``x`` is not drawn or ``number`` is not a constant scalar."""
    if x.drawn is None or number.data or number.a is None or number.a.size != 1:
        return None
    key, c = x.drawn
    return key, c + int(number.a.reshape(-1)[0])


def fixed_axes(axes: Axes, *values: Value) -> frozenset[Any]:
    """Collect the axes along which a root or a divisor of one of the values varies.

    Args:
        axes: common axes of the values.

    Returns:
        identities of these axes, by their names in the values and in ``axes``.
    """
    fixed = set().union(*(v.fixed for v in values))
    for v in values:
        for own, common in zip(reversed(v.axes), reversed(axes), strict=False):
            if len(own) == len(common):
                fixed |= {axis_identity(b) for a, b in zip(own, common, strict=True) if axis_identity(a) in v.fixed}
    return frozenset(fixed)


def _broadcast_count(a: Array, b: Array) -> int:
    """Count the elements of two arrays broadcast to each other."""
    return math.prod(np.broadcast_shapes(a.shape, b.shape))
