"""Judges a quantized file of another tool again, where its ranges cut off what calibration inputs need not have held.

Such a file records no ranges. One that a calibration on inputs like those of ``verify`` can have given is taken for
right: what it cuts off is judged by nothing, as in a file that records its ranges (`quantization_budget`).
"""

from __future__ import annotations

from .precision_trial import PrecisionTrial


def rejudge_within_ranges(trial: PrecisionTrial) -> None:
    """Run the candidates of each file anew that fails, and whose ranges can be those of a calibration."""
    budgets = {id(c.subject.steps): c.subject.steps for c in trial.candidates if c.subject and c.subject.steps}
    for budget in budgets.values():
        own = [c for c in trial.candidates if c.subject is not None and c.subject.steps is budget]
        if any(not result for c in own for result in trial.candidate_results(c)) and budget.trust_ranges():
            for candidate in own:
                trial.rerun_candidate(candidate)
