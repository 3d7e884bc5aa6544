"""Compares a file's weights with the model's: each floating initializer with the parameters, buffers and constants
(issue F).

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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import permutations
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from ...evaluate.core import is_quantized_type
from ...graphs.protos import module
from ...graphs.quantized import is_quantized, steps
from ...precision.retype import values
from .merged import merged
from .originals import FileModel, Original
from .stored import initializers, shifts_of, stored_in

Array = np.ndarray[Any, Any]

_NEAR = 1e-2  # relative; two parameters that training has drawn apart are farther from each other in some element
_ROUNDINGS = 8  # units of roundoff: of a product or two, and of their factors
_ROW = 4  # elements, at least, that tell a row from others


_LOOKED_AT = 64  # rows of nobody's beside each row of a table
_MOSTLY = 0.5  # of a weight put together from the model's rows: what else it holds was changed


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


def audit(model: Original, proto: onnx.ModelProto, label: str) -> list[Weight]:
    """Every floating initializer of ``proto`` (its weights loaded) that is no tensor of ``model``; those altered
    first."""
    stored = stored_in(model)
    rows = _Rows(stored.values())
    unknown: list[tuple[onnx.TensorProto, Array, float]] = []
    placed, apart = set[str](), steps(proto)  # the error budget judges the steps
    for tensor in initializers(proto.graph):
        array = values(tensor)
        if tensor.name in apart or not array.size or array.dtype.kind in "iubSOc" or is_quantized_type(array.dtype):
            continue
        same = [
            name
            for name, p in stored.items()
            if _may_equal(p, array) and any(_equal(b, array) for b in _arranged(p, array))
        ]
        placed.update(same)
        if not same and (share := rows.share(array)) < 1:
            unknown.append((tensor, array, share))
    missing = {name: value for name, value in stored.items() if name not in placed}
    shifts = list(shifts_of(model, stored))
    if not isinstance(model, FileModel):
        shifts += [(parameter, w.reshape(-1), size.reshape(-1)) for parameter, w, size in merged(model, stored)]
    modules = _modules(proto, stored)
    inverses = [a.reshape(-1) for _, a, _ in unknown if is_quantized(proto) and _are_factors(a)]
    remarks = []
    for tensor, array, share in unknown:
        weight = Weight(label, tensor.name, modules.get(tensor.name, ""), Origin.COMPUTED, elements=array.size)
        smoothed = _smoothed(weight, array, inverses, missing)
        weight = _origin(weight, array, missing, shifts) if smoothed is None else smoothed
        if weight.origin is Origin.COMPUTED and share >= _MOSTLY and rows.lacks(array, missing.values()):
            parameter = f"{share:.1%} of it is put together from rows of the model's tensors, the rest is not"
            weight = replace(weight, origin=Origin.ALTERED, reason=parameter)
        remarks.append(weight)
    return sorted(remarks, key=bool)


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


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _arranged(parameter: Array, like: Array) -> Iterator[Array]:
    """``parameter``, of as many elements, in the shape and type of ``like``: as it lies, and with its dims in every
    fitting order."""
    with np.errstate(over="ignore"):
        cast = parameter.astype(like.dtype)
    yield cast.reshape(like.shape)
    small = cast.reshape(_squeezed(cast.shape))
    if 2 <= small.ndim <= 4:
        for order in permutations(range(small.ndim)):
            if order != tuple(range(small.ndim)) and tuple(small.shape[i] for i in order) == _squeezed(like.shape):
                yield small.transpose(order).reshape(like.shape)


def _may_equal(parameter: Array, array: Array) -> bool:
    """Whatever the order of the dims, the first element stays the first and the last the last."""
    if parameter.size != array.size:
        return False
    with np.errstate(over="ignore"):
        return _equal(parameter.reshape(-1)[[0, -1]].astype(array.dtype), array.reshape(-1)[[0, -1]])


def _equal(one: Array, other: Array) -> bool:
    return np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


class _Rows:
    """Which arrays are put together from rows of others, a row being a line along any axis."""

    def __init__(self, parameters: Iterable[Array]) -> None:
        self._parameters = list(parameters)
        self._known: dict[tuple[int, str], set[bytes]] = {}

    def share(self, array: Array) -> float:
        """How much of it is put together so, along the axis along which it is most; rows of one number count for
        nothing."""
        if len(_squeezed(array.shape)) < 2:
            vector = np.ascontiguousarray(array.reshape(-1))
            one = vector.size >= _ROW and vector.tobytes() in self._of(
                vector.size, vector.dtype
            )  # the row of an embedding
            return 1.0 if one else self._runs(vector)
        return max((self._along(array, axis) for axis, size in enumerate(array.shape) if size >= _ROW), default=0.0)

    def lacks(self, array: Array, parameters: Iterable[Array]) -> bool:
        """Whether rows of one of ``parameters``, matrices and more, could have stood where ``array`` has others of
        nobody, and as many.

        Where ``array`` holds but a part of a table: whether a row of nobody's is close to one of the others.
        """
        if len(_squeezed(array.shape)) < 2:
            return True
        with np.errstate(over="ignore"):
            matrices = [p.astype(array.dtype) for p in parameters if len(_squeezed(p.shape)) > 1]
        for axis, size in enumerate(array.shape):
            lines = {line.tobytes() for line in _lines(array, axis)}
            foreign = lines - self._of(size, array.dtype)
            for matrix in matrices:
                for along in (i for i, length in enumerate(matrix.shape) if length == size >= _ROW):
                    absent = {line.tobytes() for line in _lines(matrix, along)} - lines
                    if 0 < len(absent) <= len(foreign) or _close(foreign, absent, array.dtype):
                        return True
        return False

    def _along(self, array: Array, axis: int) -> float:
        lines = _lines(array, axis)
        told = lines[(lines != lines[:, :1]).any(-1)]
        known = self._of(array.shape[axis], array.dtype)
        return sum(line.tobytes() in known for line in told) / len(told) if len(told) else 0.0

    def _of(self, length: int, dtype: Any) -> set[bytes]:
        key = (length, str(dtype))
        if key not in self._known:
            fitting = [(p, axis) for p in self._parameters for axis, size in enumerate(p.shape) if size == length]
            with np.errstate(over="ignore"):
                self._known[key] = {row.tobytes() for p, axis in fitting for row in _lines(p.astype(dtype), axis)}
        return self._known[key]

    def _runs(self, vector: Array) -> float:
        """How much of it is parts of vectors, each of some elements, one behind the other."""
        at = length = 0
        vectors = [
            p.reshape(-1) for p in self._parameters if len(_squeezed(p.shape)) == 1 and p.size <= 16 * vector.size
        ]
        with np.errstate(over="ignore"):
            vectors = [v.astype(vector.dtype) for v in vectors]
        while at < vector.size and vectors:
            longest = max(_run(vector[at:], v) for v in vectors)
            length += longest if longest >= _ROW else 0
            at += longest if longest >= _ROW else 1
        return length / vector.size


def _close(some: set[bytes], others: set[bytes], dtype: Any) -> bool:
    """Whether one of ``some`` rows (the first `_LOOKED_AT`) has more than half of its elements from one of the
    others."""
    if not others:
        return False
    table = np.stack([np.frombuffer(row, dtype) for row in others])
    return any((table == np.frombuffer(row, dtype)).mean(-1).max() > _MOSTLY for row in sorted(some)[:_LOOKED_AT])


def _run(vector: Array, other: Array) -> int:
    """How many elements of the beginning of ``vector`` stand in ``other``, in their order."""
    longest = 0
    for start in np.flatnonzero(other == vector[0]):
        length = min(len(vector), len(other) - int(start))
        differs = np.flatnonzero(vector[:length] != other[start : start + length])
        longest = max(longest, int(differs[0]) if differs.size else length)
    return longest


def _lines(array: Array, axis: int) -> Array:
    return np.ascontiguousarray(np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis]))


# ------------------------------------------------------------------ other numbers


def _origin(
    weight: Weight, array: Array, missing: Mapping[str, Array], shifts: Sequence[tuple[str, Array, Array]]
) -> Weight:
    """``weight`` with what it is and beside which tensor of ``missing``, those of the model that the file has nowhere
    as they are."""
    unit = float(ml_dtypes.finfo(array.dtype).eps) / 2
    wide = array.astype(np.float64)
    best: Weight | None = None
    for source, shift, size in (s for s in shifts if s[1].size == wide.size):
        away = np.abs(wide.reshape(-1) - shift)
        outside = away > _ROUNDINGS * unit * size
        if not outside.any():
            return _told(replace(weight, parameter=source), Origin.FOLDED, away, f"made of {source}")
        if outside.mean() <= 0.5 and wide.size >= _ROW:
            reason = _changed(outside, wide.reshape(-1), shift, source)
            best = _told(replace(weight, parameter=source), Origin.ALTERED, away, reason)
    for parameter, arrays in missing.items():
        if arrays.size != array.size:
            continue
        for arranged in _arranged(arrays, array):
            origin = _beside(replace(weight, parameter=parameter), wide, arranged.astype(np.float64), unit)
            if origin is not None and (
                best is None or (bool(origin), -origin.difference) > (bool(best), -best.difference)
            ):
                best = origin
    if best is None:
        return replace(weight, reason="like no parameter or buffer of the model")
    return best


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
            if count <= (1 - _MOSTLY) * array.size and (least is None or count < least[0]):
                wide = array.reshape(-1).astype(np.float64)
                reason = _changed(differs, wide, model, told)
                least = count, _told(beside, Origin.ALTERED, np.abs(wide - model), reason)
    return least[1] if least is not None else None


def _beside(weight: Weight, array: Array, parameter: Array, unit: float) -> Weight | None:
    """What ``array`` is if it comes from ``parameter``, of its shape; None where it is like nothing of it."""
    tolerance = _ROUNDINGS * unit * np.abs(array)
    away = np.abs(array - parameter)
    if (away <= tolerance).all():
        return _told(weight, Origin.FOLDED, away, f"{weight.parameter}, rounded otherwise")
    if array.size < _ROW and np.isfinite(array).all() and not np.isfinite(parameter).any():
        return None  # numbers that the type does not hold: what stands for them may be anything
    if not np.isfinite(away).all():
        return _told(
            weight,
            Origin.ALTERED,
            np.where(np.isfinite(away), 0, np.inf),
            _changed(away > 0, array, parameter, weight.parameter),
        )
    closest: tuple[int, Array] | None = None
    for scale in _scales(array, parameter):
        apart = np.abs(array - scale * parameter)
        outside = apart > tolerance + _ROUNDINGS * unit * np.abs(scale * parameter)
        if not outside.any():
            return _told(weight, Origin.FOLDED, apart, f"{weight.parameter} times a number for each channel")
        if closest is None or outside.sum() < closest[0]:
            closest = int(outside.sum()), scale
    differs = away > 0
    if differs.mean() <= 0.5:
        return _told(weight, Origin.ALTERED, away, _changed(differs, array, parameter, weight.parameter))
    if closest is not None and closest[0] <= 0.25 * array.size:
        scaled = closest[1] * parameter
        outside = np.abs(array - scaled) > 2 * _ROUNDINGS * unit * np.abs(scaled) + tolerance
        name = f"{weight.parameter} times a number for each channel"
        return _told(weight, Origin.ALTERED, np.abs(array - scaled), _changed(outside, array, scaled, name))
    if (away <= _NEAR * np.abs(parameter)).all():
        return _told(weight, Origin.ALTERED, away, _changed(differs, array, parameter, weight.parameter))
    return None


def _scales(array: Array, parameter: Array) -> Iterator[Array]:
    """One number for all, for each place along each axis: the median of the ratios, which few altered elements do not
    move."""
    with np.errstate(all="ignore"):
        ratios = np.where(parameter != 0, array / parameter, np.nan)
        ratios = np.where(np.isfinite(ratios), ratios, np.nan)
    if np.isnan(ratios).all() or array.size < _ROW:
        return
    yield np.asarray(np.nanmedian(ratios)).reshape((1,) * array.ndim)
    for axis, size in enumerate(array.shape):
        others = tuple(i for i in range(array.ndim) if i != axis)
        if size > 1 and array.size // size >= _ROW:
            filled = np.where(np.isnan(ratios).all(others, keepdims=True), 1.0, ratios)  # a channel of zeros
            yield np.nanmedian(filled, others, keepdims=True)


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
