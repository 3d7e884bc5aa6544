"""The shifts that BatchNorms make of biases, and the merged biases of branches: what ``weight_audit`` holds a bias
against.

A model with many BatchNorms of one width has as many shifts as it has pairs of them with a bias. MobileOne has tens of
thousands, so they are computed when a weight is looked for, a BatchNorm at a time, and first in a few channels alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...types import Array
from .derived_tensors import FloatSpacing, mark_differences

# Channels in which a shift is computed first: what differs there is another one.
_FIRST = 4


@dataclass(frozen=True)
class BiasShift:
    """One shift, float64: what it is made of, its values, and the magnitudes in them, of which rounding is relative."""

    source: str
    values: Array
    sizes: Array


@dataclass(frozen=True, kw_only=True)
class BatchNormShifts:
    """The shifts that one BatchNorm makes of biases, (b − mean) · scale + shift.

    ``biases``: [rows, C], the same array in all norms of C channels; the other arrays are [C].
    """

    sources: Sequence[str]
    biases: Array
    mean: Array
    scale: Array
    shift: Array

    @property
    def size(self) -> int:
        """Return the number of channels."""
        return int(self.scale.size)

    def values_of_rows(self, chosen: Any = slice(None), channels: slice = slice(None)) -> tuple[Array, Array]:
        """Compute values and magnitudes of the ``chosen`` biases in some channels."""
        b = self.biases[chosen, channels]
        mean = self.mean[channels]
        scale = self.scale[channels]
        shift = self.shift[channels]
        values = (b - mean) * scale + shift
        return values, (np.abs(b) + np.abs(mean)) * np.abs(scale) + np.abs(shift)


@dataclass(frozen=True)
class FixedShift:
    """A shift that is known as it is: the scale of a BatchNorm, a merged weight or bias."""

    shift: BiasShift

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return int(self.shift.values.size)

    @property
    def sources(self) -> Sequence[str]:
        """Return what it is made of."""
        return (self.shift.source,)

    def values_of_rows(self, chosen: Any = slice(None), channels: slice = slice(None)) -> tuple[Array, Array]:
        """Return values and magnitudes, as `BatchNormShifts.values_of_rows` does."""
        values = self.shift.values.reshape(1, -1)
        sizes = self.shift.sizes.reshape(1, -1)
        return values[chosen, channels], sizes[chosen, channels]


Shifts = BatchNormShifts | FixedShift


def iter_shifts(every: Iterable[Shifts]) -> Iterator[BiasShift]:
    """Compute every shift."""
    for shifts in every:
        values, sizes = shifts.values_of_rows()
        for place, source in enumerate(shifts.sources):
            yield BiasShift(source, values[place], sizes[place])


def group_by_size(every: Iterable[Shifts]) -> Mapping[int, list[Shifts]]:
    """Arrange shifts by the number of their elements."""
    arranged: dict[int, list[Shifts]] = {}
    for shifts in every:
        arranged.setdefault(shifts.size, []).append(shifts)
    return arranged


def find_shift(flat: Array, every: Sequence[Shifts], form: FloatSpacing) -> BiasShift | None:
    """Return the first shift that ``flat`` is in all channels, up to the rounding of its type; None if none is."""
    few = slice(_FIRST)
    for shifts in every:
        values, sizes = shifts.values_of_rows(channels=few)
        alike = np.flatnonzero(
            ~mark_differences(np.broadcast_to(flat[few], values.shape), values, sizes, form).any(-1)
        ).tolist()
        values, sizes = shifts.values_of_rows(alike)
        for place, value, size in zip(alike, values, sizes, strict=True):
            if not mark_differences(flat, value, size, form).any():
                return BiasShift(shifts.sources[place], value, size)
    return None


def find_partial_shifts(flat: Array, every: Sequence[Shifts], form: FloatSpacing) -> Iterator[tuple[BiasShift, Array]]:
    """Give the shifts that ``flat`` is in half of the channels and more, and mark the channels in which it is not."""
    for shifts in every:
        values, sizes = shifts.values_of_rows()
        changed = mark_differences(np.broadcast_to(flat, values.shape), values, sizes, form)
        for place in np.flatnonzero(2 * changed.sum(-1) <= flat.size).tolist():
            yield BiasShift(shifts.sources[place], values[place], sizes[place]), changed[place]
