"""Which layers stay float: those whose error costs most, as few as let the metrics be reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import onnx

from ..errors import InputError
from ..quantized import Exclusion, Judged
from ..types import Progress
from . import judge
from .qdq import Plan

_FEW = 2  # batches on which each layer is tried alone
_NAMED = 5  # layers that an error names


@dataclass(frozen=True)
class Chosen:
    """``proto``: the float model after the migrations; ``plans``: of the layers that are quantized, by their nodes'
    results; ``write`` makes the file of some of them; ``judged``: the metrics it reaches. ``errors``: of each layer by
    itself, by the layer's result."""

    proto: onnx.ModelProto
    plans: Mapping[str, Plan]
    write: Callable[[Mapping[str, Plan]], onnx.ModelProto]
    judged: tuple[Judged, ...]
    exclusions: tuple[Exclusion, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def file(self) -> onnx.ModelProto:
        return self.write(self.plans)


def excluded(
    work: Chosen,
    judging: judge.Judge,
    float32: judge.Outputs,
    samples: Sequence[Mapping[str, np.ndarray]],
    names: Mapping[str, str],
    progress: Progress | None = None,
) -> Chosen:
    """Leave as few layers in float as the metrics ask for.

    Each layer is tried alone on calibration samples; those that change the outputs most are left out first, in steps
    that double, then halved down to the fewest. Each step is judged on the judging samples.

    Args:
        float32: what the file before gives on the judging samples.
        names: a node's result -> the layer's.

    Raises:
        InputError: float32 itself does not reach a metric, or only with every layer in float.
    """
    told: dict[int, tuple[Judged, ...]] = {}
    order: list[str] = []

    def judged(left_out: int) -> tuple[Judged, ...]:
        if left_out not in told:
            plans = {t: p for t, p in work.plans.items() if t not in order[:left_out]}
            if progress is not None:
                progress("judge", left_out, len(work.plans))
            told[left_out] = judging.judged(judging.run(work.write(plans)), float32)
        return told[left_out]

    first = judged(0)
    if all(j.met for j in first):
        return replace(work, judged=first)
    short = next((j for j in first if not j.float32 >= j.threshold), None)
    if short is not None:
        raise InputError(
            f"the float32 model reaches {short.metric} {short.float32:.6g} of {short.output!r} on these samples, and"
            f" {short.threshold:g} is asked for; ask for less"
        )
    errors = _alone(work, samples, progress)
    order += sorted(errors, key=lambda tensor: -errors[tensor])
    low, high, all_of_them = 0, 1, len(order)
    while high < all_of_them and not all(j.met for j in judged(high)):
        low, high = high, high * 2
    if high >= all_of_them:
        high = all_of_them - 1
        if not all(j.met for j in judged(high)):
            worst = next(j for j in judged(high) if not j.met)
            layers = ", ".join(repr(names.get(t, t)) for t in order[:_NAMED])
            raise InputError(
                f"{worst.metric} of {worst.output!r} is {worst.value:.6g} with one layer quantized, and"
                f" {worst.threshold:g} is asked for; the layers that cost most are {layers}: ask for less, or for"
                " another --calibration"
            )
    while high - low > 1:
        between = (low + high) // 2
        low, high = (low, between) if all(j.met for j in judged(between)) else (between, high)
    return replace(
        work,
        plans={t: p for t, p in work.plans.items() if t not in order[:high]},
        judged=judged(high),
        exclusions=tuple(_steps(told, order, high, names)),
        errors={names.get(t, t): e for t, e in errors.items()},
    )


def _alone(work: Chosen, samples: Sequence[Mapping[str, np.ndarray]], progress: Progress | None) -> dict[str, float]:
    """How far the outputs are off with one layer quantized, for each."""
    few = samples[:_FEW]
    right = judge.run(work.proto, few, False)
    errors: dict[str, float] = {}
    for done, (tensor, plan) in enumerate(work.plans.items()):
        if progress is not None:
            progress("layers alone", done, len(work.plans))
        errors[tensor] = judge.distance(judge.run(work.write({tensor: plan}), few, False), right)
    return errors


def _steps(
    told: Mapping[int, tuple[Judged, ...]], order: Sequence[str], last: int, names: Mapping[str, str]
) -> list[Exclusion]:
    """What each step that was judged bought, up to the last."""
    steps: list[Exclusion] = []
    counts = sorted(count for count in told if count <= last)
    for before, after in pairwise(counts):
        new = min(told[after], key=lambda j: j.value - j.threshold)
        was = next(j for j in told[before] if (j.output, j.metric) == (new.output, new.metric))
        left_out = tuple(names.get(t, t) for t in order[before:after])
        steps.append(Exclusion(left_out, f"{new.metric} of {new.output}", was.value, new.value))
    return steps
