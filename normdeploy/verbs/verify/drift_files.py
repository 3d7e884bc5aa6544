"""Drift in the files that ``verify`` compares, in each form in which it runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import onnx

from ...errors import NormdeployError
from ...model import Model
from ...precision.stepwise import stepwise
from ...storage.files import load_onnx
from ...types import Progress
from .candidates import OFF, ON, STEPWISE, Subject
from .drift import Point, drift, optimized
from .names import renamed
from .spending import Clock


def drift_of_file(
    model: Model,
    subject: Subject,
    feeds: Mapping[str, np.ndarray],
    precision: str,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> tuple[list[Point], list[str]]:
    """Drift in each form in which ``verify`` runs a file on the CPU, and notes on those in which it can't be."""
    label, proto, points, notes = subject.label, load_onnx(subject.path), list[Point](), list[str]()
    if subject.inputs or subject.outputs:
        proto = renamed(proto, subject.inputs, subject.outputs)
    forms: list[tuple[str, Callable[[onnx.ModelProto], onnx.ModelProto] | None]] = [(OFF, None), (ON, optimized)]
    if precision:
        forms.append((STEPWISE, stepwise))
    for runtime, form in forms:
        try:
            ran = None if form is None else form(proto)
            where = f"{label} in {runtime}"
            seen = drift(model, proto, feeds, precision, progress, ran=ran, clock=clock, label=where)
            points += [replace(point, runtime=runtime, file=label) for point in seen]
        except NormdeployError as error:
            notes.append(f"no drift of {label} in {runtime}: {error}")
    return points, notes
