"""Quantize the linear layers of a float32 file to int8, FP8 or INT4.

The steps are, in this order:

1. If ``rotate`` is set, rotate residual streams (`stream_rotation`, proved).
2. Collect statistics of the layers' inputs on samples.
3. Move scales and shifts from norms into the layers after them (`scale_migration`, proved).
4. Measure ranges.
5. Write the file, and measure its metrics on samples that were not used for calibration.
6. While a metric is missed, leave layers in float, beginning with the layers that cause the largest error.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from ..compare.policy import Policy
from ..errors import GraphError, InputError, NormdeployError
from ..findings.quantization_report import LayerReport, Migration, QuantizationReport
from ..graphs.graph import Graph
from ..graphs.opset_conversion import ops_needing_conversion, raise_opset_number
from ..graphs.quantization_info import RECORD, quantized_ranges
from ..model import InputSpec
from ..option_values import ONNXRUNTIME
from ..precision.tensor_ranges import calibration_input_specs
from ..storage.proto_traversal import copy_model, set_metadata, standard_opset
from ..types import Arrays, Progress
from . import accuracy
from .activation_stats import ActivationStats, observe_activations
from .bias_corrections import find_input_shifts
from .gemm_splitting import split_gemms
from .gptq import carry_over_codes, compensate_rounding
from .layer_exclusion import LoweredSelection, exclude_parts
from .layer_groups import LayerCandidate, find_candidates, layer_group
from .linear_layers import explain_no_layers
from .number_formats import UINT8, ScaleZeroPoint, round_scales_up, step_for_range
from .ort_calibration import calibrate_ranges
from .qdq_writer import LayerPlan, layer_biases, smallest_scale_for_bias, write_quantized
from .quantization_request import (
    QuantizationRequest,
    build_notes,
    mark_excluded_layers,
    require_matching_patterns,
    require_valid_request,
)
from .sample_split import SampleSplit
from .scale_migration import InputCondition, migrate_scales
from .smoothing import choose_condition
from .stream_rotation import rotate_streams

# Whether a metric is requested → maximum number of seconds that the float64 reference may take
_LONG = {True: 60.0, False: 10.0}


def quantize_model(
    proto: onnx.ModelProto,
    wish: QuantizationRequest,
    split: SampleSplit | None,
    progress: Progress | None = None,
) -> tuple[onnx.ModelProto, QuantizationReport]:
    """Quantize the linear layers of a model.

    Args:
        proto: a float32 model with its weights, in which each norm is a single node; not changed.
        split: the samples. May be None for INT4 weights and dynamic ranges; then no metric is measured.

    Returns:
        the quantized model and a report.

    Raises:
        InputError: nothing can be quantized, a sample does not run, or no choice of layers reaches the metrics.
        GraphError: the types need a higher opset, and the file can't be converted to it.
    """
    require_valid_request(proto, wish)
    before = _raise_opset(copy_model(proto), max(wish.weight_format.since, 13))
    source = before
    notes = list[str]()
    turned: tuple[Migration, ...] = ()
    if wish.dynamic:
        before = split_gemms(before)
    if wish.rotate:
        before, turned = rotate_streams(before)
        if all(m.kind != "rotate" for m in turned):
            notes.append("nothing was rotated: the model has no attention and no one-node norm over its channels")
    graph = Graph(before)
    layers = find_candidates(graph, wish.weight_format, wish.block_size)
    require_matching_patterns(layers, wish.keep_float)
    layers = mark_excluded_layers(layers, wish)
    if all(c.reason for c in layers):
        reasons = "; ".join(f"{c.result!r}: {c.reason}" for c in layers[:3]) or explain_no_layers(before)
        raise InputError(f"nothing in the model can be quantized to {wish.to}: {reasons}")
    samples = split.calibrating if split is not None else ()
    task = _CalibrationTask(wish, samples, progress)
    conditions = _choose_conditions(graph, layers, before, task)
    moved, migrations = migrate_scales(before, conditions, {c.result for c in layers if c.reason})
    migrations = (*turned, *migrations)
    left = mark_excluded_layers(find_candidates(Graph(moved), wish.weight_format, wish.block_size), wish)
    plans, results, layers_told = _plan_layers(moved, left, task, migrations, conditions)
    plans = compensate_rounding(moved, left, plans, samples, progress)
    bias = wish.runtime in ONNXRUNTIME
    work = LoweredSelection(moved, plans, lambda chosen: write_quantized(moved, chosen, bias, results), ())
    if split is not None:
        names = {c.plan.tensor: c.result for c in left}
        judging, float32, more = make_judge(source, wish.policy, split, progress, optimize=wish.runtime in ONNXRUNTIME)
        notes += more
        work = exclude_parts(work, judging, float32, samples, names, progress=progress)
    chosen = {c.result: work.plans[c.plan.tensor] for c in left if c.plan.tensor in work.plans}
    out = work.build_file
    if split is not None and work.exclusions:
        idle = {c.result for c in left if c.result not in chosen}
        unmoved, made = migrate_scales(before, conditions, idle)
        lean = _carry_over_layers(moved, unmoved, wish, chosen, results)
        judged = judging.measure_metrics(judging.run_samples(lean), float32)
        if all(j.met for j in judged):
            out = lean
            migrations = (*turned, *made)
            work = replace(work, judged=judged)
    moves = judging.measure_drift(judging.run_samples(out), float32) if split is not None else ()
    told = tuple(
        layer
        if layer.status == "float" or layer.tensor in chosen
        else replace(layer, status="float", reason="its error exceeds the metric's limit")
        for layer in layers_told
    )
    told = tuple(_with_rounding_method(replace(layer, error=work.errors.get(layer.tensor)), chosen) for layer in told)
    _record_request(out, wish)
    if wish.dynamic:
        calibration = "dynamic"
    elif wish.activation_format is not None:
        calibration = wish.calibration
    else:
        calibration = "none"
    counts = split.sample_counts if split is not None else (0, 0)
    account = QuantizationReport(
        wish.to,
        wish.runtime,
        calibration,
        *counts,
        told,
        migrations,
        work.judged,
        work.exclusions,
        (model_bytes(source), model_bytes(out)),
        (*accuracy.drift_notes(moves), *notes, *accuracy.few_sample_notes(work.judged), *build_notes(wish)),
        moves,
    )
    return out, account


def _with_rounding_method(layer: LayerReport, chosen: Mapping[str, LayerPlan]) -> LayerReport:
    """Add to a layer's report the method by which its weight was rounded."""
    plan = chosen.get(layer.tensor)
    if layer.status == "float" or plan is None:
        return layer
    if plan.stored is None:
        rounding = "nearest"
    else:
        rounding = "GPTQ"
    return replace(layer, rounding=rounding)


