"""Summarize drift, the errors of the inner tensors that a file and the model share, by the largest rise of the
error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tensor_drift import DriftPoint

DRIFT = (
    "runtime",
    "tensors compared",
    "the error grows most in",
    "relative error before and there",
    "first tensor outside its bound",
)


def outline_drift(points: Sequence[DriftPoint]) -> list[tuple[str, ...]]:
    """Summarize drift in one row for each file and runtime, with the columns ("file", *DRIFT).

    Returns:
        rows that name the tensor at which the relative error rises most above its maximum so far.
    """
    runs: dict[tuple[str, str], list[DriftPoint]] = {}
    for point in points:
        runs.setdefault((point.file, point.runtime), []).append(point)
    return [(file, *_outline_run(runtime, run)) for (file, runtime), run in runs.items()]


def _outline_run(runtime: str, run: Sequence[DriftPoint]) -> tuple[str, ...]:
    highest = 0.0
    steepest = run[0]
    before = 0.0
    after = 0.0
    for point in run:
        if point.reason:
            relative = math.inf
        elif point.scale:
            relative = point.error / point.scale
        else:
            relative = 0.0
        if relative - highest > after - before:
            steepest = point
            before = highest
            after = relative
        highest = max(highest, relative)
    first = next(
        (f"{p.module or p.tensor}: {p.reason or f'{p.error:.2e}, allowed {p.allowed:.2e}'}" for p in run if not p),
        "none",
    )
    return runtime, str(len(run)), steepest.module or steepest.tensor, f"{before:.1e} to {after:.1e}", first
