"""A single number of a file that is not the model's: the right one is solved for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from ...runtimes.float64_evaluator import Array, Float64Evaluator, NodeChange
from .attribute_trials import attributes_with_defaults
from .trial_changes import Cause, float_constant, node_at_text, with_attribute

_PLAIN = (0.0, 1.0, -1.0)
# of Newton's method, which two are enough for where the number enters linearly
_STEPS = 8
# relative, for the slope
_MOVED = 2.0**-10
_SCALED = ("Softmax", "LogSoftmax", "Sigmoid", "Tanh", "Erf", "Exp", "Sin", "Cos", "Gelu")
_SUMS = ("Add", "Sub", "Sum")
# elements: fewer are met by a number that says nothing
_FEWEST = 4
# What a spot's end is off by with a change; None where it can't be computed.
Residual = Callable[[NodeChange], "Array | None"]


@dataclass(frozen=True, kw_only=True)
class _FileNumber:
    """``own``: as the file has it; ``changed``: gives the change that puts another in its place."""

    place: int
    name: str
    own: float
    changed: Callable[[float], NodeChange]


def solve_numbers(
    exact: Float64Evaluator, places: Sequence[int], numbers: Sequence[float], allowed: float, residual: Residual
) -> Iterator[tuple[float, Cause]]:
    """Yield each number with which the end is right, with its error.

    Args:
        numbers: the model's.
        allowed: of the end.
    """
    for number in _iter_numbers(exact, places):
        for value in _iter_candidates(number, numbers, residual):
            off = residual(number.changed(value))
            if off is None:
                error = np.inf
            else:
                error = float(np.abs(off).max(initial=0))
            if error <= allowed and value != number.own:
                text = (
                    f"{node_at_text(exact, number.place)} has {number.name} {number.own:.6g}, with {value:.6g} it is "
                    "right"
                )
                yield error, Cause("number", text, number.place)
                break


def _iter_numbers(exact: Float64Evaluator, places: Sequence[int]) -> Iterator[_FileNumber]:
    """The single numbers that nodes read, their floating attributes, and scales that are left out before them."""
    for place in places:
        node = exact.nodes[place]
        for i, name in enumerate(node.input):
            stored = float_constant(exact, name)
            if stored is not None and stored.size == 1:
                yield _FileNumber(
                    place=place, name=repr(name), own=float(stored.item()), changed=_replace_input(place, i)
                )
        for name, value in attributes_with_defaults(exact, node).items():
            if isinstance(value, float):
                yield _FileNumber(place=place, name=name, own=value, changed=_replace_attribute(node, place, name))
        # A scale that is left out before a node is 1.
        if node.op_type in _SCALED:
            yield _FileNumber(place=place, name="an input scale of", own=1.0, changed=_scale_input(place, 0))
        for i, name in enumerate(node.input) if node.op_type in _SUMS else ():
            yield _FileNumber(
                place=place, name=f"a scale of its input {name!r} of", own=1.0, changed=_scale_input(place, i)
            )


def _scale_input(place: int, i: int) -> Callable[[float], NodeChange]:
    return lambda value: NodeChange(inputs={(place, i): lambda x: x * value})


def _replace_input(place: int, i: int) -> Callable[[float], NodeChange]:
    return lambda value: NodeChange(inputs={(place, i): lambda stored: np.full_like(stored, value)})


def _replace_attribute(node: onnx.NodeProto, place: int, name: str) -> Callable[[float], NodeChange]:
    return lambda value: NodeChange(nodes={place: with_attribute(node, name, value)})


def _iter_candidates(number: _FileNumber, numbers: Sequence[float], residual: Residual) -> Iterator[float]:
    """The model's numbers and the plainest ones, and what Newton's method comes to."""
    yield from dict.fromkeys([*numbers, *_PLAIN])
    value = number.own
    for _ in range(_STEPS):
        step = _MOVED * max(abs(value), _MOVED)
        here = residual(number.changed(value))
        there = residual(number.changed(value + step))
        if here is None or there is None or here.size < _FEWEST:
            return
        slope = (there - here) / step
        steepness = float((slope * slope).sum())
        if not np.isfinite(steepness) or not steepness:
            return
        value -= float((slope * here).sum()) / steepness
        if not np.isfinite(value):
            return
    yield value
