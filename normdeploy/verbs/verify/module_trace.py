"""Compares a live module as its user runs it with the trace that files are made of.

A forward that asks whether it is exported, or state that a trace drops, makes both differ. The file then follows the
trace, and a comparison with the trace alone would pass it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import InputError
from ...loading.live import unwrapped
from ...model import Model
from ...runtimes.eager import EagerRunner, ModuleRunner
from ...runtimes.rounding import RoundedRunner
from .cases import SMALL
from .originals import unit_roundoff

_DRAWS = 3  # of roundings, which say how far two correct evaluations may lie apart
FACTOR = 4  # times the farthest draw: both evaluations round, and three draws are few
DEVIATIONS = 6  # of a sum of roundings (`graphs.equal`)


def trace_difference(module: torch.nn.Module, model: Model) -> tuple[str, str]:
    """Run ``module`` and its trace on a few inputs.

    Each element may differ by 4 d + 6 √N u y: d is how far drawn roundings move its row, N the nodes of the trace, u
    the unit roundoff, and y the largest element of the row (`rewriting.side_by_side` has the same bound).

    Returns:
        A sentence on the first difference, "" where there is none; and a note where the module could not be run.
    """
    unit = unit_roundoff(model)
    count = sum(1 for _ in model.program.graph.nodes)
    relative = DEVIATIONS * math.sqrt(count) * unit
    live, trace, reference = ModuleRunner(model, unwrapped(module)), EagerRunner(model), RoundedRunner(model)
    for name, feeds in _cases(model):
        try:
            (ran, again), traced = live.infer_twice(feeds), trace.infer(feeds)
        except InputError as error:
            return "", f"the module itself was not run beside its trace at {name}: {error}"
        exact = reference.infer(feeds)
        moved = {output: np.zeros(np.shape(value)) for output, value in exact.items()}
        for seed in range(_DRAWS):
            drawn = reference.perturbed(feeds, unit, seed)
            for output, value in exact.items():
                moved[output] = np.maximum(moved[output], apart(value, drawn[output]))
        for output, value in ran.items():
            if pair := _difference(value, traced[output], moved[output], relative):
                return (
                    f"the model as it runs and its trace differ at {name}: the output {output!r} is {pair.first} in the"
                    f" module and {pair.second} in the trace, of which the file was made"
                ), ""
            if pair := _difference(value, again[output], moved[output], relative):
                return (
                    "the model keeps state from call to call, and the file does not: on the same inputs the output"
                    f" {output!r} is {pair.first} at the first call and {pair.second} at the second; make the state an"
                    " input and an output"
                ), ""
    return "", ""


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


def apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return |a - b| of each element; infinite where one alone is not finite."""
    with np.errstate(all="ignore"):
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        one = np.isfinite(x) != np.isfinite(y)
        return np.where(one, np.inf, np.where(np.isfinite(x), np.abs(x - y), 0.0))


@dataclass(frozen=True)
class _Pair:
    """Two values, or types and shapes, that should be one, as texts."""

    first: str
    second: str


def _difference(one: np.ndarray, other: np.ndarray, moved: np.ndarray, relative: float) -> _Pair | None:
    """Return where both differ by more than rounding; None where they do not."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return _Pair(f"{one.dtype}{list(one.shape)}", f"{other.dtype}{list(other.shape)}")
    if not one.size:
        return None
    off = apart(one, other)
    sizes = np.abs(np.nan_to_num(other.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0))
    bound = FACTOR * row_largest(moved) + relative * row_largest(sizes)
    beyond = off > bound
    if not beyond.any():
        return None
    place = np.unravel_index(int(np.argmax(np.where(beyond, off, -1.0))), off.shape)
    return _Pair(f"{one[place]:.6g}", f"{other[place]:.6g}")


def row_largest(values: np.ndarray) -> np.ndarray:
    """Return the largest element of each row along the last axis."""
    return values.max(axis=-1, keepdims=True) if values.ndim else values
