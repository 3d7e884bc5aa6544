"""Drift in the files that ``verify`` compares, in each form in which it runs them, and in short where the error grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx

from ..errors import NormdeployError
from ..model import Model
from ..precision.stepwise import stepwise
from ..storage.files import load_onnx
from .candidates import OFF, ON, STEPWISE, Subject
from .drift import Point, drift, optimized
from .names import renamed

Progress = Callable[[str, int, int], None]


def drift_of_file(
    model: Model, subject: Subject, feeds: Mapping[str, np.ndarray], precision: str, progress: Progress | None = None
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
            seen = drift(model, proto, feeds, precision, progress, ran=None if form is None else form(proto))
            points += [replace(point, runtime=runtime, file=label) for point in seen]
        except NormdeployError as error:
            notes.append(f"no drift of {label} in {runtime}: {error}")
    return points, notes


DRIFT = ("runtime", "tensors", "the error grows most in", "relative to the largest value", "first outside the bound")


def outline(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """One row for each file and runtime under ("file", *DRIFT): where the relative error rises most above all before it."""
    runs: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        runs.setdefault((point.file, point.runtime), []).append(point)
    return [(file, *_outlined(runtime, run)) for (file, runtime), run in runs.items()]


def _outlined(runtime: str, run: Sequence[Point]) -> tuple[str, ...]:
    highest, steepest, before, after = 0.0, run[0], 0.0, 0.0
    for point in run:
        relative = np.inf if point.reason else point.error / point.scale if point.scale else 0.0
        if relative - highest > after - before:
            steepest, before, after = point, highest, relative
        highest = max(highest, relative)
    first = next((f"{p.module or p.tensor}: {p.reason or f'{p.error:.2e}, allowed {p.allowed:.2e}'}" for p in run if not p), "none")
    return runtime, str(len(run)), steepest.module or steepest.tensor, f"{before:.1e} to {after:.1e}", first
