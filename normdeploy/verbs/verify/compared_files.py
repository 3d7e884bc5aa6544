"""Open the files that are compared with a model, and match the names of their inputs and outputs with the model's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from ...errors import InputError
from ...graphs.decomposed_dequantize import has_code_casts, rewrite_as_dequantize
from ...graphs.qoperator_expansion import unexpandable_ops
from ...graphs.quantization_info import is_quantized, quantized_ranges, read_recorded_ranges, read_recorded_runtime
from ...option_values import TENSORRT
from ...precision.type_conversion import FORMATS
from ...storage.onnx_files import load_onnx, load_small_weights
from ..build.build_function import Engine
from .io_matching import Ends, Map, graph_ends, match_names, parse_map, require_used_names
from .quantization_budget import StepBudget
from .reference_models import (
    Original,
    find_unused_inputs,
    model_outputs,
    model_unit_roundoff,
    rounds_itself,
    stores_codes,
)
from .runtime_candidates import ComparedFile, File, inspect_file

# Relative tolerance for equal ranges, because scales are float32.
_SAME_RANGE = 1e-6


def open_files_of_model(
    model: Original, files: Iterable[File], names: Map | None
) -> tuple[list[ComparedFile], list[str]]:
    """Open the files that are compared with a model, each once.

    ONNX files and engines are distinguished by content.

    Args:
        names: as for ``verify``.

    Returns:
        (opened files, notes on them).

    Raises:
        InputError: no file was given; a file is missing or has other inputs than the model; or a name in ``names`` is
            in no file.
        GraphError: a file is neither an engine nor ONNX.
    """
    paths = list(
        {os.path.realpath(p): p for p in (Path(f.path if isinstance(f, Engine) else f) for f in files)}.values()
    )
    if not paths:
        raise InputError("no file to compare with the model; pass an ONNX file or an engine")
    called = [p.name for p in paths]
    given = parse_map(names or (), model)
    every = [inspect_file(path, path.name if called.count(path.name) == 1 else str(path)) for path in paths]
    graphs = {s.label: load_small_weights(s.path) for s in every if not s.runtime}
    if len(graphs) == len(every):
        require_used_names(given, model, {label: _io_names(proto.graph) for label, proto in graphs.items()})
    ends = model_outputs(model)
    unused = find_unused_inputs(model)
    own_unit = model_unit_roundoff(model)
    keeps_codes = stores_codes(model)
    # A model that rounds in the same way as the quantized file is compared with it directly, without an error budget.
    rounds = rounds_itself(model)
    named = list[ComparedFile]()
    notes = list[str]()
    for subject in every:
        if subject.runtime:
            inputs = {spec.name for spec in model.inputs}
            own = {theirs: ours for theirs, ours in given.items() if ours in inputs}
            named.append(replace(subject, inputs=own, outputs={a: b for a, b in given.items() if a not in own}))
            continue
        matched = match_names(subject.label, graphs[subject.label].graph, model, ends, given, names is not None, unused)
        notes += matched.notes
        subject = replace(subject, inputs=matched.inputs, outputs=matched.outputs, spared=matched.spared)
        subject = replace(subject, types=subject.rename_types(subject.types))
        if any(own_unit >= FORMATS[half].unit_roundoff for half in subject.computing.halves):
            # The model itself computes in half precision, so its own rounding errors determine the allowed error.
            subject = replace(subject, precision="", computing=replace(subject.computing, lowered=()))
        proto = graphs[subject.label]
        if has_code_casts(proto) and not keeps_codes:
            proto = rewrite_as_dequantize(load_onnx(subject.path))
        if is_quantized(proto) and not rounds:
            subject, note = _with_step_budget(subject, proto)
            notes.append(note)
        named.append(subject)
    return named, notes


def _with_step_budget(subject: ComparedFile, proto: onnx.ModelProto) -> tuple[ComparedFile, str]:
    """Return a quantized file with its error budget, and a note that explains the budget."""
    if inside := unexpandable_ops(proto):
        return subject, (
            f"{subject.label} is quantized by {', '.join(inside)}, for which there is no error budget; pass a"
            " metric: --metric 'cosine>=0.99'"
        )
    calibrated, altered = _calibrated_tensors(proto)
    budget = StepBudget(subject, calibrated, altered)
    return replace(subject, steps=budget, elsewhere=read_recorded_runtime(proto) in TENSORRT), (
        f"{subject.label} is quantized: the default rule allows the effect on the outputs of half a step of"
        " each scale, on finite inputs of usual size"
    )


def _calibrated_tensors(proto: onnx.ModelProto) -> tuple[list[str], str]:
    """Find the quantized tensors whose ranges equal the recorded ranges of the calibration.

    Returns:
        (their names, ""), or ([], a reason) if a range was changed after calibration.
    """
    record = read_recorded_ranges(proto)
    now = quantized_ranges(proto)
    for name, (low, high) in record.items():
        ends = now.get(name)
        if ends is not None and not np.allclose(ends, (low, high), rtol=_SAME_RANGE, atol=0):
            return [], (
                f"the range of {name!r} is {ends[0]:.4g} to {ends[1]:.4g}, but the file records {low:.4g} to"
                f" {high:.4g} from calibration: its scale or zero point was changed later; quantize the model"
                " again"
            )
    return [name for name in record if name in now], ""


def _io_names(graph: onnx.GraphProto) -> Ends:
    inputs, outputs = graph_ends(graph)
    return [end.name for end in inputs], [end.name for end in outputs]
