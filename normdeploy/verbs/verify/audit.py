"""Compares a file's weights with the model's: each floating initializer with the parameters, buffers and constants.

A weight is the model's where it is bit for bit one of its tensors, cast to the file's type, in another shape or with
its dims in another order, or is put together from whole rows of such tensors (slices, packed and reordered gates). What
is not is one of these:

- folded: a tensor of the model times one number for each channel, up to rounding; or a shift that a BatchNorm makes of
  a bias.
- altered: next to a tensor of the model that the file has nowhere else, with some elements changed or all of them by a
  little. It fails.
- computed: like nothing in the model, as the constants are that an exporter computes; or whole tensors of the model
  beside such numbers (``torch.cdist`` packs a codebook, its squares and ones into one).

A comparison of outputs does not see one weight off by 1e-4 among thousands; this does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import onnx

from ...evaluate.core import is_quantized_type
from ...graphs.protos import module
from ...graphs.qoperators import opened
from ...graphs.quantized import is_quantized, steps
from ...model import Model
from ...precision.retype import values
from .arranged import arrangements
from .codes import audit_codes
from .constant_nodes import constant_results, is_rounding_of
from .derived import Format, derivation, outside
from .merged import merged
from .originals import FileModel, Original
from .rows import MOSTLY, NEAR, ROW, Rows, squeezed
from .shifts import FixedShift, Shift, Shifts, by_size, find, find_most
from .spending import Clock, OutOfTime
from .stored import initializers, shifts_of, stored_in

Array = np.ndarray[Any, Any]
_FEW_ALTERED = 0.25  # of the elements of a tensor
_IN_A_UNIT = 2  # roundings: half a unit in the last place each


class Origin(StrEnum):
    FOLDED = "folded"
    COMPUTED = "computed"
    ALTERED = "altered"


@dataclass(frozen=True)
class Weight:
    """An initializer that is no tensor of the model as it stands; false where it must be one.

    ``parameter``: the model's tensor that it comes nearest to, "" where it is like none; ``difference``: the largest
    |file − model| from it, from its scaled form where it is folded. ``elements``: how many it has. ``reason`` is for
    people.
    """

    file: str
    name: str
    module: str
    origin: Origin
    parameter: str = ""
    difference: float = 0.0
    reason: str = ""
    elements: int = 0

    def __bool__(self) -> bool:
        return self.origin is not Origin.ALTERED


def audit(model: Original, proto: onnx.ModelProto, label: str, clock: Clock | None = None) -> list[Weight]:
    """Every floating initializer of ``proto`` (its weights loaded) that is no tensor of ``model``; those altered
    first.

    What is no tensor of the model as it stands is traced to one until ``clock``, if any, is over.
    """
    clock = Clock(float("inf")) if clock is None else clock
    untraced = 0
    stored = stored_in(model)
    rows = Rows(stored.values())
    equals = _Equals(stored)
    unknown: list[tuple[onnx.TensorProto, Array, float]] = []
    arranged: list[tuple[onnx.TensorProto, Array]] = []
    placed, apart = set[str](), steps(proto) | steps(opened(proto))  # the error budget judges the steps
    for tensor in initializers(proto.graph):
        array = values(tensor)
        if tensor.name in apart or not array.size or array.dtype.kind in "iubSOc" or is_quantized_type(array.dtype):
            continue
        same = equals.names(array)
        placed.update(same)
        if same:
            continue
        if clock.is_over():
            untraced += 1
            continue
        share = rows.share(array)
        if share < 1:
            unknown.append((tensor, array, share))
        else:
            arranged.append((tensor, array))
    missing = {name: value for name, value in stored.items() if name not in placed}
    every = list(shifts_of(model, stored))
    if not isinstance(model, FileModel):
        every += [
            FixedShift(Shift(source, w.reshape(-1), size.reshape(-1))) for source, w, size in merged(model, stored)
        ]
    shifts = by_size(every)
    modules = _modules(proto, stored)
    inverses = [a.reshape(-1) for _, a, _ in unknown if is_quantized(proto) and _are_factors(a)]
    remarks = []
    for tensor, array in arranged:
        for name, count in _moved(array, missing):
            reason = f"{count} of its rows stand elsewhere than in {name}"
            remarks.append(
                Weight(label, tensor.name, modules.get(tensor.name, ""), Origin.ALTERED, name, 0.0, reason, array.size)
            )
    constants: list[tuple[str, Array]] | None = None
    for place, (tensor, array, share) in enumerate(unknown):
        weight = Weight(label, tensor.name, modules.get(tensor.name, ""), Origin.COMPUTED, elements=array.size)
        try:
            clock.require_time()
            smoothed = _smoothed(weight, array, inverses, missing)
            weight = _origin(weight, array, missing, shifts, clock) if smoothed is None else smoothed
            if weight.origin is Origin.COMPUTED and share >= MOSTLY and rows.lacks(array, missing.values()):
                parameter = f"{share:.1%} of it is put together from rows of the model's tensors, the rest is not"
                weight = replace(weight, origin=Origin.ALTERED, reason=parameter)
            if weight.origin is Origin.ALTERED and smoothed is None:
                weight = _explained(weight, array, stored, rows, clock)
        except OutOfTime:
            # An accusation that time did not suffice to take back is none.
            untraced += len(unknown) - place
            break
        if weight.origin is Origin.ALTERED and isinstance(model, Model):
            constants = list(constant_results(model)) if constants is None else constants
            weight = _computed_by_model(weight, array, constants)
        remarks.append(weight)
    for name, elements, parameter, code in audit_codes(stored, proto, clock):
        remarks.append(
            Weight(
                label,
                name,
                modules.get(name, ""),
                Origin.ALTERED,
                parameter,
                abs(code.value - code.expected),
                f"{code.count} of {elements} codes are not those of {parameter}, rounded: {code.value:.4g} at"
                f" {list(code.place)} where the model has {code.expected:.4g}, {code.steps:.3g} steps away",
                elements,
            )
        )
    if untraced:
        clock.weights[label] = untraced
    return sorted(remarks, key=bool)


def _moved(array: Array, missing: Mapping[str, Array]) -> Iterator[tuple[str, int]]:
    """The first parameter of which most rows stand where they should and the others do not, with their number.

    Gates in another order move more than half of their rows.
    """
    for name, parameter in missing.items():
        if parameter.size != array.size or len(squeezed(array.shape)) < 2:
            continue
        for candidate in arrangements(_cast(parameter, array.dtype), array):
            count = Rows.moved(array, candidate)
            if count:
                yield name, count
                return


def _computed_by_model(weight: Weight, array: Array, constants: Sequence[tuple[str, Array]]) -> Weight:
    """Take an accusation back where the model itself computes the weight from its parameters."""
    for name, computed in constants:
        if computed.size == array.size and any(is_rounding_of(array, c) for c in arrangements(computed, array)):
            return replace(weight, origin=Origin.FOLDED, parameter=name, difference=0.0, reason=f"computed by {name}")
    return weight


def _explained(weight: Weight, array: Array, stored: Mapping[str, Array], rows: Rows, clock: Clock) -> Weight:
    """Take an accusation back where an exporter or optimizer may have computed the weight from the model's tensors."""
    name = derivation(array.astype(np.float64), stored, Format.of(array.dtype), clock.require_time)
    if not name and rows.scaled(array, clock.require_time):
        name = "rows of the model's tensors, each times a number"
    if not name:
        return weight
    return replace(weight, origin=Origin.FOLDED, parameter=name, difference=0.0, reason=f"made of {name}")


