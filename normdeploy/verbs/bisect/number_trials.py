"""Find a single number of a file that differs from the model's, by solving for the right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...runtimes.float64_evaluator import NodeChange
from ...types import Array
from .trial_changes import Cause, Trial, TrialNode, TrialSpot, with_attributes

_PLAIN = (0.0, 1.0, -1.0)
# Steps of Newton's method; two are enough if the number enters linearly.
_STEPS = 8
# Relative step of the finite difference.
_MOVED = 2.0**-10
_SCALED = ("Softmax", "LogSoftmax", "Sigmoid", "Tanh", "Erf", "Exp", "Sin", "Cos", "Gelu")
_SUMS = ("Add", "Sub", "Sum")
# Minimum number of elements: fewer can be met by a meaningless number.
_FEWEST = 4
# Returns the error of a spot's end with a change; None if it can't be computed.
Residual = Callable[[NodeChange], "Array | None"]


@dataclass(frozen=True)
class _FileNumber:
    """Number that a node reads: an attribute, a constant input, or the scale of an input.

    Attributes:
        own: its value in the file.
        i: index of the input.
        edit: (input, value) -> the input with another number; None for an attribute.
    """

    at: TrialNode
    name: str
    own: float
    i: int = 0
    edit: Callable[[Array, float], Array] | None = None

    def with_value(self, value: float) -> Trial:
        """Try another number in its place.

        Returns:
            A trial of kind "number".
        """
        text = self.at.describe_other(self.name, f"{self.own:.6g}", f"{value:.6g}")
        edit = self.edit
        if edit is None:
            return self.at.as_node("number", text, with_attributes(self.at.node, {self.name: value}))
        return self.at.with_inputs("number", text, {self.i: lambda x: edit(x, value)})


def solve_numbers(around: TrialSpot, residual: Residual) -> Iterator[tuple[float, Cause]]:
    """Find the numbers that make the spot's end right.

    Yields:
        The error of the end, and the cause.
    """
    for number in _iter_numbers(around):
        for value in _iter_candidates(number, around.numbers, residual):
            trial = number.with_value(value)
            off = residual(trial.change)
            if off is None or value == number.own:
                continue
            error = float(np.abs(off).max(initial=0))
            if error <= around.spot.allowed:
                yield error, trial.cause
                break


def _iter_numbers(around: TrialSpot) -> Iterator[_FileNumber]:
    """Yield the single numbers that nodes read, their floating attributes, and scales that are left out before them."""
    for at in around.nodes:
        for i, name in enumerate(at.node.input):
            stored = at.fixed_input(i, "f")
            if stored is not None and stored.size == 1:
                yield _FileNumber(at, repr(name), stored.item(), i, np.full_like)
        for name, value in at.attributes.items():
            if isinstance(value, float):
                yield _FileNumber(at, name, value)
        # A scale that is left out before a node is 1.
        if at.op in _SCALED:
            yield _FileNumber(at, "an input scale of", 1.0, 0, np.multiply)
        if at.op in _SUMS:
            for i, name in enumerate(at.node.input):
                yield _FileNumber(at, f"a scale of its input {name!r} of", 1.0, i, np.multiply)


def _iter_candidates(number: _FileNumber, numbers: Sequence[float], residual: Residual) -> Iterator[float]:
    """Yield the model's numbers, the simplest numbers, and the result of Newton's method."""
    yield from dict.fromkeys([*numbers, *_PLAIN])
    value = number.own
    for _ in range(_STEPS):
        step = _MOVED * max(abs(value), _MOVED)
        here = residual(number.with_value(value).change)
        there = residual(number.with_value(value + step).change)
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
