"""Group the elements of a tensor into classes that no op of a proof distinguishes.

`normdeploy.proof` defines the terms atom, place and point. The ops treat all places of an atom alike. So a property of
single elements, such as the outputs that a NaN reaches, has to be tested for only one element per class. Two features
of an element determine its class. The first is which of its places are equal along axes that share an atom, such as the
diagonal of a square matrix. The second is which parts of joined axes its places belong to.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..graphs.symbolic_sizes import Size
from .axis_plan import AxisPlan
from .value import Array

# One coordinate of an element: (True for a part of a joined axis, atom, index of the point or the part). Two parts are
# never alike.
_Mark = tuple[bool, Any, int]
_Point = tuple[_Mark, ...]


def equivalence_classes(plan: AxisPlan, atoms: Sequence[Size]) -> Array:
    """Number the elements of a tensor by class.

    Returns:
        an integer array in the shape of the points. Elements of one class have equal numbers.
    """
    return _label_classes(tuple(_atom_points(plan, atom) for atom in atoms))


def representative_places(plan: AxisPlan, atoms: Sequence[Size]) -> list[int]:
    """Choose one element per class.

    Returns:
        flat row-major indices: the first element, the last element, then one element of each remaining class.
    """
    labels = equivalence_classes(plan, atoms).reshape(-1)
    labelled, first = np.unique(labels, return_index=True)
    known = {int(labels[0]), int(labels[-1])}
    return [0, labels.size - 1, *(int(i) for label, i in zip(labelled, first, strict=True) if int(label) not in known)]


def _atom_points(plan: AxisPlan, atom: Size) -> tuple[_Point, ...]:
    name = atom.terms
    if atom not in plan.joins:
        return tuple(((False, name, i),) for i in range(plan.point_count(atom)))
    held: list[_Point] = []
    for number, part in enumerate(plan.joins[atom]):
        inner = itertools.product(*(_atom_points(plan, a) for a in plan.atoms_of(part)))
        held += [((True, name, number), *(mark for point in points for mark in point)) for points in inner]
    return tuple(held)


@lru_cache(maxsize=256)
def _label_classes(axes: tuple[tuple[_Point, ...], ...]) -> Array:
    shape = tuple(map(len, axes))
    names = [axis[0][0][1] for axis in axes]
    if len(set(names)) == len(names) and not any(mark[0] for axis in axes for mark in axis[0]):
        return np.zeros(shape, dtype=int)
    known: dict[tuple[Any, ...], int] = {}
    labels = [known.setdefault(_canonical_points(points), len(known)) for points in itertools.product(*axes)]
    return np.array(labels, dtype=int).reshape(shape)


def _canonical_points(points: tuple[_Point, ...]) -> tuple[Any, ...]:
    """Renumber the points of each atom in order of appearance; parts keep their numbers."""
    order: dict[Any, dict[int, int]] = {}
    told: list[Any] = []
    for is_part, name, i in itertools.chain.from_iterable(points):
        met = order.setdefault(name, {})
        told.append(("part", i) if is_part else met.setdefault(i, len(met)))
    return tuple(told)
