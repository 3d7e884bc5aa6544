"""Judge each output of a runtime from its error tallies, by the default rule and by given rules, and explain
failures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from ...compare.error_tally import ErrorTally
from ...inputs.input_cases import DATASET, EXTREME
from .case_answers import CaseAnswer
from .failure_inputs import find_failing_integers
from .output_results import NOT_JUDGED, OutputResult, apply_rules, failed_result, judge_output
from .quantization_budget import AGAINST, UNROUNDED, VOID
from .reference_models import Original
from .runtime_candidates import FLOATS, RuntimeCandidate
from .runtime_tallies import RuntimeTallies


class TrialRecord(Protocol):
    """Attributes of a trial that a verdict reads.

    Attributes:
        precision: half precision of the trial; "" for the model's own precision.
        answers: float64 results of each case.
        eager: eager PyTorch; its errors determine the allowed errors of the runtimes.
    """

    precision: str
    answers: list[CaseAnswer]
    eager: RuntimeCandidate
    model: Original
    tallying: RuntimeTallies


def candidate_results(trial: TrialRecord, candidate: RuntimeCandidate) -> list[OutputResult]:
    """Judge all outputs of a candidate.

    Returns:
        one result for each output; none if the candidate was not run.
    """
    tallies: dict[str, dict[str, ErrorTally]] = {}
    for (output, kind), tally in candidate.tallies.items():
        tallies.setdefault(output, {})[kind] = tally
    return [
        result
        for output in trial.model.outputs
        for result in _output_results(trial, candidate, output, tallies.get(output, {}))
    ]


def _output_results(
    trial: TrialRecord, candidate: RuntimeCandidate, output: str, mine: Mapping[str, ErrorTally]
) -> Iterator[OutputResult]:
    eager = {kind: trial.tallying.eager_tally(output, kind) for kind in mine}
    if candidate.failure:
        dtype = trial.tallying.dtype_of(output)
        result = failed_result(output, candidate.name, dtype, candidate.where, candidate.failure)
    elif mine and not candidate.unavailable:
        default = _judge_quantized(candidate, judge_output(output, candidate.name, mine, eager, trial.eager.name))
        result = apply_rules(default, candidate.measures.verdicts_of(output), trial.tallying.policy.required)
        if trial.tallying.skips_step_budget(candidate):
            result = replace(result, allowed=float("nan"), by_default="", default_reason=NOT_JUDGED)
    else:
        return
    if result and (why := _describe_coarser_types(candidate)):
        result = replace(result, verdict="fail", reason=why)
    if not result and candidate.advice:
        result = replace(_add_reason(result, candidate.advice), culprit=candidate.culprit)
    if not result and not candidate.failure:
        result = _add_reason(result, _describe_failing_integers(trial, mine.values()))
    yield replace(result, file=candidate.file_label, precision=trial.precision)


def _describe_failing_integers(trial: TrialRecord, tallies: Iterable[ErrorTally]) -> str | None:
    """Describe input integers that every failing case has and no passing case has."""
    names = {case.removesuffix(AGAINST) for tally in tallies for case in tally.failed}
    # Samples of a dataset are not used, because they have separate rules. Extreme cases that passed are not used
    # either: their integers would include the values of all other cases.
    answers = [answer for answer in trial.answers if answer.case.kind != DATASET]
    failed = [answer.feeds for answer in answers if answer.case.name in names]
    passed = [a.feeds for a in answers if a.case.name not in names and a.case.kind != EXTREME]
    return find_failing_integers(failed, passed)


def _judge_quantized(candidate: RuntimeCandidate, result: OutputResult) -> OutputResult:
    """Return a quantized file's result with the effect of its quantization steps, and explain a failure."""
    if candidate.subject is None:
        budget = None
    else:
        budget = candidate.subject.steps
    if budget is None or budget.failure:
        return result
    result = replace(result, steps=budget.relative_error(result.output))
    if budget.altered and candidate.name == UNROUNDED:
        return replace(_add_reason(result, budget.altered), verdict="fail")
    if result and candidate.name != UNROUNDED and result.steps is not None and result.steps > VOID:
        reason = (
            f"its quantization steps by themselves may move this output by {result.steps:.0%} of its size, so"
            " the default rule can't tell right from wrong: pass a metric (--metric)"
        )
        return replace(result, verdict="fail", reason=reason)
    if result:
        return result
    return _add_reason(result, budget.explain_failure(candidate.name))


def _add_reason(result: OutputResult, reason: str | None) -> OutputResult:
    """Append a reason to the reasons of a result, if the reason is not empty."""
    return replace(result, reason="; ".join(filter(None, (result.reason, reason))))


def _describe_coarser_types(candidate: RuntimeCandidate) -> str | None:
    """Explain why a half-precision file fails although its weights are right: it contains a coarser type."""
    if candidate.subject is None or not candidate.subject.computing.coarser:
        return None
    found = candidate.subject.computing
    if found.coarser[1:]:
        more = f" and {len(found.coarser) - 1} more tensors"
    else:
        more = ""
    return (
        f"{found.coarser[0]!r}{more} of the file have a coarser dtype than {FLOATS[found.precision]}, in which"
        f" the file computes; keep them in {FLOATS[found.precision]}, or pass a metric"
    )
