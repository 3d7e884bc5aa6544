"""Find a single number of a file that differs from the model's number, by solving for the right value.

A spot is the group of nodes at a fault; its end is the tensor that these nodes compute wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...compare.number_text import format_pair
from ...runtimes.float64_evaluator import NodeChange
from ...types import Array
from .trial_changes import Cause, Trial, TrialNode, TrialSpot, with_attributes

_PLAIN = (0.0, 1.0, -1.0)
# Maximum number of steps of Newton's method. Two steps are enough if the end depends linearly on the number.
_STEPS = 8
# Relative step of the finite difference that gives the derivative.
_MOVED = 2.0**-10
_SCALED = ("Softmax", "LogSoftmax", "Sigmoid", "Tanh", "Erf", "Exp", "Sin", "Cos", "Gelu")
_SUMS = ("Add", "Sub", "Sum")
# Minimum number of elements of the end. With fewer elements, a meaningless number can make the end right.
_FEWEST = 4
# Function that returns the error of a spot's end after a change; None if the end can't be computed.
Residual = Callable[[NodeChange], "Array | None"]


@dataclass(frozen=True)
class _FileNumber:
    """Number that a node reads: an attribute, a constant input, or the scale of an input.

    Attributes:
        own: the number in the file.
        i: index of the input.
        edit: function (input, number) -> the input with this number; None for an attribute.
    """

    at: TrialNode
    name: str
    own: float
    i: int = 0
    edit: Callable[[Array, float], Array] | None = None

    def with_value(self, value: float) -> Trial:
        """Try another value for the number.

        Returns:
            A trial of kind "number".
        """
        text = self.at.describe_other(self.name, *format_pair(self.own, value))
        edit = self.edit
        if edit is None:
            return self.at.as_node("number", text, with_attributes(self.at.node, {self.name: value}))
        return self.at.with_inputs("number", text, {self.i: lambda x: edit(x, value)})


def solve_numbers(around: TrialSpot, residual: Residual) -> Iterator[tuple[float, Cause]]:
    """Find the numbers that make the spot's end right.

    Yields:
        The error of the end with the right number, and the cause.
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
    """Yield the numbers of the spot's nodes: inputs that are constants of one element, floating attributes, and scales
    that may be missing before an input.
    """
    for at in around.nodes:
        for i, name in enumerate(at.node.input):
            stored = at.fixed_input(i, "f")
            if stored is not None and stored.size == 1:
                yield _FileNumber(at, repr(name), stored.item(), i, np.full_like)
        for name, value in at.attributes.items():
            if isinstance(value, float):
                yield _FileNumber(at, name, value)
        # A missing scale of a node's input counts as the number 1.
        if at.op in _SCALED:
            yield _FileNumber(at, "an input scale of", 1.0, 0, np.multiply)
        if at.op in _SUMS:
            for i, name in enumerate(at.node.input):
                yield _FileNumber(at, f"a scale of its input {name!r} of", 1.0, i, np.multiply)


def _iter_candidates(number: _FileNumber, numbers: Sequence[float], residual: Residual) -> Iterator[float]:
    """Yield the values to try: the model's numbers, simple numbers, and the result of Newton's method."""
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
