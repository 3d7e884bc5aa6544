"""Keep the exact values of constants that were rounded to the model's type.

A large float32 constant takes 4 extra bytes per element, half of a float64 copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

# Maximum number of elements of a constant that is kept whole in float64.
_FEW = 2**12
# Elements of a slice that stays in the processor's cache.
_PIECE = 2**14
# Smallest magnitude of a nonzero element for which a remainder is kept. The rounding error of a smaller element has too
# few digits in float32.
_SMALLEST = 2.0**-80


@dataclass(frozen=True)
class Product:
    """Product of a float64 array and factors, which is computed in pieces when it is read.

    Attributes:
        array: of at least one axis.
        factors: of the same rank, broadcast to the shape of ``array``.
    """

    array: np.ndarray
    factors: np.ndarray

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.array.size

    def compute(self) -> np.ndarray:
        """Return the product in float64."""
        return np.asarray(self.array * self.factors)

    def iter_pieces(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield the product in pieces along the first axis, which stay in the processor's cache if a row fits.

        Returns: the slice, and its elements in float64. The next piece overwrites the array.
        """
        rows = len(self.array)
        count = max(1, _PIECE * rows // max(1, self.array.size))
        piece = np.empty((min(count, rows), *self.array.shape[1:]))
        for start in range(0, rows, count):
            places = slice(start, min(start + count, rows))
            factors = self.factors if len(self.factors) == 1 else self.factors[places]
            yield places, np.multiply(self.array[places], factors, out=piece[: places.stop - start])


@dataclass(frozen=True)
class RoundedArray:
    """Array rounded to float32, with its remainder in float32.

    Attributes:
        low, high: smallest and largest element before rounding.
    """

    rounded: np.ndarray
    remainder: np.ndarray
    low: float
    high: float


def round_product(product: Product) -> RoundedArray | None:
    """Round a product to float32 in one pass, because memory is the bottleneck.

    Returns: the rounded elements; None if there are few elements, or if float32 can't hold the elements or their
        remainder.
    """
    if product.size <= _FEW:
        return None
    rounded = np.empty(product.array.shape, np.float32)
    remainder = np.empty(product.array.shape, np.float32)
    lows = []
    highs = []
    with np.errstate(all="ignore"):
        for places, exact in product.iter_pieces():
            lows.append(exact.min())
            highs.append(exact.max())
            piece = rounded[places]
            piece[...] = exact
            if not np.abs(piece).min() >= _SMALLEST and not ((np.abs(exact) >= _SMALLEST) | (exact == 0)).all():
                return None
            remainder[places] = np.subtract(exact, piece, out=exact)
    low = float(np.min(lows))
    high = float(np.max(highs))
    limit = float(np.finfo(np.float32).max)
    if not -limit <= low <= high <= limit:
        return None
    return RoundedArray(rounded, remainder, low, high)


class ExactConstants:
    """Exact float64 values of constants, by the id of the constant that stores the rounded value.

    For a large float32 constant, only the remainder lost in rounding is kept, in float32: value = rounded + remainder.
    The relative error is at most 2⁻⁴⁸, because the remainder is at most 2⁻²⁴ of the value and float32 keeps 24 bits of
    the remainder. This works only if the constant is the correctly rounded value. Otherwise the whole value is kept, so
    that the proof can find the error in the constant. Once a constant is proved, its remainder can be dropped if the
    value can be computed again.
    """

    def __init__(self) -> None:
        self._whole: dict[int, np.ndarray] = {}
        self._parts: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        # Constants whose remainder was dropped: the rounded elements, and a function that computes the value again.
        self._again: dict[int, tuple[np.ndarray, Callable[[], np.ndarray]]] = {}

    def store_exact(self, stored: gs.Constant, exact: np.ndarray) -> None:
        """Store the float64 value of a constant.

        Args:
            stored: holds the value rounded to its type.
        """
        exact = np.asarray(exact, dtype=np.float64)
        rounded = stored.values
        if exact.size > _FEW and rounded.dtype == np.float32 and rounded.shape == exact.shape:
            part = _rounding_remainder(exact.reshape(-1), rounded.reshape(-1))
            if part is not None:
                self.store_rounded(stored, rounded, part.reshape(exact.shape))
                return
        self._whole[id(stored)] = exact

    def store_rounded(self, stored: gs.Constant, rounded: np.ndarray, remainder: np.ndarray) -> None:
        """Store the value of a constant as the sum of two float32 arrays.

        Args:
            stored: holds ``rounded``.
            rounded: the correctly rounded value; it becomes read-only.
        """
        # `is_rounded_value` relies on the elements.
        rounded.setflags(write=False)
        self._parts[id(stored)] = rounded, remainder

    def drop_remainder(self, key: int, again: Callable[[], np.ndarray]) -> None:
        """Drop the remainder of a large constant.

        Args:
            key: id of the constant.
            again: computes its value in float64.
        """
        if key in self._parts:
            self._again[key] = self._parts.pop(key)[0], again

    def exact_value(self, key: int, otherwise: np.ndarray | None = None) -> np.ndarray | None:
        """Return the value of a constant.

        Args:
            key: id of the constant.

        Returns: float64; ``otherwise`` if the constant is not stored here.
        """
        if key in self._parts:
            rounded, part = self._parts[key]
            return np.add(rounded, part, dtype=np.float64)
        if key in self._again:
            return self._again[key][1]()
        return self._whole.get(key, otherwise)

    def exact_pieces(self, key: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield the value of a stored constant in pieces, by `cache_sized_slices` of its flattened elements.

        Yields: the slice, and its elements in float64.
        """
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

    def is_rounded_value(self, stored: gs.Constant) -> bool:
        """Return True if the elements are known to be the exact value rounded once, so that no check is needed.

        A remainder is kept only if each element is the rounded value, and the elements can't be written since.
        """
        known = self._parts.get(id(stored))
        return known is not None and known[0] is stored.values

    def shape(self, key: int) -> tuple[int, ...]:
        """Return the shape of a stored constant."""
        rounded = self._parts.get(key) or self._again.get(key)
        return (self._whole[key] if rounded is None else rounded[0]).shape

    def rounded_and_remainder(self, key: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the rounded elements and the remainder of a large float32 constant.

        Returns: two float32 arrays, not copied; None if the constant is kept whole or not stored here.
        """
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
    """Return the remainder of rounding.

    Returns: float32; None if ``rounded`` is not the rounded value, or if float32 has too few digits for the remainder.
    """
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
    """Split an array into slices that stay in the processor's cache, because memory is the bottleneck.

    Returns: an iterator over slices of at most 2**14 elements.
    """
    return (slice(start, start + _PIECE) for start in range(0, size, _PIECE))


def min_and_max(array: np.ndarray) -> tuple[float, float]:
    """Return the smallest and the largest element.

    The array is processed in pieces, so that the second pass over a piece finds it in the processor's cache.

    Returns: NaN twice if any element is NaN; 1 twice for an empty array.
    """
    if not array.size:
        return 1.0, 1.0
    flat = array.reshape(-1)
    bounds = [(flat[places].min(), flat[places].max()) for places in cache_sized_slices(array.size)]
    return float(np.min([low for low, _ in bounds])), float(np.max([high for _, high in bounds]))
