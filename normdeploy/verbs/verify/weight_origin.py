"""Find the origin of a weight that is not an unchanged tensor of the model, by numerical comparison with each
tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from math import prod

import numpy as np

from ...findings.rendering import ShortRepr
from ...types import Array, Arrays
from .bias_shifts import Shifts, find_partial_shifts, find_shift
from .compute_budget import BudgetClock
from .derived_tensors import FloatSpacing, mark_differences
from .parameter_orders import iter_arrangements
from .row_matching import MOSTLY, NEAR, ROW

# If at most this share of a tensor's elements differ, the differences count as few, and may be alterations.
_FEW_ALTERED = 0.25
# Allowed number of roundings, of half a unit in the last place each.
_IN_A_UNIT = 2


class WeightOrigin(StrEnum):
    """Origin of a weight. `weight_audit` defines each origin."""

    FOLDED = "folded"
    COMPUTED = "computed"
    ALTERED = "altered"


@dataclass(frozen=True, repr=False)
class AuditedWeight(ShortRepr):
    """Initializer that is not an unchanged tensor of the model. The record is false if the initializer was altered.

    Attributes:
        module: module of the initializer; "" if unknown.
        parameter: the nearest tensor of the model; "" if no tensor is similar.
        difference: largest |file − model|. For a folded weight, the difference from the scaled tensor.
        reason: explanation for the user.
        elements: number of elements.
    """

    file: str
    name: str
    module: str
    origin: WeightOrigin
    parameter: str = ""
    difference: float = 0.0
    reason: str = ""
    elements: int = 0

    def summarize(self) -> str:
        """Return the main facts in one line."""
        return f"{'pass' if self else 'fail'}, {self.name!r} of {self.file}: {self.reason or self.origin}"

    def __bool__(self) -> bool:
        return self.origin is not WeightOrigin.ALTERED


def find_origin(
    weight: AuditedWeight,
    array: Array,
    missing: Arrays,
    shifts: Mapping[int, Sequence[Shifts]],
    clock: BudgetClock,
) -> AuditedWeight:
    """Compare ``array`` with the model's tensors that the file lacks.

    Args:
        weight: record to complete.
        missing: the model's tensors that the file does not hold unchanged.
        shifts: number of elements -> shifts of that size.
        clock: raises an error when the time is over.

    Returns:
        ``weight`` with its origin: folded if a tensor of the model explains it, or altered if a tensor is near.
        Otherwise only its reason is set.
    """
    form = FloatSpacing.of_dtype(array.dtype)
    flat = array.astype(np.float64).reshape(-1)
    fitting = shifts.get(flat.size, ())
    if shift := find_shift(flat, fitting, form):
        made = replace(weight, parameter=shift.source)
        return _with_origin(made, WeightOrigin.FOLDED, np.abs(flat - shift.values), f"made of {shift.source}")
    fits = {name: values_of for name, values_of in missing.items() if values_of.size == array.size}
    # The parameter with the weight's name is tried first. If it explains the weight, no other parameter is tried.
    named = {name: fits.pop(name) for name in [*fits] if _is_named_after(weight, name)}
    origins = list[AuditedWeight]()
    for origin in _iter_origins(weight, array, named, form, clock):
        # The first parameter that explains the weight is used. Others that explain it too are multiples of this one.
        if origin:
            return origin
        origins.append(origin)
    best: AuditedWeight | None = None
    for near, changed in find_partial_shifts(flat, fitting, form):
        if _is_distinctive(near.values[~changed]):
            best = _altered(replace(weight, parameter=near.source), changed, flat, near.values, near.source)
    for origin in chain(origins, _iter_origins(weight, array, fits, form, clock)):
        if origin:
            return origin
        if best is None or origin.difference < best.difference:
            best = origin
    if best is None:
        return replace(weight, reason="unlike any parameter or buffer of the model")
    return best


def _iter_origins(
    weight: AuditedWeight, array: Array, parameters: Arrays, form: FloatSpacing, clock: BudgetClock
) -> Iterator[AuditedWeight]:
    """Yield the origin of ``array`` for each of ``parameters`` that it resembles."""
    for parameter, values_of in parameters.items():
        clock.require_time()
        for arranged in iter_arrangements(values_of, array):
            origin = _compare_with_parameter(replace(weight, parameter=parameter), array, arranged, form)
            if origin is not None:
                yield origin


def _is_named_after(weight: AuditedWeight, parameter: str) -> bool:
    """Check whether the name of a weight is the name of a parameter, or this name with a suffix.

    Torch's exporter writes names such as "fc.weight.T_2". If a name is already used, it adds a number: "fc.weight_2".
    """
    before, _, number = weight.name.rpartition("_")
    return parameter in (weight.name, before if number.isdecimal() else "") or weight.name.startswith(f"{parameter}.")


def _is_distinctive(values_of: Array) -> bool:
    """Return whether equal numbers in two tensors indicate a common origin. Zeros, ones and repeated numbers do not."""
    telling = np.unique(values_of[np.isfinite(values_of)])
    return int((~np.isin(telling, (0.0, 1.0, -1.0))).sum()) >= ROW


def are_smoothing_factors(array: Array) -> bool:
    """Check whether all elements are positive numbers with three binary digits, and at least one element is not 1.

    `normdeploy.quantization.smoothing.smoothing_factors` makes such numbers.

    Returns:
        True for such an array.
    """
    wide = array.astype(np.float64)
    eighths = np.frexp(wide)[0] * 8
    return bool(((eighths > 0) & np.isfinite(wide) & (eighths == np.rint(eighths))).all() and (wide != 1).any())


def explain_smoothing(
    weight: AuditedWeight, array: Array, inverses: Sequence[Array], missing: Arrays
) -> AuditedWeight | None:
    """Explain a gamma that was divided by smoothing factors before quantization.

    Such a gamma is the model's gamma divided by smoothing factors, and rounded once. The file contains the factors too
    (`normdeploy.quantization.scale_migration`).

    Args:
        weight: record to complete.
        inverses: smoothing factors of all norms of the file. The factors of two norms may be equal in most elements, so
            the pair of gamma and factors with the fewest differences is used.
        missing: the model's tensors that the file does not hold unchanged.

    Returns:
        ``weight`` as folded or altered; None if no gamma and factors explain most of its elements.
    """
    least: tuple[int, AuditedWeight] | None = None
    for inverse in (v for v in inverses if v.size == array.size):
        for name, parameter in missing.items():
            if parameter.size != array.size:
                continue
            model = parameter.reshape(-1).astype(np.float64) / inverse.astype(np.float64)
            differs = model.astype(array.dtype) != array.reshape(-1)
            count = int(differs.sum())
            beside = replace(weight, parameter=name)
            told = f"{name} divided by the factors in its norm"
            if not count:
                return replace(beside, origin=WeightOrigin.FOLDED, reason=told)
            if count <= (1 - MOSTLY) * array.size and (least is None or count < least[0]):
                least = count, _altered(beside, differs, array.reshape(-1).astype(np.float64), model, told)
    if least is not None:
        return least[1]
    return None


def _compare_with_parameter(
    weight: AuditedWeight, stored: Array, parameter: Array, form: FloatSpacing
) -> AuditedWeight | None:
    """Return the origin of ``stored`` if it comes from ``parameter`` of the same shape; None if the two are not
    similar.
    """
    array = stored.astype(np.float64)
    # The model's exact numbers are used, because the file's type may not represent some of them.
    model = parameter.astype(np.float64)
    with np.errstate(all="ignore"):
        cast = parameter.astype(stored.dtype).astype(np.float64)
        away = np.nan_to_num(np.abs(array - cast), nan=np.inf, posinf=np.inf)
        same = (array == cast) | (np.isnan(array) & np.isnan(cast))
        away = np.where(same, 0.0, away)
    differs = away > 0
    # In a tensor that was computed again, many elements are rounded differently. If only a few elements differ, and by
    # several units of their type, they were altered, even if the type is coarse.
    few = bool(differs.mean() <= _FEW_ALTERED)
    if not mark_differences(array, model, np.abs(array), form, _IN_A_UNIT if few else None).any():
        return _with_origin(weight, WeightOrigin.FOLDED, away, f"{weight.parameter}, rounded otherwise")
    named = weight.name == weight.parameter
    closest: tuple[int, Array] | None = None
    for scale in _candidate_scales(array, model):
        scaled = scale * model
        apart = mark_differences(array, scaled, np.abs(array) + np.abs(scaled), form)
        if not apart.any() and not (few and (scale == 1).all()):
            reason = f"{weight.parameter} times a factor per channel"
            return _with_origin(weight, WeightOrigin.FOLDED, np.abs(array - scaled), reason)
        if closest is None or apart.sum() < closest[0]:
            closest = int(apart.sum()), scale

    def as_altered() -> AuditedWeight:
        reason = _describe_changed_elements(differs, array, model, weight.parameter)
        return _with_origin(weight, WeightOrigin.ALTERED, away, reason)

    if differs.mean() <= 0.5 and (named or _is_distinctive(model[~differs])):
        return as_altered()
    if closest is not None and closest[0] <= 0.25 * array.size:
        scaled = closest[1] * model
        apart = mark_differences(array, scaled, 2 * (np.abs(array) + np.abs(scaled)), form)
        # A channel with a single element is a multiple of any other, so the equal elements must be distinctive.
        if _is_distinctive((model / np.where(closest[1] == 0, 1, np.abs(closest[1])))[~apart]):
            return _altered(weight, apart, array, scaled, f"{weight.parameter} times a factor per channel")
    if (away <= NEAR * np.abs(model)).all() and (named or _is_distinctive(model)):
        return as_altered()
    return None


def _candidate_scales(array: Array, parameter: Array) -> Iterator[Array]:
    """Yield possible scales: one for the whole tensor, then for each axis one scale per position along the axis.

    Each scale is a median of ratios, which a few altered elements do not change.
    """
    with np.errstate(all="ignore"):
        ratios = np.where(parameter != 0, array / parameter, np.nan)
        ratios = np.where(np.isfinite(ratios), ratios, np.nan)
    if np.isnan(ratios).all() or array.size < ROW:
        return
    yield _nan_median(ratios, tuple(range(array.ndim)))
    for axis, size in enumerate(array.shape):
        others = tuple(i for i in range(array.ndim) if i != axis)
        if size > 1 and array.size // size >= ROW:
            # Only large elements are used. Small elements of a channel may be subnormal, and their ratios are
            # inaccurate.
            large = np.abs(parameter) >= _nan_median(np.abs(parameter), others)
            telling = np.where(large, ratios, np.nan)
            # A channel of zeros gets the scale 1.
            filled = np.where(np.isnan(telling).all(others, keepdims=True), 1.0, telling)
            yield _nan_median(filled, others)


def _nan_median(array: Array, axes: tuple[int, ...]) -> Array:
    """Compute np.nanmedian over ``axes``, which keep size one. (numpy's implementation is slow: it loops in Python.)"""
    kept = tuple(i for i in range(array.ndim) if i not in axes)
    shape = tuple(1 if i in axes else size for i, size in enumerate(array.shape))
    # NaN sorts to the end.
    lines = np.sort(array.transpose(*kept, *axes).reshape(prod(shape), -1), axis=-1)
    numbers = np.maximum((~np.isnan(lines)).sum(-1, keepdims=True), 1)
    low = np.take_along_axis(lines, (numbers - 1) // 2, -1)
    high = np.take_along_axis(lines, numbers // 2, -1)
    # The sum is halved, as in numpy. If the two numbers are equal, they are returned without a sum, which may overflow.
    return np.where(low == high, low, (low + high) / 2).reshape(shape)


def _with_origin(weight: AuditedWeight, origin: WeightOrigin, away: Array, reason: str) -> AuditedWeight:
    return replace(weight, origin=origin, difference=float(away.max(initial=0.0)), reason=reason)


def _altered(weight: AuditedWeight, differs: Array, array: Array, expected: Array, name: str) -> AuditedWeight:
    """Return ``weight`` as altered in the elements that differ from ``name``."""
    reason = _describe_changed_elements(differs, array, expected, name)
    return _with_origin(weight, WeightOrigin.ALTERED, np.abs(array - expected), reason)


def _describe_changed_elements(differs: Array, array: Array, expected: Array, name: str) -> str:
    with np.errstate(all="ignore"):
        away = np.where(differs, np.abs(array - expected), -1.0)
    place = tuple(int(i) for i in np.unravel_index(int(np.nan_to_num(away, nan=np.inf).argmax()), array.shape))
    if place:
        numbers = f"{array[place]:.9g} at {list(place)}, but the model has {expected[place]:.9g}"
    else:
        numbers = f"{array[()]:.9g}"
    return f"{int(differs.sum())} of {prod(array.shape)} elements differ from {name}: {numbers}"
