"""Derive tensors that exporters and optimizers compute from a model's parameters.

``weight_audit`` tries these derivations before it reports a weight as altered. Each derivation computes values in
float64, and for each value the sum of the magnitudes of its terms. Rounding errors are relative to this sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from ...dtypes import UNIT_ROUNDOFF
from ...types import Array, Arrays
from .parameter_orders import iter_arrangements, squeeze_shape

# Allowed error of a derived element in units of roundoff: one or two products, and the roundings of their factors.
ROUNDINGS = 8
# Unit roundoff of the finer half type.
_HALF_UNIT = UNIT_ROUNDOFF["float16"]
_NEARLY_ALL = 0.75
# Maximum number of elements of a tensor for which derivations are tried.
_MOST_ELEMENTS = 1 << 22
_MOST_PAIRS = 4096
# Number of elements that are compared first.
_FEW = 64
# Limits to which converters to half precision clip: the default of onnxruntime's converter, and float16's maximum.
_CLIPS = (1e4, 65504.0)

FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "exp": np.exp,
    "-exp": lambda p: -np.exp(p),
    "exp(-)": lambda p: np.exp(-p),
    "log": np.log,
    "softplus": lambda p: np.logaddexp(0, p),
    "sigmoid": lambda p: 1 / (1 + np.exp(-p)),
    "tanh": np.tanh,
    "relu": lambda p: np.maximum(p, 0),
    "abs": np.abs,
    "square": np.square,
    "sqrt": np.sqrt,
    "1 / sqrt": lambda p: 1 / np.sqrt(p),
    "1 /": lambda p: 1 / p,
    "1 +": lambda p: 1 + p,
    "1 -": lambda p: 1 - p,
    "cos": np.cos,
    "sin": np.sin,
}

PAIRS: Mapping[str, Callable[[Array, Array], Array]] = {
    "+": lambda p, q: p + q,
    "-": lambda p, q: p - q,
    "*": lambda p, q: p * q,
    "/": lambda p, q: p / q,
}


@dataclass(frozen=True, kw_only=True)
class FloatSpacing:
    """Spacing of a floating type: relative for normal numbers, absolute for subnormal ones.

    Attributes:
        unit: unit roundoff.
        step: half the smallest subnormal number.
        largest: largest finite number.
    """

    unit: float
    step: float
    largest: float

    @classmethod
    def of_dtype(cls, dtype: Any) -> FloatSpacing:
        """Read the spacing of ``dtype``.

        Returns:
            its spacing.
        """
        info = ml_dtypes.finfo(dtype)
        return cls(unit=float(info.eps) / 2, step=float(info.smallest_subnormal) / 2, largest=float(info.max))

    def sum_tolerance(self, size: Array) -> Array:
        """Bound the rounding error of a sum.

        Args:
            size: sum of the magnitudes of its terms.

        Returns:
            the bound for each element.
        """
        return ROUNDINGS * (self.unit * np.abs(size) + self.step)


def mark_differences(
    array: Array, expected: Array, size: Array, form: FloatSpacing, roundings: int | None = None
) -> Array:
    """Mark the elements of ``array`` that differ from ``expected`` cast to its type.

    A number beyond the range of the type may be infinite or clipped in the file.

    Args:
        array: numbers of a file, as float64.
        expected: float64 values.
        size: sums of the magnitudes of their terms.
        form: number format of the file's array.
        roundings: allowed roundings of each element; None for the number of roundings in a derivation.

    Returns:
        boolean mask, True for different elements.
    """
    with np.errstate(all="ignore"):
        error = np.abs(array - expected)
        allowed = form.sum_tolerance(size)
        # If nearly all elements of a half-precision tensor differ by at most one rounding, four roundings are allowed
        # for the remaining elements. Eight roundings of bfloat16 would be 3 %.
        if roundings is not None:
            allowed = allowed / ROUNDINGS * roundings
        elif form.unit >= _HALF_UNIT and (error <= allowed / ROUNDINGS).mean() >= _NEARLY_ALL:
            allowed = allowed / 2
        away = error > allowed
        # Non-finite differences and bounds count as different: for a logarithm of zero, the bound is infinite and would
        # accept every number.
        away |= ~np.isfinite(array - expected) | ~np.isfinite(size)
        same = (array == expected) | (np.isnan(array) & np.isnan(expected))
        clipped = np.zeros(array.shape, bool)
        limits = (*_CLIPS, form.largest)
        # A clipped number equals a limit up to rounding. Most weights have no such number, so the slow search is
        # skipped.
        may_be_clipped = bool((np.abs(array) >= min(limits) / 2).any())
        for limit in limits if may_be_clipped else ():
            stated = np.isclose(np.abs(array), limit, rtol=2 * form.unit, atol=0)
            clipped |= stated & (np.abs(expected) >= limit) & (np.sign(array) == np.sign(expected))
        clipped |= np.isinf(array) & (np.abs(expected) >= form.largest) & (np.sign(array) == np.sign(expected))
    return np.asarray(away & ~same & ~clipped)


def find_derivation(
    array: Array, stored: Arrays, form: FloatSpacing, require_time: Callable[[], None] = lambda: None
) -> str | None:
    """Find the derivation that computes ``array`` from tensors of the model.

    Args:
        array: float64 values.
        stored: the model's tensors by name.
        form: number format of the file's array.
        require_time: called before each tensor; it may raise.

    Returns:
        description of the derivation, or None.
    """
    if array.size > _MOST_ELEMENTS:
        return None
    same = {n: p.astype(np.float64) for n, p in stored.items() if p.size == array.size and np.isfinite(p).all()}
    array = np.atleast_1d(array)
    few = _ElementSample.sample_elements(array)
    for made in _iter_elementwise(same, array, form):
        require_time()
        # A few elements are compared first, because a model may have thousands of pairs of tensors.
        if (
            few.may_equal(made, form)
            and not _has_differences(array, made(...), form)
            and not _is_one_of(made(...)[0], same)
        ):
            return made.name
    for name, expected, size in _iter_adapter_merges(array, same, stored):
        require_time()
        for arranged, magnitudes in zip(
            iter_arrangements(expected, array), iter_arrangements(size, array), strict=True
        ):
            if not mark_differences(array, arranged, magnitudes, form).any():
                return name
    return None


def _is_one_of(values: Array, tensors: Arrays) -> bool:
    """Return whether ``values`` equal a tensor of the model.

    Then the derivation has no effect (such as relu of positive numbers) and explains nothing.
    """
    return any(np.array_equal(values.reshape(-1), tensor.reshape(-1)) for tensor in tensors.values())


@dataclass(frozen=True)
class _Derivation:
    """Derivation that computes each element from the elements at the same position in other tensors.

    Attributes:
        values: function that computes the values, and the magnitudes of their terms, at some positions (an index).
    """

    name: str
    values: Callable[[Any], tuple[Array, Array]]

    def __call__(self, places: Any) -> tuple[Array, Array]:
        with np.errstate(all="ignore"):
            return self.values(places)


@dataclass(frozen=True)
class _ElementSample:
    """Evenly spaced elements of a tensor, with their positions."""

    places: tuple[Array, ...]
    values: Array

    @classmethod
    def sample_elements(cls, array: Array) -> _ElementSample:
        """Select up to `_FEW` elements.

        Returns:
            the elements and their positions.
        """
        places = np.unravel_index(np.linspace(0, array.size - 1, min(array.size, _FEW)).astype(int), array.shape)
        return cls(places, array[places])

    def may_equal(self, made: _Derivation, form: FloatSpacing) -> bool:
        """Check whether a derivation computes these elements.

        Returns:
            True if all of them agree up to rounding.
        """
        return not _has_differences(self.values, made(self.places), form)


def _has_differences(array: Array, made: tuple[Array, Array], form: FloatSpacing) -> bool:
    return bool(mark_differences(array, *made, form).any())


def _apply_function(
    function: Callable[[Array], Array], p: Array, form: FloatSpacing, places: Any
) -> tuple[Array, Array]:
    x = p[places]
    value = function(x)
    # For a steep function, rounding the argument to the type changes the result by more than one unit.
    moved = np.abs(function(x * (1 + form.unit)) - function(x * (1 - form.unit))) / form.unit
    return value, np.abs(value) + moved


def _combine_tensors(
    label: str, combine: Callable[[Array, Array], Array], p: Array, q: Array, places: Any
) -> tuple[Array, Array]:
    x = p[places]
    y = q[places]
    value = combine(x, y)
    return value, np.abs(x) + np.abs(y) if label in "+-" else np.abs(value)


def _iter_elementwise(same: Arrays, array: Array, form: FloatSpacing) -> Iterator[_Derivation]:
    """Yield elementwise derivations from tensors with as many elements as ``array``, in the order of its dims."""
    for name, p in same.items():
        for arranged in iter_arrangements(p, array):
            for label, function in FUNCTIONS.items():
                yield _Derivation(f"{label} {name}", partial(_apply_function, function, arranged, form))
    pairs = [(a, b) for a in same for b in same if a != b]
    for a, b in pairs[:_MOST_PAIRS]:
        p = same[a]
        q = same[b]
        if squeeze_shape(p.shape) != squeeze_shape(q.shape):
            continue
        for one, other in zip(iter_arrangements(p, array), iter_arrangements(q.reshape(p.shape), array), strict=True):
            for label, combine in PAIRS.items():
                yield _Derivation(f"{a} {label} {b}", partial(_combine_tensors, label, combine, one, other))


def _iter_adapter_merges(array: Array, same: Arrays, stored: Arrays) -> Iterator[tuple[str, Array, Array]]:
    """Yield merges of low-rank adapters into a matrix, W + s * B @ A with a fitted s: (name, values, magnitudes)."""
    matrices = {n: p for n, p in stored.items() if p.ndim == 2}
    for name, p in same.items():
        if p.ndim != 2:
            continue
        rows, columns = p.shape
        left = {n: q for n, q in matrices.items() if q.shape[0] == rows and 2 * q.shape[1] <= min(p.shape)}
        right = {n: q for n, q in matrices.items() if q.shape[1] == columns}
        for a, q in left.items():
            for b, r in right.items():
                if q.shape[1] != r.shape[0] or a == b:
                    continue
                product = q.astype(np.float64) @ r.astype(np.float64)
                for target in (array.reshape(p.shape), array.reshape(p.T.shape).T):
                    norm = float((product * product).sum())
                    if norm:
                        scale = float(((target - p) * product).sum()) / norm
                    else:
                        scale = 0.0
                    terms = np.abs(q.astype(np.float64)) @ np.abs(r.astype(np.float64))
                    yield f"{name} + {scale:.6g} * {a} @ {b}", p + scale * product, np.abs(p) + abs(scale) * terms
