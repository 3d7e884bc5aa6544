"""Represent a tensor in a proof: its elements at the sampled places, in the field and as floats.

`normdeploy.proof` defines the terms (atom, draw, leaf, place, radicand).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from ..graphs.symbolic_sizes import AxisSize, Size, product_of_sizes
from .axis_plan import Atoms, Axes
from .degree import ZERO, Degree

Array = np.ndarray[Any, Any]

# Sign of a value at every real input, as far as the structure shows it. NEGATIVE means negative or unknown.
NEGATIVE, NOT_NEGATIVE, POSITIVE = 0, 1, 2


def axis_identity(atom: Size) -> Any:
    """Return a key that identifies an axis.

    Returns:
        the label that a leaf or a convolution gave to the axis. Without a label, the size, which other axes may share.
    """
    if isinstance(atom, AxisSize):
        return atom.label
    return atom


@dataclass(eq=False, slots=True)
class Value:
    """Tensor in a proof.

    The first axis of ``a`` and ``f`` is the draw. One axis per atom of ``axes`` follows, with length 1 if the value
    does not vary along the atom.

    Attributes:
        axes: atoms of each axis.
        a: residues; None if only floats are computed.
        f: floats.
        data: True if it depends on a leaf.
        sign: sign at every real input, as far as the structure shows.
        degree: bound of the places that numerator and denominator name (`normdeploy.proof.degree`).
        size: polynomial in the dims if the value is a scalar computed from sizes; None otherwise.
        sized: True if it depends on a symbol.
        nonzero: True if no element is zero, at any place and size.
        roots: indices of radicands, if the value is zero only where the root of one of them is zero; None otherwise.
        sums: atoms over which the value contains sums.
        fixed: axes (`axis_identity`) along which a root or a divisor that contains sums varies. Such an axis cannot be
            summed over if it is sampled.
        drawn: (key, c) if each element is an element of ``RandomDraws.elements[key]`` plus c; None otherwise.
        below: sign of −x, as far as the structure shows it. It gives the sign of x − (−epsilon).
    """

    axes: Axes
    a: Array | None
    f: Array
    data: bool = False
    sign: int = NEGATIVE
    degree: Degree = ZERO
    size: Size | None = None
    sized: bool = False
    nonzero: bool = False
    roots: frozenset[int] | None = None
    sums: frozenset[Size] = frozenset()
    fixed: frozenset[Any] = frozenset()
    drawn: tuple[Any, int] | None = None
    below: int = NEGATIVE

    @property
    def atoms(self) -> Atoms:
        """Return the atoms of all axes in order."""
        return tuple(atom for axis in self.axes for atom in axis)

    @property
    def shape(self) -> tuple[Size, ...]:
        """Return the size of each axis."""
        return tuple(product_of_sizes(axis) for axis in self.axes)

    def array_axes(self, axis: int) -> range:
        """Return the axes of ``a`` and ``f`` that hold axis ``axis``.

        Returns:
            a range; empty for an axis of size 1.
        """
        start = 1 + sum(len(a) for a in self.axes[:axis])
        return range(start, start + len(self.axes[axis]))

    def varies_along(self, axis: int) -> bool:
        """Return True if the elements vary along an axis. Along an axis that an Expand added, they do not."""
        return any(self.f.shape[s] > 1 for s in self.array_axes(axis))

    def with_axes(self, axes: Axes, permutation: list[int] | None = None) -> Value:
        """Replace the axes.

        Args:
            permutation: permutation of the arrays' axes; None to keep their order.

        Returns:
            the same elements with other axes.
        """

        def transpose_array(x: Array | None) -> Array | None:
            if x is None or permutation is None:
                return x
            return x.transpose(permutation)

        f = transpose_array(self.f)
        assert f is not None
        return replace(self, axes=axes, a=transpose_array(self.a), f=f)

    def varying_atoms(self) -> Atoms:
        """Return the atoms along which the floats vary.

        Returns:
            atoms in order.
        """
        return tuple(atom for atom, n in zip(self.atoms, self.f.shape[1:], strict=True) if n > 1)

    def varying_axes(self) -> frozenset[Any]:
        """Return the axes along which the value varies.

        Returns:
            identities of the axes (`axis_identity`).
        """
        return frozenset(map(axis_identity, self.varying_atoms()))

    def drop_constant_axes(self, array: Array) -> tuple[Atoms, Array]:
        """Drop the axes along which ``array`` (``a`` or ``f``) does not vary.

        Returns:
            the remaining atoms, and the array with one axis per remaining atom.
        """
        kept = [i for i, n in enumerate(array.shape[1:]) if n > 1]
        atoms = self.atoms
        return tuple(atoms[i] for i in kept), array.reshape(array.shape[0], *(array.shape[1 + i] for i in kept))


@dataclass(frozen=True, eq=False, slots=True)
class Magnitude:
    """Absolute value |x| of a value that may be negative. Only its square can be computed in the field.

    Attributes:
        square: x².
        floats: |x| in floats, without residues.
    """

    square: Value
    floats: Value


@dataclass(frozen=True, eq=False, slots=True)
class Logarithm:
    """Logarithm q·log(t). It cannot be computed in the field, but its exponential t^q can.

    Attributes:
        t: argument.
        q: factor.
        floats: q·log(t) in floats, without residues.
    """

    t: Value
    q: Fraction
    floats: Value
