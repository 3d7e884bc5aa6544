"""Judge the accuracy of rewrites made only for speed: an attention as one node, a linear layer over rows, a sum.

onnxruntime runs both sides of each rewrite in float32, on normally distributed inputs with the file's weights. The rule
is the same as for folds (`normdeploy.rewriting.rounding_verdicts`). u is the unit roundoff, and y the largest
intermediate number:

    error after ≤ max(2 · error before, 8u · y)

A rewrite that exceeds this is taken back even if the excess is not gross.
"""

from __future__ import annotations

from . import rounding_verdicts


def describe_cost(outcome: rounding_verdicts.TrialOutcome) -> str | None:
    """Describe the cost of a rewrite made for speed.

    Returns:
        the reason why it must be taken back; None if it may stay.
    """
    after = outcome.after
    if outcome.gross is not None or after is None or after:
        return outcome.gross
    return (
        f"its error in onnxruntime is {after.error:.2g}; the error of the original nodes is "
        f"{outcome.before:.2g}, and the limit is {after.allowed:.2g}"
    )
