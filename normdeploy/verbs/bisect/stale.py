"""Whether a file holds the weights of another state of the model, as of an earlier step of its training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from ...precision.retype import values
from ...runtimes.exact import Array
from ...storage.protos import copied
from ..verify.originals import Original
from ..verify.shifts import each
from ..verify.stored import folded, shifts_of, stored_in

_MOST = 1 / 2  # of a file's weights that are others, beyond which it is a state and no mistake
_FEWEST = 3  # two wrong weights are two mistakes
_NEAR = 2.0**-7  # relative: rounded to bfloat16


def replaced(model: Original, proto: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """Return a file with the model's weights in the place of others, and the names of these.

    No names where no more than half of the file's weights are others, or where one of them is like none of the model's.
    """
    stored = {name: v.astype(np.float64) for name, v in stored_in(model).items() if v.size > 1}
    stored |= folded(model, stored)
    stored |= {s.source: s.values for s in each(shifts_of(model, stored)) if s.values.size > 1}
    kept = {t.name: values(t) for t in proto.graph.initializer}
    kept = {name: v for name, v in kept.items() if v.dtype.kind == "f" and v.size > 1}
    strange = {name: v for name, v in kept.items() if not any(_alike(p, v) for p in stored.values())}
    if len(strange) < _FEWEST or len(strange) <= _MOST * len(kept):
        return proto, []
    places = dict(_places(strange, stored))
    if len(places) < len(strange):
        return proto, []
    changed = copied(proto)
    for tensor in changed.graph.initializer:
        if tensor.name in places:
            tensor.CopyFrom(numpy_helper.from_array(places[tensor.name].astype(kept[tensor.name].dtype), tensor.name))
    return changed, list(places)


def _alike(one: Array, other: Array) -> bool:
    """Whether two weights hold the same numbers, in either order of their dims."""
    if one.size != other.size:
        return False
    a, b = one.astype(np.float64), other.astype(np.float64)
    near = _NEAR * np.abs(a).max(initial=0)
    return any(np.abs(laid.reshape(b.shape) - b).max(initial=0) <= near for laid in (a, a.T))


def _places(strange: Mapping[str, Array], stored: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Which of the model's weights belongs where: the one of its name, else the one that points the same way most, as
    two states of one training do."""
    for name, value in strange.items():
        laid = [
            (own == name, _cosine(turned, value), turned)
            for own, parameter in stored.items()
            for turned in ((parameter, parameter.T) if parameter.ndim > 1 else (parameter,))
            if turned.shape == value.shape
        ]
        if laid:
            yield name, max(laid, key=lambda each: each[:2])[2]


def _cosine(one: Array, other: Array) -> float:
    wide = other.astype(np.float64)
    size = float(np.sqrt((one * one).sum() * (wide * wide).sum()))
    return float((one * wide).sum()) / size if size else 0.0
