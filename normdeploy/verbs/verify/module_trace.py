"""Compares a live module as its user runs it with the trace that files are made of.

A forward that asks whether it is exported, or state that a trace drops, makes both differ. The file then follows the
trace, and a comparison with the trace alone would pass it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ...compare.elements import distance
from ...compare.perturbation import of_regrouping, outside
from ...errors import InputError
from ...loading.live import unwrapped
from ...model import Model
from ...runtimes import RunResult
from ...runtimes.eager import EagerRunner, ModuleRunner
from ...runtimes.rounding import RoundedRunner
from .cases import SMALL
from .originals import unit_roundoff
from .spending import Clock

_DRAWS = 3  # of roundings, which say how far two correct evaluations may lie apart


@dataclass(frozen=True)
class Beside:
    """A live module beside its trace: how they differ, or why the module could not be run."""

    difference: str | None = None
    note: str | None = None


def trace_difference(module: torch.nn.Module, model: Model, clock: Clock) -> Beside:
    """Run ``module`` and its trace on a few inputs: the first whatever it takes, the others while there is time.

    Each element may differ by 4 d + 6 √N u y: d is how far drawn roundings move its row, N the nodes of the trace, u
    the unit roundoff, and y the largest element of the row (`normdeploy.compare.perturbation`).
    """
    live, trace, roundings = ModuleRunner(model, unwrapped(module)), EagerRunner(model), _Roundings(model)
    for place, (name, feeds) in enumerate(_cases(model)):
        if place and clock.is_over():
            clock.module.append(name)
            continue
        try:
            (ran, again), traced = live.infer_twice(feeds), trace.infer(feeds)
        except InputError as error:
            return Beside(note=f"the module itself was not run beside its trace at {name}: {error}")
        if different := roundings.difference(ran, traced, feeds):
            return Beside(
                f"the model as it runs and its trace differ at {name}: the output {different.output!r} is"
                f" {different.first} in the module and {different.second} in the trace, of which the file was made"
            )
        if different := roundings.difference(ran, again, feeds):
            return Beside(
                "the model keeps state from call to call, and the file does not: on the same inputs the output"
                f" {different.output!r} is {different.first} at the first call and {different.second} at the second;"
                " make the state an input and an output"
            )
    return Beside()


class _Roundings:
    """Compares two evaluations of a model up to what rounding explains."""

    def __init__(self, model: Model) -> None:
        self._model, self._unit = model, unit_roundoff(model)
        self._relative = of_regrouping(len(model.program.graph.nodes), self._unit)

    def difference(self, one: RunResult, other: RunResult, feeds: Mapping[str, np.ndarray]) -> _Different | None:
        """Return the first output in which both differ by more; None where there is none."""
        # Drawn roundings only widen the bound, and most modules and traces are equal without them.
        still = {output: np.zeros(np.shape(value)) for output, value in other.items()}
        if self._beyond(one, other, still) is None:
            return None
        return self._beyond(one, other, self._moved(feeds))

    def _beyond(self, one: RunResult, other: RunResult, moved: RunResult) -> _Different | None:
        every = (_difference(output, one[output], other[output], moved[output], self._relative) for output in one)
        return next(filter(None, every), None)

    def _moved(self, feeds: Mapping[str, np.ndarray]) -> RunResult:
        """Draw how far roundings move each element."""
        reference = RoundedRunner(self._model)
        exact = reference.infer(feeds)
        moved = {output: np.zeros(np.shape(value)) for output, value in exact.items()}
        for seed in range(_DRAWS):
            drawn = reference.perturbed(feeds, self._unit, seed)
            for output, value in exact.items():
                moved[output] = np.maximum(moved[output], distance(drawn[output], value))
        return moved


def _cases(model: Model) -> Iterator[tuple[str, Mapping[str, np.ndarray]]]:
    """Random inputs at the usual and at the smallest sizes, and small ones, of which an epsilon is a large part."""
    yield "seed 0", model.samples(0)
    least = {name: dim.min for name, dim in model.dims.items()}
    if least:
        yield "seed 1, the smallest sizes", model.samples(1, least)
    small = {
        name: (value.astype(np.float64) * SMALL).astype(value.dtype) if value.dtype.kind not in "iub" else value
        for name, value in model.samples(2).items()
    }
    yield f"inputs around {SMALL:g}", small


@dataclass(frozen=True)
class _Different:
    """Two values of an output, or its types and shapes, that should be one, as texts."""

    output: str
    first: str
    second: str


def _difference(
    output: str, one: np.ndarray, other: np.ndarray, moved: np.ndarray, relative: float
) -> _Different | None:
    """Return where both differ by more than rounding; None where they do not."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return _Different(output, f"{one.dtype}{list(one.shape)}", f"{other.dtype}{list(other.shape)}")
    if not one.size:
        return None
    worst = outside(one, other, moved, relative)
    if worst is None:
        return None
    return _Different(output, f"{one[worst.place]:.6g}", f"{other[worst.place]:.6g}")