def _modules(proto: onnx.ModelProto, stored: Mapping[str, Array]) -> dict[str, str]:
    """Initializer -> the module that it belongs to: by its name, else by the first node that takes it."""
    owners = {name.rpartition(".")[0] for name in stored} - {""}
    modules: dict[str, str] = {}
    for node in proto.graph.node:
        for name in node.input:
            owner = name.rpartition(".")[0]
            modules.setdefault(name, owner if owner in owners else module(node))
    return modules


# ------------------------------------------------------------------ the same numbers


def _cast(parameter: Array, dtype: Any) -> Array:
    with np.errstate(over="ignore"):
        return parameter.astype(dtype)


_Key = tuple[int, bytes, int]


class _Equals:
    """The model's tensors by what no order of their dims changes, so that many weights take no time of their square."""

    def __init__(self, stored: Mapping[str, Array]) -> None:
        self._stored = stored
        self._by_key: dict[np.dtype[Any], dict[_Key, list[str]]] = {}
        self._repeated: dict[tuple[np.dtype[Any], tuple[int, ...], bytes], list[str]] = {}

    def names(self, array: Array) -> list[str]:
        """Return the tensors that ``array`` is bit for bit, in any order of dims; [the first] for a repeated array."""
        # The types of ml_dtypes give no buffer of their own.
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        content = array.dtype, array.shape, hashlib.sha256(raw.data).digest()
        if content in self._repeated:
            return self._repeated[content][:1]
        if array.dtype not in self._by_key:
            index: dict[_Key, list[str]] = {}
            for name, tensor in self._stored.items():
                index.setdefault(_key(_cast(tensor, array.dtype)), []).append(name)
            self._by_key[array.dtype] = index
        alike = self._by_key[array.dtype].get(_key(array), [])
        found = [
            n for n in alike if any(_equal(b, array) for b in arrangements(_cast(self._stored[n], array.dtype), array))
        ]
        self._repeated[content] = found
        return found


