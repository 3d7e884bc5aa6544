"""Which elements are drawn again where rows have no root in the field; the others stay."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..graphs.symbolic_sizes import AxisSize
from .interpreter import RandomDraws
from .proof_errors import RedrawRows

# redraws of one kind: each halves the rows that are bad
_ROUNDS = 24


def redraw_elements(draws: RandomDraws, e: RedrawRows, p: int) -> None:
    """Draw the elements again of which a row without a root is made.

    What good rows are made of as well (a bias that is added to all of them) stays, or all rows would have to be good by
    chance at once: first the leaf whose axes the bad rows are told by is drawn again, then whatever belongs to as few
    rows, then all; and so on. Where the radicand is an element plus c (the variance of a BatchNorm), the element is
    drawn as s² − c for a random s: a polynomial in s, of twice the degree.
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
            # what was taken down of scales and shifts was with other parameters
            if key[0] == "constant":
                draws.affine = []


def _leaves_of_mask(e: RedrawRows) -> set[int]:
    """The leaves by whose axes the rows of the mask are told."""
    varying = [atom for atom, n in zip(e.atoms, e.mask.shape[1:], strict=True) if n > 1]
    return {atom.label[0] if isinstance(atom, AxisSize) else -1 for atom in varying}


def _elements_in_rows(e: RedrawRows, atoms: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    """Which elements of a tensor of these atoms belong to the rows of the mask."""
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
    """Whether two axes of one size can be the same axis: what the same leaf calls otherwise is another."""
    return (
        not isinstance(own, AxisSize)
        or not isinstance(atom, AxisSize)
        or own.label[0] != atom.label[0]
        or own.label == atom.label
    )
