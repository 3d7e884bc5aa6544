"""Constants that stand for "as low as can be" on the way to a Softmax: half precision's own lowest would do, but it
leaves no room."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from onnx import TensorProto

from .floating import View
from .keeping import MOVES
from .retype import values

_MASKING = MOVES | {"Add", "Sub", "Mul", "Min", "Max"}
_SURELY = -1e6  # what multiplies by less may be a temperature


def masks(view: View) -> tuple[dict[str, tuple[np.ndarray, float]], set[str]]:
    """Constants that only say "as low as can be" to a Softmax, with the values that say it in half and the lowest as it
    was; and the tensors that carry them there.

    A quarter of the type's range, a power of two: exp of it is 0, scores and other masks may be added, and nothing
    overflows, so that a row that is masked out altogether is no NaN.
    """
    floor = -(2.0 ** (np.frexp(view.form.largest)[1] - 2))
    masked: dict[str, tuple[np.ndarray, float]] = {}
    carried: set[str] = set()
    for name, tensor in view.constants.items():
        if tensor.data_type != TensorProto.FLOAT:
            continue
        array = values(tensor)
        low = float(array[np.isfinite(array)].min(initial=0.0))
        if low >= -view.form.largest:
            continue
        way = (
            None
            if (array > view.form.largest).any()
            else _to_softmax(view, name, _MASKING if low <= _SURELY else _MASKING - {"Mul"})
        )
        if way is not None:
            masked[name] = np.where(np.isfinite(array), np.maximum(array, np.float32(floor)), array), low
            carried |= way
    return masked, carried


def _to_softmax(view: View, name: str, through: Collection[str]) -> set[str] | None:
    """The tensors between a constant and the Softmaxes that it ends in by way of these ops; None where it ends
    elsewhere too."""
    seen, stack = {name}, [name]
    while stack:
        top = stack.pop()
        if top in view.outputs or not view.readers.get(top):
            return None
        for i in view.readers[top]:
            node = view.graph.node[i]
            if node.op_type == "Softmax":
                continue
            if node.op_type not in through:
                return None
            stack += [o for o in node.output if o not in seen]
            seen.update(node.output)
    return seen
