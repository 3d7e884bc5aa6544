"""Convert an ONNX file to half precision, so that TensorRT 10 and 11, TensorRT-RTX and onnxruntime agree on its types.

The conversion is the last stage. It takes a float32 model whose norms are single nodes. Nodes that lose too much
accuracy in half precision stay float32, between explicit Casts. Strongly typed TensorRT and onnxruntime both obey these
Casts. `float32_regions` chooses the nodes, each with a reason, and `tensor_ranges` measures the values of tensors.
onnxruntime's converter changes the type of all other nodes (`type_conversion`).

Certificates refer to the float32 model before this stage. The half-precision model differs from it by rounding, which
``verify`` measures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ..errors import GraphError, InputError, NormdeployError
from ..findings.precision_report import Float32Region, PrecisionReport
from ..graphs.proto_queries import captured_names
from ..graphs.shape_inference import infer_types
from ..model import InputSpec
from ..storage.proto_traversal import copy_model, metadata_text, set_metadata
from ..types import Progress
from .cast_motion import move_casts_behind_transposes
from .exact_arguments import find_exact_arguments
from .float32_reasons import HEADROOM, describe_overflow, float32_inputs
from .float32_regions import find_float32_regions
from .logits import fuse_logarithms
from .mask_constants import expand_fills, find_mask_constants, mask_ranges
from .precision_view import PrecisionView
from .preparation import file_opset, prepare_for_half, tensor_elem_types
from .tensor_ranges import (
    Samples,
    TensorRange,
    calibration_input_specs,
    fit_samples_to_model,
    generate_samples,
    input_ranges,
    measure_ranges,
    require_small_run,
)
from .type_conversion import FORMATS, CastWriter, Float32Parts, HalfFormat, initializer_values, narrow_types

PROPERTY = "normdeploy.precision"


@dataclass(frozen=True)
class HalfPlan:
    """Model that is ready for the conversion: its ranges are measured, and nothing is written yet.

    Attributes:
        proto: the prepared float32 model; not changed by `write_half`.
        carried: tensors that carry a mask.
        wide_inputs, wide_outputs: names of the inputs and outputs that stay float32.
        keep_io: True if inputs and outputs were requested to stay float32.
        calibrated: origin of the calibration inputs: "given", "generated" or "".
        samples: number of inputs that calibration ran on.
    """

    proto: onnx.ModelProto
    view: PrecisionView
    carried: set[str]
    wide_inputs: set[str]
    wide_outputs: set[str]
    keep_io: bool
    calibrated: str
    samples: int
    notes: tuple[str, ...]


def convert_to_half(
    proto: onnx.ModelProto,
    to: str,
    samples: Samples | None = None,
    *,
    inputs: Sequence[InputSpec] = (),
    keep_io: bool = False,
    progress: Progress | None = None,
) -> tuple[onnx.ModelProto, PrecisionReport]:
    """Convert ``proto`` to half precision.

    Args:
        proto: a float32 model with its weights; not changed.
        to: "fp16" or "bf16".
        samples: the user's inputs for calibration, each a mapping name -> array; None to generate inputs.
        inputs: specs of the generated inputs; if empty, the file's declarations are used.
        keep_io: True if inputs and outputs stay float32.
        progress: called with (stage, done, total).

    Returns:
        the converted model, and a report.

    Raises:
        InputError: ``to`` is unknown, the samples do not fit the model, or the file has the other half-precision type.
        GraphError: the type of a tensor can't be inferred.
    """
    return write_half(plan_half(proto, to, samples, inputs=inputs, keep_io=keep_io, progress=progress))


def plan_half(
    proto: onnx.ModelProto,
    to: str,
    samples: Samples | None = None,
    *,
    inputs: Sequence[InputSpec] = (),
    keep_io: bool = False,
    progress: Progress | None = None,
) -> HalfPlan:
    """Prepare a model for the conversion, and measure the ranges of its tensors. The arguments are `convert_to_half`'s.

    Raises:
        InputError, GraphError: as for `convert_to_half`.
    """
    if to not in FORMATS:
        raise InputError(f"unknown precision {to!r}; choose one of {', '.join(FORMATS)}")
    form = FORMATS[to]
    proto, notes = prepare_for_half(proto, form)
    fuse_logarithms(proto.graph)
    expand_fills(proto.graph, form)
    view = PrecisionView(proto.graph, tensor_elem_types(proto), form, file_opset(proto))
    _require_float32_model(view, form)
    masked = find_mask_constants(view)
    carried = masked.carried
    _replace_initializers(proto.graph, {name: v for name, (v, _) in masked.arrays.items()})
    view.__dict__.pop("constants", None)
    notes += [
        f"{name!r} is only a mask: {low:.3g} is out of range for {form.name} and became {v.min():.5g}"
        for name, (v, low) in masked.arrays.items()
    ]
    ran, calibrated, remarks = _calibrate_ranges(proto, view, samples, inputs, progress)
    notes += remarks
    held = [t for t in proto.graph.initializer if t.name in view.floating_tensors and t.name not in view.constants]
    # The initializers of inputs are their default values, so samples may omit these inputs.
    defaults = input_ranges([{t.name: initializer_values(t) for t in held}])
    unseen = defaults | mask_ranges(view, carried)
    view.ranges = {**view.ranges, **{name: r.union(view.ranges.get(name, r)) for name, r in unseen.items()}}
    wide_inputs, wide_outputs = _float32_inputs_and_outputs(proto, view, carried, keep_io, notes)
    return HalfPlan(proto, view, carried, wide_inputs, wide_outputs, keep_io, calibrated, ran, tuple(notes))


def write_half(
    plan: HalfPlan, requested: Mapping[int, Float32Region] | None = None
) -> tuple[onnx.ModelProto, PrecisionReport]:
    """Write a planned model in half precision.

    Args:
        requested: index of a node -> its region, for nodes that stay float32 although the rules do not require it.

    Returns:
        the converted model, and a report.

    Raises:
        GraphError: a type in the result is not valid.
    """
    view, form = plan.view, plan.view.form
    wide_inputs, wide_outputs = plan.wide_inputs, plan.wide_outputs
    notes = list(plan.notes)
    kept, regions = find_float32_regions(view, plan.carried, wide_inputs, requested or {})
    proto = copy_model(plan.proto)
    before = _weight_bytes(proto)
    floating = sum(view.has_floats(i) for i in range(len(proto.graph.node)))
    always = {
        i: places for i, node in enumerate(proto.graph.node) if (places := float32_inputs(node, view.opset, form))
    }
    float32 = Float32Parts(frozenset(kept), wide_inputs, wide_outputs, always)
    casts = CastWriter(proto.graph, view.floating_tensors, float32, form)
    apart = casts.rewrite_graph() | wide_outputs | {o for i in casts.wide_nodes for o in proto.graph.node[i].output}
    narrow_types(proto, form, casts.wide_nodes, apart)
    move_casts_behind_transposes(proto.graph, form)
    _drop_unread_weights(proto.graph)
    ends = _io_types(proto)
    if len(kept) == floating and form.dtype.name not in {*ends[0].values(), *ends[1].values()}:
        notes.append(
            f"no node became {form.dtype.name}: every node stays float32, and no engine will be built from the file"
        )
    _record_conversion(proto, form.name, plan.keep_io, ends)
    _validate_types(proto)
    account = PrecisionReport(
        form.name,
        tuple(regions),
        floating,
        len(kept),
        casts.count,
        (before, _weight_bytes(proto)),
        plan.calibrated,
        plan.samples,
        *ends,
        notes=tuple(notes),
    )
    return proto, account


def recorded_precision(proto: onnx.ModelProto) -> str:
    """Read the precision that ``convert_to_half`` recorded in a file.

    Returns:
        "fp16" or "bf16", or "" for any other file.
    """
    text = metadata_text(proto, PROPERTY)
    try:
        if text:
            to = json.loads(text)["to"]
        else:
            to = ""
    except (ValueError, TypeError, KeyError):
        return ""
    if to in FORMATS:
        return to
    return ""


def builder_request(proto: onnx.ModelProto) -> dict[str, Any]:
    """Collect the types that the builder has to check for a file that ``convert_to_half`` wrote.

    Returns:
        ``precision`` and ``types`` (tensor name -> dtype name); {} for any other file.
    """
    to = recorded_precision(proto)
    if not to:
        return {}
    named = {
        name: onnx.helper.tensor_dtype_to_np_dtype(kind).name for name, (kind, _) in infer_types(proto).items() if kind
    }
    return {"precision": to, "types": named}


def recast_inputs(inputs: Sequence[InputSpec], account: PrecisionReport) -> tuple[InputSpec, ...]:
    """Update the dtypes of ``inputs`` to those of the converted file.

    Returns:
        a spec for each input.
    """
    return tuple(replace(spec, dtype=account.inputs.get(spec.name, spec.dtype)) for spec in inputs)


# ------------------------------------------------------------------ before the conversion


def _require_float32_model(view: PrecisionView, form: HalfFormat) -> None:
    """Raise InputError if the model has the other half-precision type, or no float32 tensor."""
    if form.onnx == TensorProto.FLOAT16:
        other = TensorProto.BFLOAT16
    else:
        other = TensorProto.FLOAT16
    stated = next((name for name, kind in view.types.items() if kind == other), None)
    if stated is not None:
        raise InputError(
            f"{stated!r} is already {TensorProto.DataType.Name(other).lower()}, but {form.name} was requested; "
            "convert the float32 model"
        )
    if not any(kind == TensorProto.FLOAT for kind in view.types.values()):
        raise InputError(f"the model has no float32 tensors to convert to {form.name}")


def _replace_initializers(graph: onnx.GraphProto, arrays: Mapping[str, np.ndarray]) -> None:
    for tensor in graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(numpy_helper.from_array(arrays[tensor.name], tensor.name))


def _calibrate_ranges(
    proto: onnx.ModelProto,
    view: PrecisionView,
    samples: Samples | None,
    inputs: Sequence[InputSpec],
    progress: Progress | None,
) -> tuple[int, str, list[str]]:
    """Run the model on samples, and store the ranges of its tensors in ``view.ranges``.

    Returns:
        number of samples that ran, their origin ("given", "generated" or ""), and notes.
    """
    wanted = [name for i in range(len(proto.graph.node)) for name in view.floating_outputs(i)]
    if samples is not None:
        fit = fit_samples_to_model(samples, proto)
        view.ranges = measure_ranges(proto, wanted, fit, progress) | input_ranges(fit)
        return len(fit), "given", []
    try:
        fit = fit_samples_to_model(generate_samples(inputs or calibration_input_specs(proto)), proto)
        require_small_run(proto, wanted, fit)
        view.ranges = measure_ranges(proto, wanted, fit, progress) | input_ranges(fit)
    except NormdeployError as error:
        return (
            0,
            "",
            [
                f"not calibrated, so only constants and op types were considered: {error}; pass inputs "
                "with --calibrate in.npz"
            ],
        )
    if inputs:
        guessed = ""
    else:
        guessed = "; the file does not specify the ranges of its inputs: pass samples with --calibrate in.npz"
    return len(fit), "generated", [f"calibrated on generated inputs{guessed}"] if guessed else []


def _float32_inputs_and_outputs(
    proto: onnx.ModelProto, view: PrecisionView, carried: set[str], keep_io: bool, notes: list[str]
) -> tuple[set[str], set[str]]:
    """Choose the inputs and outputs that stay float32.

    With ``keep_io``, all inputs and outputs stay float32. Otherwise, an input or output stays float32 if half precision
    can't represent its values, or if it must not be rounded.
    """
    graph = proto.graph
    none = TensorRange(0.0, 0.0)
    inputs = {v.name for v in graph.input if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    outputs = {v.name for v in graph.output if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    if keep_io:
        return inputs, outputs
    digits = {name: argument for argument in find_exact_arguments(view) for name in argument.inputs if name in inputs}
    inputs = {name for name in inputs if describe_overflow(view, name, carried)}
    outputs = {name for name in outputs if view.ranges.get(name, none).magnitude > view.form.largest}
    stay = "it stays float32"
    notes += [
        f"input {name!r} reached {view.ranges[name].magnitude:.3g}, {describe_overflow(view, name, carried)}; {stay}"
        for name in sorted(inputs)
    ]
    notes += [
        f"output {name!r} reached {view.ranges[name].magnitude:.3g}, but the largest {view.form.name} number "
        f"is {view.form.largest:.5g}; {stay}"
        for name in sorted(outputs)
    ]
    notes += [
        f"{graph.node[a.place].op_type} {graph.node[a.place].output[0]!r} is computed from the input "
        f"{name!r}: {a.reason}; {stay}"
        for name, a in sorted(digits.items())
        if name not in inputs
    ]
    return inputs | set(digits), outputs


# ------------------------------------------------------------------ after the conversion


def _drop_unread_weights(graph: onnx.GraphProto) -> None:
    """Remove weights that no node reads any more."""
    read = {i for n in graph.node for i in (*n.input, *captured_names(n))} | {
        v.name for v in (*graph.output, *graph.input)
    }
    kept = [t for t in graph.initializer if t.name in read]
    if len(kept) < len(graph.initializer):
        del graph.initializer[:]
        graph.initializer.extend(kept)


def _io_types(proto: onnx.ModelProto) -> tuple[dict[str, str], dict[str, str]]:
    """Return the dtype names of inputs and of outputs, by name."""
    initializers = {t.name for t in proto.graph.initializer}

    def types_by_name(values: Sequence[onnx.ValueInfoProto]) -> dict[str, str]:
        tensors = [v for v in values if v.type.HasField("tensor_type") and v.name not in initializers]
        return {v.name: onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type).name for v in tensors}

    return types_by_name(proto.graph.input), types_by_name(proto.graph.output)


def _record_conversion(
    proto: onnx.ModelProto, to: str, keep_io: bool, ends: tuple[dict[str, str], dict[str, str]]
) -> None:
    """Record the request in the file's metadata, for ``build`` and ``verify``."""
    value = {"to": to, "keep_io": keep_io, "headroom": HEADROOM, "inputs": ends[0], "outputs": ends[1]}
    set_metadata(proto, PROPERTY, value)


def _validate_types(proto: onnx.ModelProto) -> None:
    """Check by onnx's type inference that each node gets inputs of valid types.

    Raises:
        GraphError: a type is not valid. This is a bug of this module, and no file is written.
    """
    try:
        onnx.shape_inference.infer_shapes(_copy_skeleton(proto), check_type=True, strict_mode=True)
    except Exception as error:
        raise GraphError(
            f"conversion to half precision failed: {' '.join(str(error).split())[:300]}; omit --precision"
        ) from error


def _copy_skeleton(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Copy ``proto`` with large weights replaced by inputs."""
    light = copy_model(proto)
    weights = [t for t in light.graph.initializer if int(np.prod(t.dims)) > 512]
    small = [t for t in light.graph.initializer if int(np.prod(t.dims)) <= 512]
    listed = {v.name for v in light.graph.input}
    light.graph.input.extend(
        onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in weights if t.name not in listed
    )
    del light.graph.initializer[:]
    light.graph.initializer.extend(small)
    return light


def _weight_bytes(proto: onnx.ModelProto) -> int:
    return sum(
        int(np.prod(t.dims)) * onnx.helper.tensor_dtype_to_np_dtype(t.data_type).itemsize
        for t in proto.graph.initializer
    )
