"""Exclude layers from quantization until the metrics are reached, with as few layers as possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import onnx

from ..errors import InputError
from ..findings.quantization_report import LayerExclusion, MetricReport
from ..types import Arrays, Progress
from . import accuracy
from .qdq_writer import LayerPlan

# Number of batches on which each layer is quantized alone, to measure its error
_FEW = 2
# Maximum number of layers that an error message lists
_NAMED = 5


@dataclass(frozen=True)
class QuantizedSelection:
    """Choice of quantized layers and its accuracy.

    Attributes:
        proto: the float model after the migrations.
        plans: plans of the quantized layers, by the first result of the layer's node.
        write: function that writes the file for some plans.
        judged: metrics that the file reaches.
        exclusions: steps of the exclusion, each with the layers that it left in float.
        errors: result of a layer → error of the model if only this layer is quantized.
    """

    proto: onnx.ModelProto
    plans: Mapping[str, LayerPlan]
    write: Callable[[Mapping[str, LayerPlan]], onnx.ModelProto]
    judged: tuple[MetricReport, ...]
    exclusions: tuple[LayerExclusion, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def build_file(self) -> onnx.ModelProto:
        """Write the file with all plans of this selection. Each access writes it again."""
        return self.write(self.plans)


def exclude_layers(
    work: QuantizedSelection,
    judging: accuracy.AccuracyJudge,
    float32: accuracy.Outputs,
    samples: Sequence[Arrays],
    names: Mapping[str, str],
    progress: Progress | None = None,
) -> QuantizedSelection:
    """Keep as few layers in float as the metrics allow.

    First, the error of each layer is measured: only this layer is quantized, and the model runs on calibration samples.
    Layers are then excluded in the order of their errors, the largest error first. Each step doubles the number of
    excluded layers until the metrics are reached. Then bisection between the last two numbers finds the smallest
    sufficient number. The metrics of each step are measured on the judging samples.

    Args:
        float32: outputs of the original file on the judging samples.
        samples: calibration samples.
        names: result of each layer, by the first result of its node.

    Returns:
        ``work`` with the remaining plans, the metrics reached, the steps and the errors.

    Raises:
        InputError: the float32 file misses a metric, or a metric is missed even with only one quantized layer.
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
            f"the float32 model reaches only {short.metric} {short.float32:.6g} of {short.output!r} on these "
            f"samples; the threshold is {short.threshold:g}. Lower the threshold"
        )
    errors = _error_per_layer(work, samples, progress)
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
            layers = ", ".join(repr(names.get(t, t)) for t in order[:_NAMED])
            raise InputError(
                f"{worst.metric} of {worst.output!r} is {worst.value:.6g} with only one layer quantized; "
                f"the threshold is {worst.threshold:g}. The layers with the largest errors are {layers}. "
                "Lower the threshold, or pass another --calibration"
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


def _error_per_layer(
    work: QuantizedSelection, samples: Sequence[Arrays], progress: Progress | None
) -> dict[str, float]:
    """Measure the relative error of the outputs with each layer quantized alone."""
    few = samples[:_FEW]
    right = accuracy.run_in_onnxruntime(work.proto, few, False)
    errors: dict[str, float] = {}
    for done, (tensor, plan) in enumerate(work.plans.items()):
        if progress is not None:
            progress("layers alone", done, len(work.plans))
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
