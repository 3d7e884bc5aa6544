"""Explain the difference between a tensor and its right value: a factor, another order, or a missing branch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from ...types import Array, Arrays
from .counterpart_search import FaultSpot
from .trial_changes import Cause, TrialSpot

# Maximum number of axes of a tensor for which all orders of axes are tried.
_MOST_AXES = 4
# Maximum number of positions that are tried for the first element of a rolled tensor.
_MOST_PLACES = 16
# Maximum number of comparisons of elements when each slice is compared with every slice.
_MOST_COMPARED = 10_000_000


def explain_difference(around: TrialSpot, reference: Arrays) -> Cause:
    """Find the change that turns a result into the right one.

    Args:
        reference: results of the model's operators, float64.

    Returns:
        A cause of kind "left out", "order" or "factor"; of kind "unknown" if none of these explains the difference.
    """
    spot = around.spot
    got = around.values[spot.end]
    expected = spot.expected
    allowed = spot.allowed
    if got.size != expected.size:
        return Cause("unknown", f"its shape is {list(got.shape)}, but the model's is {list(expected.shape)}")
    for branch, text in _iter_branches(around, reference):
        if branch.dtype.kind == "f" and _is_combination(got.reshape(expected.shape), branch, spot):
            return Cause("left out", f"{text} is missing")
    order = _find_axis_order(got, expected, allowed)
    if order is None and spot.last in reference and reference[spot.last].size == got.size:
        # The model's shape is tried, because a file may stack tensors that the model concatenates.
        shape = reference[spot.last].shape
        order = _find_axis_order(got.reshape(shape), expected.reshape(shape), allowed)
    if order is not None:
        return order
    got = got.reshape(expected.shape)
    big = np.abs(expected) > 0.1 * np.abs(expected).max(initial=0)
    with np.errstate(all="ignore"):
        if big.any():
            factor = float(np.median((got / expected)[big]))
        else:
            factor = math.nan
        if math.isfinite(factor) and factor and abs(factor - 1) > 1e-6 and all_within(got / factor, expected, allowed):
            return Cause("factor", f"it is {factor:.6g} times the model's value")
    return Cause("unknown", "no single epsilon, axis, weight, ddof or factor explains it")


def _iter_branches(around: TrialSpot, reference: Arrays) -> Iterator[tuple[Array, str]]:
    """Yield tensors that an operator may combine with the result, such as a residual or a gate.

    The model's results come first, followed by its inputs.
    """
    program = around.program
    spot = around.spot
    for joint in filter(None, reversed((*spot.operators, spot.last))):
        for name in program.inputs_of(joint):
            if name in reference:
                source = program.describe_operator(name, program.module_of(name) or program.module_of(joint))
                yield reference[name], f"{program.operator_kind(joint)} with the result of {source}"
    inputs = [name for name in around.values if name in around.exact.inputs and spot.last]
    for name in inputs:
        yield around.values[name], f"{program.operator_kind(spot.last)} with the input {name!r}"


def _is_combination(own: Array, other: Array, spot: FaultSpot) -> bool:
    """Check that the sum, difference, product or quotient of two tensors is the right value."""
    try:
        other = np.broadcast_to(other, spot.expected.shape)
    except ValueError:
        return False
    with np.errstate(all="ignore"):
        joined = (own + other, own - other, other - own, own * other, own / other)
        return any(all_within(value, spot.expected, spot.allowed) for value in joined)


def _find_axis_order(got: Array, expected: Array, allowed: float) -> Cause | None:
    """Find the order of axes, or of the slices of one axis, that makes the result right."""
    if got.dtype.kind != "f" or not 1 < got.ndim <= _MOST_AXES:
        return None
    for perm in itertools.permutations(range(got.ndim)):
        turned = got.transpose(perm)
        if list(perm) != sorted(perm) and all_within(turned.reshape(expected.shape), expected, allowed):
            return Cause("order", f"with its axes in the order {list(perm)} it is correct")
    if got.shape != expected.shape:
        return None
    shift = _find_roll(got, expected, allowed)
    if shift is not None:
        return Cause("order", f"rolled by {shift} along its axes it is correct")
    for axis, indices in _iter_slice_orders(got, expected, allowed):
        return Cause("order", f"with the slices {indices} of its axis {axis} in this order it is correct")
    for axis, indices in _iter_slice_orders(np.abs(got), np.abs(expected), allowed):
        rows = np.moveaxis(np.take(got, indices, axis), axis, 0)
        wanted = np.moveaxis(expected, axis, 0)
        negative = [not all_within(row, right, allowed) for row, right in zip(rows, wanted, strict=True)]
        rows[negative] *= -1
        if all_within(rows, wanted, allowed):
            told = ", ".join(f"{'-' * minus}{index}" for minus, index in zip(negative, indices, strict=True))
            return Cause(
                "order",
                f"with the slices [{told}] of its axis {axis}, in this order and with these signs, it is correct",
            )
    return None


def _find_roll(got: Array, expected: Array, allowed: float) -> list[int] | None:
    """Find how far each axis is rolled, from the positions at which the value of the first element occurs."""
    near = np.argwhere(np.abs(got - expected.flat[0]) <= allowed)
    for place in near[:_MOST_PLACES]:
        shift = [-int(i) for i in place]
        if any(shift) and all_within(np.roll(got, shift, tuple(range(got.ndim))), expected, allowed):
            return shift
    return None


def _iter_slice_orders(got: Array, expected: Array, allowed: float) -> Iterator[tuple[int, list[int]]]:
    for axis, size in enumerate(got.shape):
        if size < 2 or got.size * size > _MOST_COMPARED:
            continue
        indices = match_slices(got, expected, axis, allowed)
        if indices is not None:
            yield axis, indices.tolist()


def match_slices(data: Array, wanted: Array, axis: int, allowed: float) -> Array | None:
    """Match each slice of ``wanted`` along an axis with an equal slice of ``data``.

    Returns:
        Indices of slices of ``data``; None if a slice of ``wanted`` has no equal slice.
    """
    rows = np.moveaxis(data, axis, 0)
    others = np.moveaxis(wanted, axis, 0)
    rows = rows.reshape(len(rows), -1)
    others = others.reshape(len(others), -1)
    near = (np.abs(rows[None] - others[:, None]) <= allowed).all(-1)
    if near.any(-1).all():
        return np.asarray(near.argmax(-1))
    return None


def all_within(one: Array, other: Array, allowed: float) -> bool:
    """Check that every element is within the bound.

    Returns:
        False if an element differs by more than ``allowed`` or is NaN.
    """
    return bool((np.abs(one - other) <= allowed).all())
