"""Measure drift, the errors of inner tensors, in the files that ``verify`` compares, in each form in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx

from ...errors import NormdeployError
from ...model import LoadedModel
from ...precision.emulated_half import emulate_half
from ...storage.onnx_files import load_onnx
from ...types import Arrays, Progress
from .compute_budget import BudgetClock
from .io_matching import rename_ends
from .runtime_candidates import OFF, ON, STEPWISE, ComparedFile
from .tensor_drift import DriftPoint, apply_ort_optimizer, measure_drift


def measure_file_drift(
    model: LoadedModel,
    subject: ComparedFile,
    feeds: Arrays,
    precision: str,
    progress: Progress | None = None,
    clock: BudgetClock | None = None,
) -> tuple[list[DriftPoint], list[str]]:
    """Measure drift of a file on the CPU: without onnxruntime's optimizer, with it, and in stepwise half precision.

    Args:
        feeds: inputs by name.
        precision: half precision of the file, or "" to skip the stepwise form.

    Returns:
        (points of all forms, a note for each form that could not be measured).
    """
    label = subject.label
    proto = load_onnx(subject.path)
    points = list[DriftPoint]()
    notes = list[str]()
    if subject.inputs or subject.outputs:
        proto = rename_ends(proto, subject.inputs, subject.outputs)
    forms: list[tuple[str, Callable[[onnx.ModelProto], onnx.ModelProto] | None]] = [
        (OFF, None),
        (ON, apply_ort_optimizer),
    ]
    if precision:
        forms.append((STEPWISE, emulate_half))
    for runtime, form in forms:
        try:
            if form is None:
                ran = None
            else:
                ran = form(proto)
            where = f"{label} in {runtime}"
            seen = measure_drift(model, proto, feeds, precision, progress, ran=ran, clock=clock, label=where)
            points += [replace(point, runtime=runtime, file=label) for point in seen]
        except NormdeployError as error:
            notes.append(f"no drift of {label} in {runtime}: {error}")
    return points, notes
