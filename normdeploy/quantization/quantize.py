"""A float32 file to one whose linear layers compute in int8, FP8 or with INT4 weights.

In this order: with ``rotate`` residual streams are rotated (`rotate`, proved); what the layers read is looked at on
samples; scales and shifts are moved from norms into the layers behind (`migrate`, proved); ranges are taken; the file
is written and judged on samples that took no part; layers that cost more than the metric allows go back to float, those
first that cost most.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from ..choices import ONNXRUNTIME
from ..errors import GraphError, InputError, NormdeployError
from ..graphs.graph import Graph
from ..graphs.opsets import needs_conversion, renumbered
from ..graphs.quantized import RECORD, ranges
from ..model import InputSpec
from ..precision.calibrate import specs_of
from ..quantized import Layer, Migration, Quantization
from ..storage.protos import copied, standard_opset
from ..types import Progress
from . import judge
from .calibration import calibrated
from .compensate import carried, compensated
from .conditions import condition_of
from .exclude import Chosen, excluded
from .gemms import as_products
from .groups import Candidate, candidates, group_of
from .linears import none_because
from .migrate import Condition, migrated
from .observe import Seen, observe
from .qdq import Plan, biases_of, least_scale, written
from .rotate import rotated
from .samples import Split
from .shifts import shifts_of
from .steps import UINT8, Step, held, step_of
from .wish import Wish, builds_for, fit, require, require_named

PROPERTY = RECORD
_LONG = {True: 60.0, False: 10.0}  # seconds that the float64 reference may take, where a metric is asked for or not


def quantized(
    proto: onnx.ModelProto,
    wish: Wish,
    split: Split | None,
    inputs: Sequence[InputSpec] = (),
    progress: Progress | None = None,
) -> tuple[onnx.ModelProto, Quantization]:
    """``proto`` quantized, and the account of it.

    Args:
        proto: a float32 model with its weights, its norms single nodes; not changed.
        split: the samples; None for INT4 weights alone, which are then judged by nothing.
        inputs: what the model takes, where the file's own record says it.

    Raises:
        InputError: nothing can be quantized, a sample does not run, or no choice of layers reaches the metrics.
        GraphError: the opset can't be raised as far as the types need.
    """
    require(proto, wish)
    before = _raised(copied(proto), max(wish.weight.since, 13))
    source, notes = before, list[str]()
    turned: tuple[Migration, ...] = ()
    if wish.dynamic:
        before = as_products(before)
    if wish.rotate:
        before, turned = rotated(before)
        if all(m.kind != "rotate" for m in turned):
            notes.append("nothing was rotated: it has no norm over its channels that is one node, and no attention")
    graph = Graph(before)
    layers = candidates(graph, wish.weight, wish.block)
    require_named(layers, wish.keep_float)
    layers = fit(layers, wish)
    if all(c.reason for c in layers):
        reasons = "; ".join(f"{c.result!r}: {c.reason}" for c in layers[:3]) or none_because(before)
        raise InputError(f"nothing in the model can be quantized to {wish.to}: {reasons}")
    samples = split.calibrating if split is not None else ()
    conditions = _conditions(graph, layers, before, wish, samples, progress)
    moved, migrations = migrated(before, conditions, {c.result for c in layers if c.reason})
    migrations = (*turned, *migrations)
    left = fit(candidates(Graph(moved), wish.weight, wish.block), wish)
    plans, results, layers_told = _planned(moved, left, wish, samples, migrations, conditions, progress)
    plans = compensated(moved, left, plans, samples, progress)
    bias = wish.runtime in ONNXRUNTIME
    work = Chosen(moved, plans, lambda chosen: written(moved, chosen, bias, results), ())
    if split is not None:
        names = {c.plan.tensor: c.result for c in left}
        judging, float32, more = judge_of(source, wish, split, progress)
        notes += more
        work = excluded(work, judging, float32, samples, names, progress)
    chosen = {c.result: work.plans[c.plan.tensor] for c in left if c.plan.tensor in work.plans}
    out = work.file
    if split is not None and work.exclusions:
        lean, made = _without_idle(before, moved, conditions, wish, chosen, left, results)
        judged = judging.judged(judging.run(lean), float32)
        if all(j.met for j in judged):
            out, migrations, work = lean, (*turned, *made), replace(work, judged=judged)
    moves = judging.moved(judging.run(out), float32) if split is not None else ()
    told = tuple(
        layer
        if layer.status == "float" or layer.tensor in chosen
        else replace(layer, status="float", reason="its error costs more than the metric allows")
        for layer in layers_told
    )
    told = tuple(_rounding(replace(layer, error=work.errors.get(layer.tensor)), chosen) for layer in told)
    _state(out, wish)
    calibration = "dynamic" if wish.dynamic else wish.calibration if wish.activation is not None else "none"
    counts = split.counts if split is not None else (0, 0)
    account = Quantization(
        wish.to,
        wish.runtime,
        calibration,
        *counts,
        told,
        migrations,
        work.judged,
        work.exclusions,
        (bytes_of(source), bytes_of(out)),
        (*judge.far(moves), *notes, *judge.few(work.judged), *builds_for(wish)),
        moves,
    )
    return out, account


def _rounding(layer: Layer, chosen: Mapping[str, Plan]) -> Layer:
    """``layer`` with how its weight is rounded."""
    plan = chosen.get(layer.tensor)
    if layer.status == "float" or plan is None:
        return layer
    rounding = "nearest" if plan.stored is None else "GPTQ"
    return replace(layer, rounding=rounding)


def _without_idle(
    before: onnx.ModelProto,
    whole: onnx.ModelProto,
    conditions: Mapping[str, Condition],
    wish: Wish,
    chosen: Mapping[str, Plan],
    layers: Sequence[Candidate],
    results: Mapping[str, tuple[str, Step]],
) -> tuple[onnx.ModelProto, tuple[Migration, ...]]:
    """The file of the same layers with nothing moved for those that stay float, and the migrations.

    ``whole``: the model with everything moved. ``chosen``: the layers by their results. ``layers``, ``results``:
    as they were there.
    """
    idle = {c.result for c in layers if c.result not in chosen}
    moved, migrations = migrated(before, conditions, idle)
    now = {c.result: c.plan for c in candidates(Graph(moved), wish.weight, wish.block) if c.result in chosen}
    plans = {p.tensor: carried(whole, chosen[r], moved, p) for r, p in now.items()}
    named = {c.plan.tensor: now[c.result].tensor for c in layers if c.result in now}
    behind = {t: (named[layer], step) for t, (layer, step) in results.items() if layer in named}
    return written(moved, plans, wish.runtime in ONNXRUNTIME, behind), migrations


def asked(proto: onnx.ModelProto) -> str:
    """What ``quantized`` made of a file: "int8", "fp8" or "int4"; "" for any other file."""
    text = next((p.value for p in proto.metadata_props if p.key == PROPERTY), "")
    try:
        return str(json.loads(text)["to"]) if text else ""
    except (ValueError, TypeError, KeyError):
        return ""


def _raised(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    entry = standard_opset(proto)
    if entry is None or entry.version >= opset:
        return proto
    if stuck := needs_conversion(proto, opset):
        raise GraphError(
            f"the file has opset {entry.version}, the types need {opset}, and {stuck[0]} means something else there;"
            f" export the model again with --opset {opset}"
        )
    return renumbered(proto, opset)


def _conditions(
    graph: Graph,
    layers: list[Candidate],
    proto: onnx.ModelProto,
    wish: Wish,
    samples: Sequence[Mapping[str, np.ndarray]],
    progress: Progress | None,
) -> dict[str, Condition]:
    """What serves each tensor that linear layers read."""
    by_source: dict[str, list[Candidate]] = defaultdict(list)
    for c in layers:
        if not c.reason:
            by_source[c.source].append(c)
    groups = {name: group for name, cs in by_source.items() if (group := group_of(graph, cs)) is not None}
    groups = {name: g for name, g in groups.items() if g.free or (g.scale is None and wish.runtime not in ONNXRUNTIME)}
    if not samples:
        return {}
    axes = {name: -1 if g.free else by_source[name][0].axis for name, g in groups.items()}
    seen = observe(proto, axes, samples, progress, wish.padding)
    conditions: dict[str, Condition] = {}
    form = UINT8 if wish.dynamic else wish.activation
    for done, (name, group) in enumerate(groups.items()):
        if progress is not None:
            progress("smooth", done, len(groups))
        if name in seen:
            condition = condition_of(group, seen[name], form, wish.weight, wish.block)
            if condition is not None:
                conditions[name] = condition
    return conditions


def _planned(
    proto: onnx.ModelProto,
    layers: list[Candidate],
    wish: Wish,
    samples: Sequence[Mapping[str, np.ndarray]],
    migrations: Sequence[Migration],
    conditions: Mapping[str, Condition],
    progress: Progress | None,
) -> tuple[dict[str, Plan], dict[str, tuple[str, Step]], tuple[Layer, ...]]:
    """How each layer would be written, the results that are quantized for all who read them, and the account."""
    ready = [c for c in layers if not c.reason]
    seen: Mapping[str, Seen] = {}
    ends: Mapping[str, tuple[float, float]] = {}
    form = wish.activation
    if form is not None:
        behind = {c.activated: 1 for c in ready if c.activated and wish.runtime in ONNXRUNTIME}
        seen = observe(proto, behind | {c.input: c.axis for c in ready}, samples, progress, wish.padding)
        ends = {name: (float(s.low.min()), float(s.high.max())) for name, s in seen.items()}
        if wish.calibration != "minmax" and seen:
            ends = calibrated(proto, list(seen), samples, wish.calibration, form is not UINT8, progress)
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
    shifts, biases = shifts_of(proto, ready, migrations, conditions), biases_of(proto)
    plans: dict[str, Plan] = {}
    results: dict[str, tuple[str, Step]] = {}
    told: list[Layer] = []
    for c in layers:
        layer = Layer(
            c.result, c.op, c.module, c.input, "float", c.reason, migrated=tuple(dict.fromkeys(kinds[c.result]))
        )
        reason = c.reason or (_useless(seen.get(c.input)) if form is not None else "")
        if reason:
            told.append(replace(layer, reason=reason))
            continue
        step = None if form is None else step_of(*ends[c.input], form)
        step = None if step is None else replace(step, scale=float(held(step.scale, wish.scales)))
        plans[c.plan.tensor] = replace(
            c.plan,
            step=step,
            dynamic=wish.dynamic,
            scales=wish.scales,
            shift=shifts.get(c.plan.tensor),
            least=0.0 if step is None else least_scale(biases.get(c.plan.tensor), step, c.plan, c.outputs),
        )
        if form is not None and c.activated in ends and wish.runtime in ONNXRUNTIME:
            results[c.activated] = c.plan.tensor, step_of(*ends[c.activated], form)
        low, high = ends.get(c.input, (None, None))
        told.append(
            replace(
                layer,
                status="quantized",
                weight=_granularity(c),
                activation="uint8, dynamic" if wish.dynamic else "" if form is None else form.name,
                low=low,
                high=high,
                scale=None if step is None else step.scale,
                zero_point=None if step is None else step.zero_point,
            )
        )
    return plans, results, tuple(told)


def _useless(seen: Seen | None) -> str:
    if seen is None:
        return "its input has no element, or a number that is not finite, on the samples"
    if float(seen.low.min()) == float(seen.high.max()):
        return f"its input is {float(seen.low.min()):g} on all samples: no range can be taken of it"
    return ""


def _granularity(c: Candidate) -> str:
    if c.plan.block:
        return f"{c.plan.form.name} in blocks of {c.plan.block}"
    return f"{c.plan.form.name} for each of {c.outputs} channels" if c.plan.axis is not None else c.plan.form.name


def judge_of(
    proto: onnx.ModelProto, wish: Wish, split: Split, progress: Progress | None
) -> tuple[judge.Judge, judge.Outputs, list[str]]:
    """The judge, what the float32 file gives, and notes."""
    from ..runtimes.file64 import File64Runner

    optimize = wish.runtime in ONNXRUNTIME
    float32 = judge.run(proto, split.judging, optimize)
    reference: judge.Outputs = [dict(outputs) for outputs in float32]
    notes: list[str] = []
    try:
        runner, start = File64Runner(proto), time.perf_counter()
        for number, sample in enumerate(split.judging):
            if progress is not None:
                progress("float64", number, len(split.judging))
            reference[number] = dict(runner.infer(sample))
            if time.perf_counter() - start > _LONG[bool(wish.policy)] and number + 1 < len(reference):
                notes.append(
                    f"{number + 1} of {len(reference)} batches were judged against float64, the others against float32:"
                    " float64 takes too long"
                )
                break
    except NormdeployError as error:
        notes.append(f"judged against float32: {error}")
    return judge.Judge(split.judging, reference, wish.policy, optimize), float32, notes


def _state(proto: onnx.ModelProto, wish: Wish) -> None:
    """Say in the file what was asked."""
    kept = [p for p in proto.metadata_props if p.key != PROPERTY]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    value: dict[str, Any] = {"to": wish.to, "runtime": wish.runtime, "calibration": wish.calibration}
    value["ranges"] = ranges(proto)
    proto.metadata_props.add(key=PROPERTY, value=json.dumps(value, sort_keys=True))


def bytes_of(proto: onnx.ModelProto) -> int:
    bits = {onnx.TensorProto.INT4: 4, onnx.TensorProto.UINT4: 4}
    return sum(
        int(np.prod(t.dims))
        * bits.get(t.data_type, 8 * onnx.helper.tensor_dtype_to_np_dtype(t.data_type).itemsize)
        // 8
        for t in proto.graph.initializer
    )


def described(proto: onnx.ModelProto, inputs: Sequence[InputSpec]) -> Sequence[InputSpec]:
    """What the samples are held against: the file's record, or what its inputs state."""
    return inputs or specs_of(proto)