def _key(array: Array) -> _Key:
    """Return the size, the first and last element, and the sum of all bits."""
    flat = np.ascontiguousarray(array).reshape(-1)
    bits = flat.view(f"u{flat.dtype.itemsize}")
    return flat.size, flat[[0, -1]].tobytes() if flat.size else b"", int(bits.sum(dtype=np.uint64))


def _equal(one: Array, other: Array) -> bool:
    return np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


# ------------------------------------------------------------------ other numbers


def _origin(
    weight: Weight,
    array: Array,
    missing: Mapping[str, Array],
    shifts: Mapping[int, Sequence[Shifts]],
    clock: Clock,
) -> Weight:
    """Compare ``array`` with the tensors of ``missing``, those of the model that the file has nowhere as they are."""
    form = Format.of(array.dtype)
    flat = array.astype(np.float64).reshape(-1)
    fitting = shifts.get(flat.size, ())
    if shift := find(flat, fitting, form):
        made = replace(weight, parameter=shift.source)
        return _told(made, Origin.FOLDED, np.abs(flat - shift.values), f"made of {shift.source}")
    fits = {name: values_of for name, values_of in missing.items() if values_of.size == array.size}
    # The parameter of the weight's own name first: where that explains it, no other is asked.
    named = {name: fits.pop(name) for name in [*fits] if _is_named_after(weight, name)}
    origins = list[Weight]()
    for origin in _origins(weight, array, named, form, clock):
        # Two parameters that explain a weight are multiples of one another, so the first is as good.
        if origin:
            return origin
        origins.append(origin)
    best: Weight | None = None
    for near, changed in find_most(flat, fitting, form):
        if _tells(near.values[~changed]):
            reason = _changed(changed, flat, near.values, near.source)
            away = np.abs(flat - near.values)
            best = _told(replace(weight, parameter=near.source), Origin.ALTERED, away, reason)
    for origin in chain(origins, _origins(weight, array, fits, form, clock)):
        if origin:
            return origin
        if best is None or origin.difference < best.difference:
            best = origin
    if best is None:
        return replace(weight, reason="like no parameter or buffer of the model")
    return best


def _origins(
    weight: Weight, array: Array, parameters: Mapping[str, Array], form: Format, clock: Clock
) -> Iterator[Weight]:
    """Say what ``array`` is beside each of ``parameters`` that it is like."""
    for parameter, values_of in parameters.items():
        clock.require_time()
        for arranged in arrangements(values_of, array):
            origin = _beside(replace(weight, parameter=parameter), array, arranged, form)
            if origin is not None:
                yield origin


def _is_named_after(weight: Weight, parameter: str) -> bool:
    """Decide whether a weight has the name of a parameter, or that with an ending.

    Torch's exporter writes "fc.weight.T_2", and a name that is taken gets a number: "fc.weight_2".
    """
    before, _, number = weight.name.rpartition("_")
    return parameter in (weight.name, before if number.isdecimal() else "") or weight.name.startswith(f"{parameter}.")


def _tells(values_of: Array) -> bool:
    """Decide whether numbers that two tensors share speak for a common origin: zeros, ones and repeats do not."""
    telling = np.unique(values_of[np.isfinite(values_of)])
    return int((~np.isin(telling, (0.0, 1.0, -1.0))).sum()) >= ROW


def _are_factors(array: Array) -> bool:
    """Whether all elements are positive numbers of three binary digits, not all of them one
    (`normdeploy.quantization.conditions.factors`)."""
    wide = array.astype(np.float64)
    eighths = np.frexp(wide)[0] * 8
    return bool(((eighths > 0) & np.isfinite(wide) & (eighths == np.rint(eighths))).all() and (wide != 1).any())


