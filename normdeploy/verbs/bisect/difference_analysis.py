"""What the difference of two tensors says: a factor, another order, a branch that is left out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from ...runtimes.float64_evaluator import Array, Values
from .counterpart_search import FaultSpot
from .reference_program import ReferenceProgram
from .trial_changes import Cause

# whose orders are all tried
_MOST_AXES = 4
# of the first element, which others may equal
_MOST_PLACES = 16
# elements, of slices with slices
_MOST_COMPARED = 10_000_000


def explain_difference(got: Array, spot: FaultSpot, program: ReferenceProgram, held: Values, inputs: Values) -> Cause:
    """Name what turns a result into the right one.

    Args:
        held: results of the model's operators, float64.
        inputs: of the model.
    """
    expected = spot.expected
    allowed = spot.allowed
    if got.size != expected.size:
        return Cause("unknown", f"its shape is {list(got.shape)}, the model's is {list(expected.shape)}")
    branch = _find_omitted_branch(got, spot, program, held) or _find_omitted_input_branch(got, spot, program, inputs)
    if branch is not None:
        return branch
    order = _find_axis_order(got, expected, allowed)
    if order is None and spot.last in held and held[spot.last].size == got.size:
        # As the model shapes it: a file may stack what the model has beside each other.
        shape = held[spot.last].shape
        order = _find_axis_order(got.reshape(shape), expected.reshape(shape), allowed)
    if order is not None:
        return order
    with np.errstate(all="ignore"):
        got = got.reshape(expected.shape)
        big = np.abs(expected) > 0.1 * np.abs(expected).max(initial=0)
        if big.any():
            factor = float(np.median((got / expected)[big]))
        else:
            factor = math.nan
        if (
            math.isfinite(factor)
            and factor
            and np.abs(got / factor - expected).max(initial=0) <= allowed
            and abs(factor - 1) > 1e-6
        ):
            return Cause("factor", f"it is {factor:.6g} times what the model has")
    return Cause("unknown", "no single epsilon, axis, weight, ddof or factor explains it")


def _find_omitted_branch(got: Array, spot: FaultSpot, program: ReferenceProgram, held: Values) -> Cause | None:
    """The operator that joins the result with one of the model's that the file does not compute: a residual, a gate."""
    for joint in reversed((*spot.operators, spot.last)):
        for name in program.inputs_of(joint) if joint else ():
            other = held.get(name)
            if other is None or other.dtype.kind != "f" or not _is_combination(got, other, spot):
                continue
            module = program.module_of(name) or program.module_of(joint)
            source = f"{program.operator_kind(name)}{f' of {module}' if module else ''}"
            return Cause("left out", f"{program.operator_kind(joint)} with the result of {source} is left out")
    return None


def _find_omitted_input_branch(got: Array, spot: FaultSpot, program: ReferenceProgram, inputs: Values) -> Cause | None:
    for name, value in inputs.items():
        if spot.last and value.dtype.kind == "f" and _is_combination(got, value, spot):
            return Cause("left out", f"{program.operator_kind(spot.last)} with the input {name!r} is left out")
    return None


def _is_combination(got: Array, other: Array, spot: FaultSpot) -> bool:
    """Whether a sum, difference, product or quotient of the two is what the model has."""
    expected = spot.expected
    try:
        other = np.broadcast_to(other, expected.shape)
    except ValueError:
        return False
    own = got.reshape(expected.shape)
    with np.errstate(all="ignore"):
        joined = (own + other, own - other, other - own, own * other, own / other)
        return any(bool((np.abs(value - expected) <= spot.allowed).all()) for value in joined)


def _find_axis_order(got: Array, expected: Array, allowed: float) -> Cause | None:
    """The order of axes, or of the slices of one axis, in which the result is right."""
    if got.dtype.kind != "f" or not 1 < got.ndim <= _MOST_AXES:
        return None
    for perm in itertools.permutations(range(got.ndim)):
        turned = got.transpose(perm)
        if list(perm) != sorted(perm) and _is_close(turned.reshape(expected.shape), expected, allowed):
            return Cause("order", f"with its axes in the order {list(perm)} it is right")
    if got.shape != expected.shape:
        return None
    shift = _find_roll(got, expected, allowed)
    if shift is not None:
        return Cause("order", f"rolled by {shift} along its axes it is right")
    for axis, indices in _iter_slice_orders(got, expected, allowed):
        return Cause("order", f"with the slices {indices} of its axis {axis} in this order it is right")
    for axis, indices in _iter_slice_orders(np.abs(got), np.abs(expected), allowed):
        rows, wanted = (np.moveaxis(value, axis, 0) for value in (np.take(got, indices, axis), expected))
        signs = [1 if _is_close(row, right, allowed) else -1 for row, right in zip(rows, wanted, strict=True)]
        if all(_is_close(sign * row, right, allowed) for sign, row, right in zip(signs, rows, wanted, strict=True)):
            told = ", ".join(f"{'-' if sign < 0 else ''}{index}" for sign, index in zip(signs, indices, strict=True))
            return Cause(
                "order", f"with the slices [{told}] of its axis {axis}, in this order and so signed, it is right"
            )
    return None


def _find_roll(got: Array, expected: Array, allowed: float) -> list[int] | None:
    """How far each axis is rolled, by where the first element is found."""
    near = np.argwhere(np.abs(got - expected.flat[0]) <= allowed)
    for place in near[:_MOST_PLACES]:
        shift = [-int(i) for i in place]
        if any(shift) and _is_close(np.roll(got, shift, tuple(range(got.ndim))), expected, allowed):
            return shift
    return None


def _iter_slice_orders(got: Array, expected: Array, allowed: float) -> Iterator[tuple[int, list[int]]]:
    for axis, size in enumerate(got.shape):
        if size < 2 or got.size * size > _MOST_COMPARED:
            continue
        rows, wanted = (np.moveaxis(value, axis, 0).reshape(size, -1) for value in (got, expected))
        near = (np.abs(rows[None] - wanted[:, None]) <= allowed).all(-1)
        if near.any(-1).all():
            yield axis, near.argmax(-1).tolist()


def _is_close(one: Array, other: Array, allowed: float) -> bool:
    return bool((np.abs(one - other) <= allowed).all())
