"""Where a weight of a file comes from that is none of the model's tensors as they stand: other numbers, compared with
each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from math import prod

import numpy as np

from ...types import Array, Arrays
from .bias_shifts import Shifts, find_partial_shifts, find_shift
from .compute_budget import BudgetClock
from .derived_tensors import FloatSpacing, mark_differences
from .parameter_orders import iter_arrangements
from .row_matching import MOSTLY, NEAR, ROW

# of the elements of a tensor
_FEW_ALTERED = 0.25
# roundings: half a unit in the last place each
_IN_A_UNIT = 2


class WeightOrigin(StrEnum):
    FOLDED = "folded"
    COMPUTED = "computed"
    ALTERED = "altered"


@dataclass(frozen=True)
class AuditedWeight:
    """An initializer that is no tensor of the model as it stands; false where it must be one.

    ``parameter``: the model's tensor that it comes nearest to, "" where it is like none; ``difference``: the largest
    |file − model| from it, from its scaled form where it is folded. ``elements``: how many it has. ``reason`` is for
    people.
    """

    file: str
    name: str
    module: str
    origin: WeightOrigin
    parameter: str = ""
    difference: float = 0.0
    reason: str = ""
    elements: int = 0

    def __bool__(self) -> bool:
        return self.origin is not WeightOrigin.ALTERED


def find_origin(
    weight: AuditedWeight,
    array: Array,
    missing: Arrays,
    shifts: Mapping[int, Sequence[Shifts]],
    clock: BudgetClock,
) -> AuditedWeight:
    """Compare ``array`` with the tensors of ``missing``, those of the model that the file has nowhere as they are."""
    form = FloatSpacing.of_dtype(array.dtype)
    flat = array.astype(np.float64).reshape(-1)
    fitting = shifts.get(flat.size, ())
    if shift := find_shift(flat, fitting, form):
        made = replace(weight, parameter=shift.source)
        return _with_origin(made, WeightOrigin.FOLDED, np.abs(flat - shift.values), f"made of {shift.source}")
    fits = {name: values_of for name, values_of in missing.items() if values_of.size == array.size}
    # The parameter of the weight's own name first: where that explains it, no other is asked.
    named = {name: fits.pop(name) for name in [*fits] if _is_named_after(weight, name)}
    origins = list[AuditedWeight]()
    for origin in _iter_origins(weight, array, named, form, clock):
        # Two parameters that explain a weight are multiples of one another, so the first is as good.
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
        return replace(weight, reason="like no parameter or buffer of the model")
    return best


def _iter_origins(
    weight: AuditedWeight, array: Array, parameters: Arrays, form: FloatSpacing, clock: BudgetClock
) -> Iterator[AuditedWeight]:
    """Say what ``array`` is beside each of ``parameters`` that it is like."""
    for parameter, values_of in parameters.items():
        clock.require_time()
        for arranged in iter_arrangements(values_of, array):
            origin = _compare_with_parameter(replace(weight, parameter=parameter), array, arranged, form)
            if origin is not None:
                yield origin


def _is_named_after(weight: AuditedWeight, parameter: str) -> bool:
    """Decide whether a weight has the name of a parameter, or that with an ending.

    Torch's exporter writes "fc.weight.T_2", and a name that is taken gets a number: "fc.weight_2".
    """
    before, _, number = weight.name.rpartition("_")
    return parameter in (weight.name, before if number.isdecimal() else "") or weight.name.startswith(f"{parameter}.")


def _is_distinctive(values_of: Array) -> bool:
    """Decide whether numbers that two tensors share speak for a common origin: zeros, ones and repeats do not."""
    telling = np.unique(values_of[np.isfinite(values_of)])
    return int((~np.isin(telling, (0.0, 1.0, -1.0))).sum()) >= ROW


def are_smoothing_factors(array: Array) -> bool:
    """Whether all elements are positive numbers of three binary digits, not all of them one
    (`normdeploy.quantization.smoothing.smoothing_factors`)."""
    wide = array.astype(np.float64)
    eighths = np.frexp(wide)[0] * 8
    return bool(((eighths > 0) & np.isfinite(wide) & (eighths == np.rint(eighths))).all() and (wide != 1).any())


def explain_smoothing(
    weight: AuditedWeight, array: Array, inverses: Sequence[Array], missing: Arrays
) -> AuditedWeight | None:
    """A gamma whose norm was divided by factors before it was quantized (`normdeploy.quantization.scale_migration`):
    it is the
    model's own over what the norm is written with, rounded once. ``inverses`` are what all norms of the file are
    written with, which may be alike in most places, so the pair that differs least decides."""
    least: tuple[int, AuditedWeight] | None = None
    for inverse in (v for v in inverses if v.size == array.size):
        for name, parameter in missing.items():
            if parameter.size != array.size:
                continue
            model = parameter.reshape(-1).astype(np.float64) / inverse.astype(np.float64)
            differs = model.astype(array.dtype) != array.reshape(-1)
            count = int(differs.sum())
            beside = replace(weight, parameter=name)
            told = f"{name} over what its norm is written with"
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
    """Say what ``stored`` is if it comes from ``parameter``, of its shape; None where it is like nothing of it."""
    array = stored.astype(np.float64)
    # The model's numbers as they are, since the file's type may hold some of them not at all.
    model = parameter.astype(np.float64)
    with np.errstate(all="ignore"):
        cast = parameter.astype(stored.dtype).astype(np.float64)
        away = np.nan_to_num(np.abs(array - cast), nan=np.inf, posinf=np.inf)
        same = (array == cast) | (np.isnan(array) & np.isnan(cast))
        away = np.where(same, 0.0, away)
    differs = away > 0
    # Of a tensor that was computed anew many elements are rounded otherwise. Where few differ, and by several units of
    # their type, these were altered, however coarse the type is.
    few = bool(differs.mean() <= _FEW_ALTERED)
    if not mark_differences(array, model, np.abs(array), form, _IN_A_UNIT if few else None).any():
        return _with_origin(weight, WeightOrigin.FOLDED, away, f"{weight.parameter}, rounded otherwise")
    named = weight.name == weight.parameter
    closest: tuple[int, Array] | None = None
    for scale in _candidate_scales(array, model):
        scaled = scale * model
        apart = mark_differences(array, scaled, np.abs(array) + np.abs(scaled), form)
        if not apart.any() and not (few and (scale == 1).all()):
            reason = f"{weight.parameter} times a number for each channel"
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
        # A channel of one number is a multiple of any other.
        if _is_distinctive((model / np.where(closest[1] == 0, 1, np.abs(closest[1])))[~apart]):
            return _altered(weight, apart, array, scaled, f"{weight.parameter} times a number for each channel")
    if (away <= NEAR * np.abs(model)).all() and (named or _is_distinctive(model)):
        return as_altered()
    return None


def _candidate_scales(array: Array, parameter: Array) -> Iterator[Array]:
    """One number for all, for each place along each axis: the median of the ratios, which few altered elements do not
    move."""
    with np.errstate(all="ignore"):
        ratios = np.where(parameter != 0, array / parameter, np.nan)
        ratios = np.where(np.isfinite(ratios), ratios, np.nan)
    if np.isnan(ratios).all() or array.size < ROW:
        return
    yield _nan_median(ratios, tuple(range(array.ndim)))
    for axis, size in enumerate(array.shape):
        others = tuple(i for i in range(array.ndim) if i != axis)
        if size > 1 and array.size // size >= ROW:
            # Small elements of a channel may be subnormal, and their ratios have no digits.
            large = np.abs(parameter) >= _nan_median(np.abs(parameter), others)
            telling = np.where(large, ratios, np.nan)
            # a channel of zeros
            filled = np.where(np.isnan(telling).all(others, keepdims=True), 1.0, telling)
            yield _nan_median(filled, others)


def _nan_median(array: Array, axes: tuple[int, ...]) -> Array:
    """Compute np.nanmedian over ``axes``, which are kept as ones; numpy's own walks through the slices one by one."""
    kept = tuple(i for i in range(array.ndim) if i not in axes)
    shape = tuple(1 if i in axes else size for i, size in enumerate(array.shape))
    # NaN is sorted to the end.
    lines = np.sort(array.transpose(*kept, *axes).reshape(prod(shape), -1), axis=-1)
    numbers = np.maximum((~np.isnan(lines)).sum(-1, keepdims=True), 1)
    low = np.take_along_axis(lines, (numbers - 1) // 2, -1)
    high = np.take_along_axis(lines, numbers // 2, -1)
    # Halved after the sum, as numpy does; twice the same number is that number, infinite or not.
    return np.where(low == high, low, (low + high) / 2).reshape(shape)


def _with_origin(weight: AuditedWeight, origin: WeightOrigin, away: Array, reason: str) -> AuditedWeight:
    return replace(weight, origin=origin, difference=float(away.max(initial=0.0)), reason=reason)


def _altered(weight: AuditedWeight, differs: Array, array: Array, expected: Array, name: str) -> AuditedWeight:
    """Say that the elements that differ were altered, of what should be ``name``."""
    reason = _describe_changed_elements(differs, array, expected, name)
    return _with_origin(weight, WeightOrigin.ALTERED, np.abs(array - expected), reason)


def _describe_changed_elements(differs: Array, array: Array, expected: Array, name: str) -> str:
    with np.errstate(all="ignore"):
        away = np.where(differs, np.abs(array - expected), -1.0)
    place = tuple(int(i) for i in np.unravel_index(int(np.nan_to_num(away, nan=np.inf).argmax()), array.shape))
    if place:
        numbers = f"{array[place]:.9g} at {list(place)} where the model has {expected[place]:.9g}"
    else:
        numbers = f"{array[()]:.9g}"
    return f"{int(differs.sum())} of {prod(array.shape)} elements are not those of {name}: {numbers}"
