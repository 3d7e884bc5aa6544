"""Keeps the exact values of constants that were rounded to the model's type, in a third of the memory that float64
takes beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_graphsurgeon as gs

# elements of a constant that is kept as it is
_FEW = 2**12
# elements
_PIECE = 2**14
# of an element: what rounding takes of a smaller one has too few digits in float32
_SMALLEST = 2.0**-80


class ExactConstants:
    """float64 values by the ids of the constants that hold them, rounded.

    Of a large float32 constant the part that rounding took away is kept, in float32: value = rounded + part, off by
    2⁻⁴⁸ of it at most, for the part is 2⁻²⁴ of the value or less and float32 keeps 24 bits of it. The rounded elements
    are those of the constant where it holds the right ones; otherwise the value is kept whole, so that what is wrong in
    a constant shows. Of a constant that is proved the part need not be kept where the value can be computed again.
    """

    def __init__(self) -> None:
        self._whole: dict[int, np.ndarray] = {}
        self._parts: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        # the rounded, and the value
        self._again: dict[int, tuple[np.ndarray, Callable[[], np.ndarray]]] = {}

    def store_exact(self, stored: gs.Constant, exact: np.ndarray) -> None:
        exact = np.asarray(exact, dtype=np.float64)
        rounded = stored.values
        if exact.size > _FEW and rounded.dtype == np.float32 and rounded.shape == exact.shape:
            part = _rounding_remainder(exact.reshape(-1), rounded.reshape(-1))
            if part is not None:
                self._parts[id(stored)] = rounded, part.reshape(exact.shape)
                return
        self._whole[id(stored)] = exact

    def drop_remainder(self, key: int, again: Callable[[], np.ndarray]) -> None:
        """Keep no longer what rounding took of a large constant; ``again`` computes its value, in float64."""
        if key in self._parts:
            self._again[key] = self._parts.pop(key)[0], again

    def exact_value(self, key: int, otherwise: np.ndarray | None = None) -> np.ndarray | None:
        if key in self._parts:
            rounded, part = self._parts[key]
            return np.add(rounded, part, dtype=np.float64)
        if key in self._again:
            return self._again[key][1]()
        return self._whole.get(key, otherwise)

    def exact_pieces(self, key: int) -> Iterator[tuple[slice, np.ndarray]]:
        """The value of a constant that is known, by `cache_sized_slices` of its elements in order."""
        if key in self._parts:
            rounded, part = (x.reshape(-1) for x in self._parts[key])
            for places in cache_sized_slices(rounded.size):
                yield places, np.add(rounded[places], part[places], dtype=np.float64)
        else:
            value = self.exact_value(key)
            assert value is not None
            whole = value.reshape(-1)
            for places in cache_sized_slices(whole.size):
                yield places, whole[places]

    def shape(self, key: int) -> tuple[int, ...]:
        """Of a constant that is known."""
        rounded = self._parts.get(key) or self._again.get(key)
        return (self._whole[key] if rounded is None else rounded[0]).shape

    def rounded_and_remainder(self, key: int) -> tuple[np.ndarray, np.ndarray] | None:
        """(the rounded elements, what rounding took away) of a large float32 constant, both float32 and not copied;
        else None."""
        if key in self._again:
            rounded, again = self._again[key]
            part = _rounding_remainder(again().reshape(-1), rounded.reshape(-1))
            if part is None:
                return None
            return (rounded, part.reshape(rounded.shape))
        return self._parts.get(key)

    def __contains__(self, key: int) -> bool:
        return key in self._whole or key in self._parts or key in self._again


def _rounding_remainder(exact: np.ndarray, rounded: np.ndarray) -> np.ndarray | None:
    """What rounding took away; None where ``rounded`` holds something else, or what float32 has too few digits for."""
    part = np.empty(exact.shape, np.float32)
    with np.errstate(all="ignore"):
        for places in cache_sized_slices(exact.size):
            e = exact[places]
            r = rounded[places]
            rest = e - r
            if not ((r == e.astype(np.float32)) & np.isfinite(rest) & ((np.abs(e) >= _SMALLEST) | (e == 0))).all():
                return None
            part[places] = rest
    return part


def cache_sized_slices(size: int) -> Iterator[slice]:
    """Parts of an array that stay in the processor's cache: memory is the slowest of all."""
    return (slice(start, start + _PIECE) for start in range(0, size, _PIECE))
