"""A tensor under proof: its elements at the sampled places, in the field and as floats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from ..graphs.symbolic_sizes import AxisSize, Size, product_of_sizes
from .axis_plan import Atoms, Axes
from .degree import ZERO, Degree

Array = np.ndarray[Any, Any]

# what structure says of the sign at every real input; NEGATIVE: nothing
NEGATIVE, NOT_NEGATIVE, POSITIVE = 0, 1, 2


def axis_identity(atom: Size) -> Any:
    """Which axis an atom is, where a leaf or a convolution says so; else its size, which others may have."""
    if isinstance(atom, AxisSize):
        return atom.label
    return atom


@dataclass(eq=False, slots=True)
class Value:
    """``a`` and ``f`` have one axis for the draws and one for each atom of ``axes``; length 1 where nothing varies
    along it.

    ``a`` is None where only floats are asked for. ``data``: depends on a leaf. ``size``: the polynomial that a scalar
    made of sizes is.
    """

    axes: Axes
    a: Array | None
    f: Array
    data: bool = False
    sign: int = NEGATIVE
    degree: Degree = ZERO
    size: Size | None = None
    # depends on a symbol
    sized: bool = False
    # no element is zero, at any place and any size
    nonzero: bool = False
    roots: frozenset[int] | None = (
        # a product of roots of these radicands of this proof: zero at most where one of them is
        None
    )
    # the atoms that it holds sums over
    sums: frozenset[Size] = frozenset()
    # the axes (`axis_identity`) along which a root or a divisor varies that holds sums: they are not summed
    fixed: frozenset[Any] = frozenset()
    # (key in `Draws.elements`, c): each element is one of those drawn, plus c
    drawn: tuple[Any, int] | None = None
    # what structure says of the sign of -x, for x - (-epsilon)
    below: int = NEGATIVE

    @property
    def atoms(self) -> Atoms:
        return tuple(atom for axis in self.axes for atom in axis)

    @property
    def shape(self) -> tuple[Size, ...]:
        return tuple(product_of_sizes(axis) for axis in self.axes)

    def array_axes(self, axis: int) -> range:
        """The axes of the arrays that hold axis ``axis``."""
        start = 1 + sum(len(a) for a in self.axes[:axis])
        return range(start, start + len(self.axes[axis]))

    def varies_along(self, axis: int) -> bool:
        """Whether it does along an axis; what an Expand has laid out does not."""
        return any(self.f.shape[s] > 1 for s in self.array_axes(axis))

    def with_axes(self, axes: Axes, permutation: list[int] | None = None) -> Value:
        """The same elements with other axes; ``permutation`` of the arrays' axes, None where they stay in order."""

        def transpose_array(x: Array | None) -> Array | None:
            if x is None or permutation is None:
                return x
            return x.transpose(permutation)

        f = transpose_array(self.f)
        assert f is not None
        return replace(self, axes=axes, a=transpose_array(self.a), f=f)

    def varying_atoms(self) -> Atoms:
        return tuple(atom for atom, n in zip(self.atoms, self.f.shape[1:], strict=True) if n > 1)

    def varying_axes(self) -> frozenset[Any]:
        """The axes along which it varies."""
        return frozenset(map(axis_identity, self.varying_atoms()))

    def drop_constant_axes(self, array: Array) -> tuple[Atoms, Array]:
        """The atoms along which ``array`` (``a`` or ``f``) varies, and it without the others."""
        kept = [i for i, n in enumerate(array.shape[1:]) if n > 1]
        atoms = self.atoms
        return tuple(atoms[i] for i in kept), array.reshape(array.shape[0], *(array.shape[1 + i] for i in kept))


@dataclass(frozen=True, eq=False, slots=True)
class Magnitude:
    """|x| of what may be negative: no value of the field, only its square is one. ``floats``: its elements, without
    residues."""

    square: Value
    floats: Value


@dataclass(frozen=True, eq=False, slots=True)
class Logarithm:
    """q·log(t): no value of the field; its exponential is t^q."""

    t: Value
    q: Fraction
    floats: Value
