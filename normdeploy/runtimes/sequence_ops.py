"""Compute ops on ONNX sequences as https://onnx.ai/onnx/operators defines them. A sequence is a list of arrays here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..evaluate.evaluator_core import Array, optional_input

Attrs = Mapping[str, Any]
Function = Callable[[Sequence[Any], Attrs], "list[Array] | Array"]


def _sequence_empty(inputs: Sequence[Any], attrs: Attrs) -> list[Array]:
    return []


def _sequence_construct(inputs: Sequence[Any], attrs: Attrs) -> list[Array]:
    return [np.asarray(value) for value in inputs]


def _sequence_insert(inputs: Sequence[Any], attrs: Attrs) -> list[Array]:
    elements = list(inputs[0])
    position = optional_input(inputs, 2)
    elements.insert(len(elements) if position is None else int(position), np.asarray(inputs[1]))
    return elements


def _sequence_erase(inputs: Sequence[Any], attrs: Attrs) -> list[Array]:
    elements = list(inputs[0])
    position = optional_input(inputs, 1)
    del elements[-1 if position is None else int(position)]
    return elements


def _sequence_at(inputs: Sequence[Any], attrs: Attrs) -> Array:
    element: Array = inputs[0][int(inputs[1])]
    return element


def _sequence_length(inputs: Sequence[Any], attrs: Attrs) -> Array:
    return np.array(len(inputs[0]), np.int64)


def _concat_from_sequence(inputs: Sequence[Any], attrs: Attrs) -> Array:
    join = np.stack if attrs.get("new_axis", 0) else np.concatenate
    return join(inputs[0], axis=attrs["axis"])


def _split_to_sequence(inputs: Sequence[Any], attrs: Attrs) -> list[Array]:
    """Split along an axis: into parts of size 1 (``keepdims`` may drop the axis), parts of one given size, or parts of
    the listed sizes.
    """
    x = np.asarray(inputs[0])
    axis = attrs.get("axis", 0)
    sizes = optional_input(inputs, 1)
    if sizes is None:
        parts = np.split(x, x.shape[axis], axis)
        if attrs.get("keepdims", 1):
            return parts
        return [part.squeeze(axis) for part in parts]
    ends = range(int(sizes), x.shape[axis], int(sizes)) if sizes.ndim == 0 else np.cumsum(sizes)[:-1]
    return np.split(x, ends, axis)


OPS: Mapping[str, Function] = {
    "SequenceEmpty": _sequence_empty,
    "SequenceConstruct": _sequence_construct,
    "SequenceInsert": _sequence_insert,
    "SequenceErase": _sequence_erase,
    "SequenceAt": _sequence_at,
    "SequenceLength": _sequence_length,
    "ConcatFromSequence": _concat_from_sequence,
    "SplitToSequence": _split_to_sequence,
}


def as_array_or_sequence(value: Any) -> Any:
    """Convert a value to an array unless it is a sequence.

    Returns:
        An array, or the list unchanged.
    """
    if isinstance(value, list):
        return value
    return np.asarray(value)
