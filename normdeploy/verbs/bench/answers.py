"""Whether two runtimes gave the same answer: wrong is what no rounding explains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def disagreement(
    answers: Sequence[np.ndarray],
    reference: Sequence[np.ndarray],
    unit: float,
    more: Sequence[np.ndarray] | None = None,
) -> tuple[float, str]:
    """The largest error relative to the largest value of its output, and what is wrong, "" where nothing is.

    Args:
        unit: the unit roundoff of the coarser of the types that the two were computed in; errors up to its square root
        are rounding.
        more: how far each element may be off besides; integers may differ wherever they are allowed to.
    """
    if len(answers) != len(reference):
        return float("inf"), f"{len(answers)} outputs, {len(reference)} expected"
    worst, allowed = 0.0, unit**0.5
    for place, (value, expected) in enumerate(zip(answers, reference, strict=True)):
        if value.shape != expected.shape:
            return float("inf"), f"output {place} has shape {list(value.shape)}, {list(expected.shape)} expected"
        if expected.dtype.kind in "iub":
            if different := int((value != expected).sum()):
                return float("inf"), f"{different} of {expected.size} integers of output {place} differ"
            continue
        got, wanted = value.astype(np.float64), expected.astype(np.float64)
        finite = np.isfinite(wanted)
        if not np.array_equal(np.isfinite(got), finite) or not np.array_equal(
            got[~finite], wanted[~finite], equal_nan=True
        ):
            return (
                float("inf"),
                f"output {place} is not finite where it should be, or the other way round, or another infinity",
            )
        largest = float(np.abs(wanted[finite]).max(initial=0.0))
        away = np.abs(got[finite] - wanted[finite])
        error = float(away.max(initial=0.0)) / (largest or 1.0)
        worst = max(worst, error)
        beside = 0.0 if more is None else more[place][finite]
        if bool((away > allowed * (largest or 1.0) + beside).any()):
            return error, f"output {place} differs by {error:.1e} of its largest value, {allowed:.1e} is allowed"
    return worst, ""
