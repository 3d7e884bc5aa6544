"""Choose the random elements to redraw if some radicands have no root in the field. All other elements stay.

A row of this module is one element of a radicand, together with the elements of the leaves that it depends on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..graphs.symbolic_sizes import AxisSize
from .interpreter import RandomDraws
from .proof_errors import RedrawRows

# Number of redraws of one kind before the next kind is tried; each redraw halves the number of rows without a root
_ROUNDS = 24


def redraw_elements(draws: RandomDraws, e: RedrawRows, p: int) -> None:
    """Redraw the elements that a row without a root depends on.

    Elements that rows with a root depend on too, such as a bias added to all rows, stay. Otherwise all rows would need
    a root at the same time by chance. More elements are redrawn in three steps: first the elements of the leaf whose
    axes distinguish the rows without a root, then all elements that belong to no more than these rows, then all
    elements.

    A radicand may be an element plus a constant c, for example the variance of a BatchNorm plus epsilon. Then the
    element is drawn as s² − c for a random s, so the root is s or −s. This doubles the degree.

    Args:
        draws: receives the new elements.
        e: the rows without a root.
        p: the prime.
    """
    drawn = {k: v for k, v in draws.elements.items() if k[0] in ("leaf", "constant")}
    masks = {k: _elements_in_rows(e, k[-1], v.shape) for k, v in drawn.items()}
    if e.mask is not None:
        fewest = e.mask.mean()
        told = _leaves_of_mask(e)
        tight = {k: mask for k, mask in masks.items() if mask.mean() <= fewest}
        own = {k: mask for k, mask in tight.items() if k[0] == "leaf" and told == {k[1]}}
        choices = [own, tight, masks]
        masks = next(filter(None, choices[draws.redraws // _ROUNDS % 3 :]), masks)
    shift = None
    if e.drawn is not None and draws.redraws < _ROUNDS:
        key, shift = e.drawn
        masks = {key: _elements_in_rows(e, key[-1], drawn[key].shape)}
    draws.redraws += 1
    for key, mask in masks.items():
        count = int(mask.sum())
        if count:
            fresh = drawn[key].copy()
            random_ = [draws.rng.randrange(1, p) for _ in range(count)]
            fresh[mask] = random_ if shift is None else [(s * s - shift) % p for s in random_]
            draws.elements[key] = fresh
            # The recorded scales and shifts belong to the old parameters.
            if key[0] == "constant":
                draws.affine = []


def _leaves_of_mask(e: RedrawRows) -> set[int]:
    """Return the leaves whose axes distinguish the rows of the mask; -1 stands for an axis that belongs to no leaf."""
    varying = [atom for atom, n in zip(e.atoms, e.mask.shape[1:], strict=True) if n > 1]
    return {atom.label[0] if isinstance(atom, AxisSize) else -1 for atom in varying}


def _elements_in_rows(e: RedrawRows, atoms: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    """Mark the elements of a tensor of these atoms that belong to the rows of the mask."""
    if e.mask is None:
        return np.ones(shape, dtype=bool)
    mask, left, places = e.mask, list(enumerate(atoms)), {}
    for slot, atom in enumerate(e.atoms, start=1):
        if mask.shape[slot] == 1:
            continue
        place = next((i for i, own in left if own == atom and _may_be_same_axis(own, atom)), None)
        if place is None:
            mask = mask.any(axis=slot, keepdims=True)
        else:
            left = [(i, own) for i, own in left if i != place]
            places[slot] = place + 1
    order = sorted(places, key=lambda s: places[s])
    mask = mask.transpose([0, *order, *(s for s in range(1, mask.ndim) if s not in places)])
    wanted = [1] * len(shape)
    for slot in order:
        wanted[places[slot]] = e.mask.shape[slot]
    wanted[0] = mask.shape[0]
    mask = mask.reshape(wanted)
    if shape[0] == 1 and mask.shape[0] > 1:
        mask = mask.any(axis=0, keepdims=True)
    return np.broadcast_to(mask, shape)


def _may_be_same_axis(own: Any, atom: Any) -> bool:
    """Return True if two atoms may belong to the same axis.

    Two atoms with different labels of one leaf belong to different axes.
    """
    return (
        not isinstance(own, AxisSize)
        or not isinstance(atom, AxisSize)
        or own.label[0] != atom.label[0]
        or own.label == atom.label
    )
