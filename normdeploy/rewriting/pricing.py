"""Prices the rewrites that are no norm's: an attention as one node, a linear layer over rows, a sum.

onnxruntime runs both sides of each in float32, on normal inputs with the file's own weights. The rule is that of folds
(`normdeploy.rewriting.rounding`), with u the unit roundoff and y the largest number inside:

    error after ≤ max(2 · error before, 8u · y)

These rewrites are made for speed alone, so one that costs more is taken back, gross or not.
"""

from __future__ import annotations

import numpy as np

from ..records import Finding
from . import rounding, trials
from .certify import Rewrite
from .work import Work

_UNITS = 8


def price(work: Work, rewrite: Rewrite, told: Finding, dtype: np.dtype, opset: int) -> None:
    """Let onnxruntime run both sides of ``rewrite``, before it is made.

    Args:
        told: what is said of the rewrite where it is taken back.
        opset: the oldest that has the nodes written.
    """
    tried = trials.fold_case(rewrite, [None] * len(rewrite.before.leaves))
    if tried is None:
        return
    case, largest = tried
    trial = rounding.trial(
        work.graph,
        case,
        rewrite,
        dtype,
        opset=opset,
        number=len(work.trials),
        rows=lambda value: value.reshape(1, -1),
        expected=lambda reference, unit: np.array([_UNITS * unit * largest]),
    )
    if trial is not None:
        work.trials.append((told, trial))


def costs(verdict: rounding.Verdict) -> str:
    """Return why a rewrite made for speed can't stay, "" where it can."""
    if verdict.gross or verdict.after is None or verdict.allowed is None or verdict.after <= verdict.allowed:
        return verdict.gross
    return (
        f"its error in onnxruntime is {verdict.after:.2g}, where that of the nodes before is {verdict.before:.2g} and"
        f" {verdict.allowed:.2g} are allowed"
    )
