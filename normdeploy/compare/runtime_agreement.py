"""Compare the outputs of two runtimes. An output is wrong if rounding does not explain the difference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..types import Array
from .element_errors import absolute_difference, largest_finite, nonfinite_mismatch
from .verdict import Verdict


def find_disagreement(
    answers: Sequence[Array],
    reference: Sequence[Array],
    unit: float,
    more: Sequence[Array] | None = None,
) -> Verdict:
    """Compare the outputs of two runtimes.

    Args:
        answers: outputs to judge.
        reference: outputs of the other runtime, in the same order.
        unit: unit roundoff of the coarser of the two types. Errors up to the square root of ``unit``, relative to the
            largest value of an output, count as rounding.
        more: additional allowed error of each element of floating outputs.

    Returns:
        verdict on the first output that is wrong. If no output is wrong, verdict on the largest error relative to its
        output.
    """
    allowed = unit**0.5
    worst = Verdict(0.0, allowed)

    def make_failure(reason: str, error: float = math.inf) -> Verdict:
        """Return a failed verdict.

        Returns:
            verdict with the reason.
        """
        return Verdict(error, allowed, reason=reason)

    if len(answers) != len(reference):
        return make_failure(f"{len(answers)} outputs, {len(reference)} expected")
    for place, (value, expected) in enumerate(zip(answers, reference, strict=True)):
        if value.shape != expected.shape:
            return make_failure(f"output {place} has shape {list(value.shape)}, {list(expected.shape)} expected")
        if expected.dtype.kind in "iub":
            if different := int((value != expected).sum()):
                return make_failure(f"{different} of {expected.size} integers of output {place} differ")
            continue
        if nonfinite_mismatch(value, expected).any():
            return make_failure(f"output {place} has other NaN or infinite elements than expected")
        apart = absolute_difference(value, expected)
        scale = largest_finite(expected) or 1.0
        error = float(apart.max(initial=0.0)) / scale
        bound = allowed * scale + (0.0 if more is None else more[place])
        if (apart > bound).any():
            return make_failure(
                f"output {place} differs by {error:.1e} of its largest value, but {allowed:.1e} is allowed", error
            )
        if error > worst.error:
            worst = Verdict(error, float(np.max(bound)) / scale)
    return worst
