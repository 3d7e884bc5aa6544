"""Compute shifts: biases with a BatchNorm folded in, and merged biases of branches.

``weight_audit`` compares the weights of a file with the shifts. A model has one shift for each pair of a BatchNorm and
a bias of the same width; MobileOne has tens of thousands. Therefore shifts are computed only when a weight is looked
up, one BatchNorm at a time, and in a few channels first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...types import Array
from .derived_tensors import FloatSpacing, mark_differences

# Number of channels in which a shift is computed first. Most shifts already differ from the weight in these channels.
_FIRST = 4


@dataclass(frozen=True)
class BiasShift:
    """One bias with a BatchNorm folded in.

    Attributes:
        source: description of the tensors from which the shift is computed.
        values: float64 values, [C].
        sizes: sums of the magnitudes of the terms, [C]; rounding errors are relative to them.
    """

    source: str
    values: Array
    sizes: Array


@dataclass(frozen=True, kw_only=True)
class BatchNormShifts:
    """Biases b with one BatchNorm folded in: (b − mean) · scale + shift.

    Attributes:
        sources: description of each row.
        biases: [rows, C], the same array for all norms of C channels.
        mean: [C].
        scale: [C].
        shift: [C].
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
        """Compute the shifts of the ``chosen`` biases in some channels.

        Returns:
            (values, magnitudes), each [chosen rows, channels].
        """
        b = self.biases[chosen, channels]
        mean = self.mean[channels]
        scale = self.scale[channels]
        shift = self.shift[channels]
        values = (b - mean) * scale + shift
        return values, (np.abs(b) + np.abs(mean)) * np.abs(scale) + np.abs(shift)


@dataclass(frozen=True)
class FixedShift:
    """Shift with known values: the scale of a BatchNorm, or a merged weight or bias."""

    shift: BiasShift

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return int(self.shift.values.size)

    @property
    def sources(self) -> Sequence[str]:
        """Return the description of the only row."""
        return (self.shift.source,)

    def values_of_rows(self, chosen: Any = slice(None), channels: slice = slice(None)) -> tuple[Array, Array]:
        """Select values and magnitudes, as `BatchNormShifts.values_of_rows` does.

        Returns:
            (values, magnitudes), each [chosen rows, channels], all copies of the only row.
        """
        values = self.shift.values.reshape(1, -1)
        sizes = self.shift.sizes.reshape(1, -1)
        return values[chosen, channels], sizes[chosen, channels]


Shifts = BatchNormShifts | FixedShift


def iter_shifts(every: Iterable[Shifts]) -> Iterator[BiasShift]:
    """Compute every shift.

    Yields:
        one `BiasShift` for each row.
    """
    for shifts in every:
        values, sizes = shifts.values_of_rows()
        for place, source in enumerate(shifts.sources):
            yield BiasShift(source, values[place], sizes[place])


def group_by_size(every: Iterable[Shifts]) -> Mapping[int, list[Shifts]]:
    """Group shifts by their number of elements.

    Returns:
        number of elements -> shifts.
    """
    arranged: dict[int, list[Shifts]] = {}
    for shifts in every:
        arranged.setdefault(shifts.size, []).append(shifts)
    return arranged


def find_shift(flat: Array, every: Sequence[Shifts], form: FloatSpacing) -> BiasShift | None:
    """Find the first shift that ``flat`` equals in all channels, up to the rounding of its dtype.

    Args:
        flat: array [C].
        every: shifts of C channels.
        form: number format of ``flat``.

    Returns:
        the shift, or None.
    """
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
    """Find the shifts that ``flat`` equals in at least half of the channels.

    Yields:
        (shift, mask [C] of the channels that differ).
    """
    for shifts in every:
        values, sizes = shifts.values_of_rows()
        changed = mark_differences(np.broadcast_to(flat, values.shape), values, sizes, form)
        for place in np.flatnonzero(2 * changed.sum(-1) <= flat.size).tolist():
            yield BiasShift(shifts.sources[place], values[place], sizes[place]), changed[place]