def _smoothed(weight: Weight, array: Array, inverses: Sequence[Array], missing: Mapping[str, Array]) -> Weight | None:
    """A gamma whose norm was divided by factors before it was quantized (`normdeploy.quantization.migrate`): it is the
    model's own over what the norm is written with, rounded once. ``inverses`` are what all norms of the file are
    written with, which may be alike in most places, so the pair that differs least decides."""
    least: tuple[int, Weight] | None = None
    for inverse in (v for v in inverses if v.size == array.size):
        for name, parameter in missing.items():
            if parameter.size != array.size:
                continue
            model = parameter.reshape(-1).astype(np.float64) / inverse.astype(np.float64)
            differs = model.astype(array.dtype) != array.reshape(-1)
            count, beside = int(differs.sum()), replace(weight, parameter=name)
            told = f"{name} over what its norm is written with"
            if not count:
                return replace(beside, origin=Origin.FOLDED, reason=told)
            if count <= (1 - MOSTLY) * array.size and (least is None or count < least[0]):
                wide = array.reshape(-1).astype(np.float64)
                reason = _changed(differs, wide, model, told)
                least = count, _told(beside, Origin.ALTERED, np.abs(wide - model), reason)
    return least[1] if least is not None else None


def _beside(weight: Weight, stored: Array, parameter: Array, form: Format) -> Weight | None:
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
    if not outside(array, model, np.abs(array), form, _IN_A_UNIT if few else None).any():
        return _told(weight, Origin.FOLDED, away, f"{weight.parameter}, rounded otherwise")
    named = weight.name == weight.parameter
    closest: tuple[int, Array] | None = None
    for scale in _scales(array, model):
        scaled = scale * model
        apart = outside(array, scaled, np.abs(array) + np.abs(scaled), form)
        if not apart.any() and not (few and (scale == 1).all()):
            reason = f"{weight.parameter} times a number for each channel"
            return _told(weight, Origin.FOLDED, np.abs(array - scaled), reason)
        if closest is None or apart.sum() < closest[0]:
            closest = int(apart.sum()), scale
    if differs.mean() <= 0.5 and (named or _tells(model[~differs])):
        return _told(weight, Origin.ALTERED, away, _changed(differs, array, model, weight.parameter))
    if closest is not None and closest[0] <= 0.25 * array.size:
        scaled = closest[1] * model
        apart = outside(array, scaled, 2 * (np.abs(array) + np.abs(scaled)), form)
        # A channel of one number is a multiple of any other.
        if _tells((model / np.where(closest[1] == 0, 1, np.abs(closest[1])))[~apart]):
            name = f"{weight.parameter} times a number for each channel"
            return _told(weight, Origin.ALTERED, np.abs(array - scaled), _changed(apart, array, scaled, name))
    if (away <= NEAR * np.abs(model)).all() and (named or _tells(model)):
        return _told(weight, Origin.ALTERED, away, _changed(differs, array, model, weight.parameter))
    return None


def _scales(array: Array, parameter: Array) -> Iterator[Array]:
    """One number for all, for each place along each axis: the median of the ratios, which few altered elements do not
    move."""
    with np.errstate(all="ignore"):
        ratios = np.where(parameter != 0, array / parameter, np.nan)
        ratios = np.where(np.isfinite(ratios), ratios, np.nan)
    if np.isnan(ratios).all() or array.size < ROW:
        return
    yield _median(ratios, tuple(range(array.ndim)))
    for axis, size in enumerate(array.shape):
        others = tuple(i for i in range(array.ndim) if i != axis)
        if size > 1 and array.size // size >= ROW:
            # Small elements of a channel may be subnormal, and their ratios have no digits.
            large = np.abs(parameter) >= _median(np.abs(parameter), others)
            telling = np.where(large, ratios, np.nan)
            filled = np.where(np.isnan(telling).all(others, keepdims=True), 1.0, telling)  # a channel of zeros
            yield _median(filled, others)


def _median(array: Array, axes: tuple[int, ...]) -> Array:
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


def _told(weight: Weight, origin: Origin, away: Array, reason: str) -> Weight:
    return replace(weight, origin=origin, difference=float(away.max(initial=0.0)), reason=reason)


def _changed(differs: Array, array: Array, expected: Array, name: str) -> str:
    with np.errstate(all="ignore"):
        away = np.where(differs, np.abs(array - expected), -1.0)
    place = tuple(int(i) for i in np.unravel_index(int(np.nan_to_num(away, nan=np.inf).argmax()), array.shape))
    numbers = (
        f"{array[place]:.9g} at {list(place)} where the model has {expected[place]:.9g}"
        if place
        else f"{array[()]:.9g}"
    )
    return f"{int(differs.sum())} of {prod(array.shape)} elements are not those of {name}: {numbers}"
