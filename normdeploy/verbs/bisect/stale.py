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
from ..verify.stored import stored_in

_MOST = 1 / 2  # of the model's weights that others take the place of, from which on it is a state and no mistake
_NEAR = 2.0**-7  # relative: rounded to bfloat16


def replaced(model: Original, proto: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """Return a file with the model's weights in the place of others, and the names of these.

    No names where fewer than half of the model's weights are missing, or where it is not told which is which.
    """
    stored = {name: v for name, v in stored_in(model).items() if v.size > 1}
    kept = {t.name: values(t) for t in proto.graph.initializer}
    kept = {name: v for name, v in kept.items() if v.dtype.kind == "f" and v.size > 1}
    here = {name for name, v in stored.items() if any(_alike(v, other) for other in kept.values())}
    left = {name: v for name, v in stored.items() if name not in here}
    strange = {name: v for name, v in kept.items() if not any(_alike(p, v) for p in stored.values())}
    if len(left) < 2 or len(left) < _MOST * len(stored):
        return proto, []
    places = dict(_places(strange, left))
    if len(places) < len(left):
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


def _places(strange: Mapping[str, Array], left: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Which of the model's weights belongs where: by its name, else the next of its shape, in the nearer layout."""
    waiting = dict(left)
    for name, value in strange.items():
        fitting = [p for p, v in waiting.items() if value.shape in (v.shape, v.shape[::-1])]
        if fitting:
            parameter = waiting.pop(name if name in fitting else fitting[0])
            layouts = [laid for laid in (parameter, parameter.T) if laid.shape == value.shape]
            # Two states of one training point the same way.
            yield name, max(layouts, key=lambda laid: float((laid * value.astype(np.float64)).sum()))
