"""Compare a live module, run in Python as its user runs it, with the trace from which files are made.

The two differ if forward behaves differently during an export, or if the trace loses state. The file then computes what
the trace computes, so a comparison with the trace would not detect the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ...compare.number_text import format_pair
from ...compare.perturbation import find_unexplained, regrouping_error
from ...errors import InputError
from ...inputs.input_cases import SMALL
from ...loading.live_module import unwrap_module
from ...model import LoadedModel
from ...runtimes import RunResult
from ...runtimes.torch_runners import EagerRunner, ModuleRunner
from ...types import Array, Arrays
from .compute_budget import BudgetClock
from .reference_models import model_unit_roundoff
from .rounding_effect import RoundingEffect


@dataclass(frozen=True)
class TraceDifference:
    """Difference between a live module and its trace, if there is a difference.

    Attributes:
        difference: description of the difference; None if there is no difference or the module was not run.
        note: reason why the module could not be run; None if it was run.
    """

    difference: str | None = None
    note: str | None = None


def compare_with_trace(module: torch.nn.Module, model: LoadedModel, clock: BudgetClock) -> TraceDifference:
    """Run ``module`` and its trace on a few inputs, and compare the outputs.

    The first input always runs, the other inputs run until the time is over. Each element may differ by 4 d + 6 √N u y.
    Here d is the change of its row under random roundings, and N is the number of nodes of the trace. u is the unit
    roundoff, and y is the largest element of the row (`normdeploy.compare.perturbation`).

    Returns:
        the first difference, between module and trace or between two calls of the module; an empty record if there is
        none.
    """
    live = ModuleRunner(model, unwrap_module(module))
    trace = EagerRunner(model)
    roundings = _RoundingComparison(model)
    for place, (name, feeds) in enumerate(_iter_cases(model)):
        if place and clock.is_over():
            clock.module.append(name)
            continue
        try:
            (ran, again), traced = live.infer_twice(feeds), trace.infer(feeds)
        except InputError as error:
            return TraceDifference(note=f"the module itself was not compared with its trace at {name}: {error}")
        if different := roundings.find_difference(ran, traced, feeds):
            return TraceDifference(
                f"the module and its trace differ at {name}: the output {different.output!r} is"
                f" {different.first} in the module and {different.second} in the trace, from which the file was"
                " made"
            )
        if different := roundings.find_difference(ran, again, feeds):
            return TraceDifference(
                "the model keeps state between calls, but the file does not: on the same inputs the output"
                f" {different.output!r} is {different.first} at the first call and {different.second} at the"
                " second; make the state an input and an output"
            )
    return TraceDifference()


class _RoundingComparison:
    """Compare two evaluations of a model up to differences that rounding explains."""

    def __init__(self, model: LoadedModel) -> None:
        self._model, self._unit = model, model_unit_roundoff(model)
        self._relative = regrouping_error(len(model.program.graph.nodes), self._unit)

    def find_difference(self, one: RunResult, other: RunResult, feeds: Arrays) -> _OutputDifference | None:
        """Find the first output that differs by more than rounding.

        Returns:
            the output with both values, or None.
        """
        # Most modules equal their traces within the bound without random roundings, which are therefore drawn only if
        # needed.
        still = {output: np.zeros(np.shape(value)) for output, value in other.items()}
        if self._find_beyond_rounding(one, other, still) is None:
            return None
        effect = RoundingEffect(self._model, feeds, self._unit)
        return effect.find_beyond(partial(self._find_beyond_rounding, one, other))

    def _find_beyond_rounding(self, one: RunResult, other: RunResult, moved: RunResult) -> _OutputDifference | None:
        every = (_compare_outputs(output, one[output], other[output], moved[output], self._relative) for output in one)
        return next(filter(None, every), None)


def _iter_cases(model: LoadedModel) -> Iterator[tuple[str, Arrays]]:
    """Yield (name, inputs): random inputs at the usual and smallest sizes, and inputs of small numbers, which show
    epsilons.
    """
    yield "seed 0", model.samples(0)
    least = {name: dim.min for name, dim in model.named_dims.items()}
    if least:
        yield "seed 1, the smallest sizes", model.samples(1, least)
    small = {
        name: (value.astype(np.float64) * SMALL).astype(value.dtype) if value.dtype.kind not in "iub" else value
        for name, value in model.samples(2).items()
    }
    yield f"inputs around {SMALL:g}", small


@dataclass(frozen=True)
class _OutputDifference:
    """Texts of two values of an output, or of its two dtypes and shapes."""

    output: str
    first: str
    second: str


def _compare_outputs(output: str, one: Array, other: Array, moved: Array, relative: float) -> _OutputDifference | None:
    """Return the first difference beyond rounding, or None."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return _OutputDifference(output, f"{one.dtype}{list(one.shape)}", f"{other.dtype}{list(other.shape)}")
    if not one.size:
        return None
    worst = find_unexplained(one, other, moved, relative)
    if worst is None:
        return None
    return _OutputDifference(output, *format_pair(one[worst.place], other[worst.place]))