def _carry_over_layers(
    whole: onnx.ModelProto,
    moved: onnx.ModelProto,
    wish: QuantizationRequest,
    chosen: Mapping[str, LayerPlan],
    results: Mapping[str, tuple[str, ScaleZeroPoint]],
) -> onnx.ModelProto:
    """Quantize the same layers in ``moved``, a copy of the model without migrations for layers that stay float.

    Args:
        whole: model with all migrations.
        chosen: result of a layer → its plan in ``whole``, for each quantized layer.
        results: quantized results in ``whole``, as `write_quantized` takes them.
    """
    now = {
        c.result: c.plan
        for c in find_candidates(Graph(moved), wish.weight_format, wish.block_size)
        if c.result in chosen
    }
    plans = {p.tensor: carry_over_codes(whole, chosen[r], moved, p) for r, p in now.items()}
    named = {chosen[r].tensor: p.tensor for r, p in now.items()}
    behind = {t: (named[layer], step) for t, (layer, step) in results.items() if layer in named}
    return write_quantized(moved, plans, wish.runtime in ONNXRUNTIME, behind)


def _raise_opset(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    entry = standard_opset(proto)
    if entry is None or entry.version >= opset:
        return proto
    if stuck := ops_needing_conversion(proto, opset):
        raise GraphError(
            f"the file has opset {entry.version}, but the types need opset {opset}, in which {stuck[0]} has "
            f"another meaning; export the model again with --opset {opset}"
        )
    return raise_opset_number(proto, opset)


@dataclass(frozen=True)
class _CalibrationTask:
    """Request, calibration samples and progress callback."""

    wish: QuantizationRequest
    samples: Sequence[Arrays]
    progress: Progress | None


def _choose_conditions(
    graph: Graph, layers: list[LayerCandidate], proto: onnx.ModelProto, task: _CalibrationTask
) -> dict[str, InputCondition]:
    """Choose the best condition for each tensor that linear layers read."""
    if not task.samples:
        return {}
    wish = task.wish
    by_source: dict[str, list[LayerCandidate]] = defaultdict(list)
    for c in layers:
        if not c.reason:
            by_source[c.source].append(c)
    groups = {name: group for name, cs in by_source.items() if (group := layer_group(graph, cs)) is not None}
    groups = {name: g for name, g in groups.items() if g.free or (g.scale is None and wish.runtime not in ONNXRUNTIME)}
    axes = {name: -1 if g.free else by_source[name][0].axis for name, g in groups.items()}
    seen = observe_activations(proto, axes, task.samples, task.progress, wish.counts_padding)
    conditions: dict[str, InputCondition] = {}
    form = UINT8 if wish.dynamic else wish.activation_format
    for done, (name, group) in enumerate(groups.items()):
        if task.progress is not None:
            task.progress("smooth", done, len(groups))
        if name in seen:
            condition = choose_condition(group, seen[name], form, wish.weight_format, wish.block_size)
            if condition is not None:
                conditions[name] = condition
    return conditions


def _plan_layers(
    proto: onnx.ModelProto,
    layers: list[LayerCandidate],
    task: _CalibrationTask,
    migrations: Sequence[Migration],
    conditions: Mapping[str, InputCondition],
) -> tuple[dict[str, LayerPlan], dict[str, tuple[str, ScaleZeroPoint]], tuple[LayerReport, ...]]:
    """Plan the quantization of each layer.

    Returns:
        plans by node result, quantized results as `write_quantized` takes them, and a report per layer.
    """
    wish = task.wish
    ready = [c for c in layers if not c.reason]
    seen: Mapping[str, ActivationStats] = {}
    ends: Mapping[str, tuple[float, float]] = {}
    form = wish.activation_format
    if form is not None:
        behind = {c.activated: 1 for c in ready if c.activated and wish.runtime in ONNXRUNTIME}
        axes = behind | {c.input: c.axis for c in ready}
        seen = observe_activations(proto, axes, task.samples, task.progress, wish.counts_padding)
        ends = {name: (float(s.low.min()), float(s.high.max())) for name, s in seen.items()}
        if wish.calibration != "minmax" and seen:
            ends = calibrate_ranges(proto, list(seen), task.samples, wish.calibration, form is not UINT8, task.progress)
    kinds: dict[str, list[str]] = defaultdict(list)
    reach: dict[str, float] = {}
    for m in migrations:
        if m.status == "made":
            for name in m.linears:
                kinds[name].append(m.kind)
                condition = conditions.get(m.norm)
                if condition is not None and condition.reach is not None:
                    reach[name] = condition.reach
    if wish.calibration == "minmax":
        ends = {**ends, **{c.input: (-reach[c.result], reach[c.result]) for c in ready if c.result in reach}}
    shifts = find_input_shifts(proto, ready, migrations, conditions)
    biases = layer_biases(proto)
    plans: dict[str, LayerPlan] = {}
    results: dict[str, tuple[str, ScaleZeroPoint]] = {}
    told: list[LayerReport] = []
    for c in layers:
        layer = LayerReport(
            c.result, c.op, c.module, c.input, "float", c.reason, migrated=tuple(dict.fromkeys(kinds[c.result]))
        )
        reason = c.reason or (_describe_unusable_stats(seen.get(c.input)) if form is not None else "")
        if reason:
            told.append(replace(layer, reason=reason))
            continue
        step = None if form is None else step_for_range(*ends[c.input], form)
        step = None if step is None else replace(step, scale=float(round_scales_up(step.scale, wish.scale_dtype)))
        plans[c.plan.tensor] = replace(
            c.plan,
            step=step,
            dynamic=wish.dynamic,
            scales=wish.scale_dtype,
            shift=shifts.get(c.plan.tensor),
            least=0.0 if step is None else smallest_scale_for_bias(biases.get(c.plan.tensor), step, c.plan, c.outputs),
        )
        if form is not None and c.activated in ends and wish.runtime in ONNXRUNTIME:
            results[c.activated] = c.plan.tensor, step_for_range(*ends[c.activated], form)
        low, high = ends.get(c.input, (None, None))
        told.append(
            replace(
                layer,
                status="quantized",
                weight=_describe_granularity(c),
                activation="uint8, dynamic" if wish.dynamic else "" if form is None else form.name,
                low=low,
                high=high,
                scale=None if step is None else step.scale,
                zero_point=None if step is None else step.zero_point,
            )
        )
    return plans, results, tuple(told)


def _describe_unusable_stats(seen: ActivationStats | None) -> str:
    if seen is None:
        return "its input is empty or contains NaN or Inf on the samples"
    if float(seen.low.min()) == float(seen.high.max()):
        return f"its input is {float(seen.low.min()):g} on all samples, so it has no range"
    return ""


def _describe_granularity(c: LayerCandidate) -> str:
    if c.plan.block:
        return f"{c.plan.form.name} in blocks of {c.plan.block}"
    if c.plan.axis is not None:
        return f"{c.plan.form.name} for each of {c.outputs} channels"
    return c.plan.form.name


def make_judge(
    proto: onnx.ModelProto, policy: Policy, split: SampleSplit, progress: Progress | None, *, optimize: bool
) -> tuple[accuracy.AccuracyJudge, accuracy.Outputs, list[str]]:
    """Build the `AccuracyJudge` of a lowered file. The reference is float64 if the time allows it.

    Args:
        proto: the float32 model.
        optimize: True to let onnxruntime optimize the files.

    Returns:
        the judge, the outputs of the float32 file on the judging samples, and notes.
    """
    from ..runtimes.onnx_float64 import OnnxFloat64Runner

    float32 = accuracy.run_in_onnxruntime(proto, split.judging, optimize)
    reference: accuracy.Outputs = [dict(outputs) for outputs in float32]
    notes: list[str] = []
    try:
        runner = OnnxFloat64Runner(proto)
        start = time.perf_counter()
        for number, sample in enumerate(split.judging):
            if progress is not None:
                progress("float64", number, len(split.judging))
            reference[number] = dict(runner.infer(sample))
            if time.perf_counter() - start > _LONG[bool(policy)] and number + 1 < len(reference):
                notes.append(
                    f"{number + 1} of {len(reference)} batches were judged against float64, the others "
                    "against float32, because float64 takes too long"
                )
                break
    except NormdeployError as error:
        notes.append(f"judged against float32: {error}")
    return accuracy.AccuracyJudge(split.judging, reference, policy, optimize), float32, notes


def _record_request(proto: onnx.ModelProto, wish: QuantizationRequest) -> None:
    """Record the request and the ranges in the file's metadata."""
    value: dict[str, Any] = {"to": wish.to, "runtime": wish.runtime, "calibration": wish.calibration}
    set_metadata(proto, RECORD, value | {"ranges": quantized_ranges(proto)})


def model_bytes(proto: onnx.ModelProto) -> int:
    """Compute the size of a model's initializers.

    Returns:
        the size in bytes.
    """
    bits = {onnx.TensorProto.INT4: 4, onnx.TensorProto.UINT4: 4}
    return sum(
        int(np.prod(t.dims))
        * bits.get(t.data_type, 8 * onnx.helper.tensor_dtype_to_np_dtype(t.data_type).itemsize)
        // 8
        for t in proto.graph.initializer
    )


def recorded_or_declared_inputs(proto: onnx.ModelProto, inputs: Sequence[InputSpec]) -> Sequence[InputSpec]:
    """Return the specs of the inputs, against which samples are checked.

    Returns:
        ``inputs`` from the file's record, or else the inputs that the file declares.
    """
    return inputs or calibration_input_specs(proto)
