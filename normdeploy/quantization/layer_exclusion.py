"""Leave parts of a model in float32 until the metrics are reached, with as few parts as possible.

The parts are the layers of a quantized model, or the blocks of a half-precision model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Generic, TypeVar

import onnx

from ..errors import InputError
from ..findings.quantization_report import LayerExclusion, MetricReport, format_metric
from ..types import Arrays, Progress
from . import accuracy

# Number of batches on which each part is lowered alone, to measure its error
_FEW = 2
# Maximum number of parts that an error message lists
_NAMED = 5
# Plan of one part: the scales of a quantized layer, or a half-precision block
P = TypeVar("P")


@dataclass(frozen=True)
class ExclusionWords:
    """Words of the messages.

    Attributes:
        part: "layer" or "block".
        lowered: "quantized" or "in half precision".
        remedy: what the user can do besides lowering the threshold.
    """

    part: str
    lowered: str
    remedy: str


LAYERS = ExclusionWords("layer", "quantized", "pass another --calibration")
BLOCKS = ExclusionWords("block", "in half precision", "pass --keep-io, or omit --precision")


@dataclass(frozen=True)
class LoweredSelection(Generic[P]):
    """Choice of lowered parts and its accuracy.

    Attributes:
        proto: the float model; for a quantized model after the migrations.
        plans: plans of the lowered parts, by name.
        write: function that writes the file for some plans.
        judged: metrics that the file reaches.
        exclusions: steps of the exclusion, each with the parts that it left in float.
        errors: name of a part → error of the model if only this part is lowered.
    """

    proto: onnx.ModelProto
    plans: Mapping[str, P]
    write: Callable[[Mapping[str, P]], onnx.ModelProto]
    judged: tuple[MetricReport, ...]
    exclusions: tuple[LayerExclusion, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def build_file(self) -> onnx.ModelProto:
        """Write the file with all plans of this selection. Each access writes it again."""
        return self.write(self.plans)


def exclude_parts(
    work: LoweredSelection[P],
    judging: accuracy.AccuracyJudge,
    float32: accuracy.Outputs,
    samples: Sequence[Arrays],
    names: Mapping[str, str],
    words: ExclusionWords = LAYERS,
    progress: Progress | None = None,
) -> LoweredSelection[P]:
    """Keep as few parts in float as the metrics allow.

    First, the error of each part is measured: only this part is lowered, and the model runs on calibration samples.
    Parts are then excluded in the order of their errors, the largest error first. Each step doubles the number of
    excluded parts until the metrics are reached. Then bisection between the last two numbers finds the smallest
    sufficient number. The metrics of each step are measured on the judging samples.

    Args:
        float32: outputs of the original file on the judging samples.
        samples: calibration samples.
        names: name of each part in the report, by its name in ``work.plans``.
        words: words of the messages.

    Returns:
        ``work`` with the remaining plans, the metrics reached, the steps and the errors.

    Raises:
        InputError: the float32 file misses a metric, or a metric is missed even with only one lowered part.
    """
    told: dict[int, tuple[MetricReport, ...]] = {}
    order: list[str] = []

    def judge_selection(left_out: int) -> tuple[MetricReport, ...]:
        if left_out not in told:
            plans = {t: p for t, p in work.plans.items() if t not in order[:left_out]}
            if progress is not None:
                progress("judge", left_out, len(work.plans))
            told[left_out] = judging.measure_metrics(judging.run_samples(work.write(plans)), float32)
        return told[left_out]

    first = judge_selection(0)
    if all(j.met for j in first):
        return replace(work, judged=first)
    short = next((j for j in first if not j.float32 >= j.threshold), None)
    if short is not None:
        raise InputError(
            f"the float32 model reaches only {short.metric} {format_metric(short.float32)} of"
            f" {short.output!r} on these samples; the threshold is {format_metric(short.threshold)}. Lower the"
            " threshold"
        )
    errors = _error_per_part(work, samples, f"{words.part}s alone", progress)
    order += sorted(errors, key=lambda tensor: -errors[tensor])
    low = 0
    high = 1
    all_of_them = len(order)
    while high < all_of_them and not all(j.met for j in judge_selection(high)):
        low = high
        high = high * 2
    if high >= all_of_them:
        high = all_of_them - 1
        if not all(j.met for j in judge_selection(high)):
            worst = next(j for j in judge_selection(high) if not j.met)
            largest = ", ".join(repr(names.get(t, t)) for t in order[:_NAMED])
            raise InputError(
                f"{worst.metric} of {worst.output!r} is {format_metric(worst.value)} with only one {words.part}"
                f" {words.lowered}; the threshold is {format_metric(worst.threshold)}. The {words.part}s with the"
                f" largest errors are {largest}. Lower the threshold, or {words.remedy}"
            )
    while high - low > 1:
        between = (low + high) // 2
        low, high = (low, between) if all(j.met for j in judge_selection(between)) else (between, high)
    return replace(
        work,
        plans={t: p for t, p in work.plans.items() if t not in order[:high]},
        judged=judge_selection(high),
        exclusions=tuple(_describe_exclusions(told, order, high, names)),
        errors={names.get(t, t): e for t, e in errors.items()},
    )


def _error_per_part(
    work: LoweredSelection[P], samples: Sequence[Arrays], stage: str, progress: Progress | None
) -> dict[str, float]:
    """Measure the relative error of the outputs with each part lowered alone."""
    few = samples[:_FEW]
    right = accuracy.run_in_onnxruntime(work.proto, few, False)
    errors: dict[str, float] = {}
    for done, (tensor, plan) in enumerate(work.plans.items()):
        if progress is not None:
            progress(stage, done, len(work.plans))
        errors[tensor] = accuracy.largest_relative_error(
            accuracy.run_in_onnxruntime(work.write({tensor: plan}), few, False), right
        )
    return errors


def _describe_exclusions(
    told: Mapping[int, tuple[MetricReport, ...]], order: Sequence[str], last: int, names: Mapping[str, str]
) -> list[LayerExclusion]:
    """Describe how each step improved the worst metric."""
    steps: list[LayerExclusion] = []
    counts = sorted(count for count in told if count <= last)
    for before, after in pairwise(counts):
        new = min(told[after], key=lambda j: j.value - j.threshold)
        was = next(j for j in told[before] if (j.output, j.metric) == (new.output, new.metric))
        left_out = tuple(names.get(t, t) for t in order[before:after])
        steps.append(LayerExclusion(left_out, f"{new.metric} of {new.output}", was.value, new.value))
    return steps
