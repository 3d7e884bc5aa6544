"""The verdict on each output of a runtime, from its tallies: by the default rule, by given rules, and why it fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ...compare.tally import Tally
from .candidates import FLOATS, Candidate
from .cases import DATASET, EXTREME
from .results import NOT_JUDGED, OutputResult, decided, failed, judged
from .steps import AGAINST, UNROUNDED, VOID
from .where import only_where

if TYPE_CHECKING:
    from .judging import Trial


def results_of(trial: Trial, candidate: Candidate) -> list[OutputResult]:
    """Return one result for each output, none where it was not run."""
    tallies: dict[str, dict[str, Tally]] = {}
    for (output, kind), tally in candidate.tallies.items():
        tallies.setdefault(output, {})[kind] = tally
    return [
        result
        for output in trial.model.outputs
        for result in _result(trial, candidate, output, tallies.get(output, {}))
    ]


def _result(trial: Trial, candidate: Candidate, output: str, mine: Mapping[str, Tally]) -> Iterator[OutputResult]:
    eager = {kind: trial.tallying.eager_tally(output, kind) for kind in mine}
    if candidate.failure:
        dtype = trial.tallying.dtype_of(output)
        result = failed(output, candidate.name, dtype, candidate.where, candidate.failure)
    elif mine and not candidate.unavailable:
        default = _quantized(candidate, judged(output, candidate.name, mine, eager, trial.eager.name))
        result = decided(default, candidate.measures.judged(output), trial.tallying.policy.required)
        if trial.tallying.by_rules_alone(candidate):
            result = replace(result, allowed=float("nan"), by_default="", default_reason=NOT_JUDGED)
    else:
        return
    if result and (why := _coarser(candidate)):
        result = replace(result, verdict="fail", reason=why)
    if not result and candidate.advice:
        result = replace(_because(result, candidate.advice), culprit=candidate.culprit)
    if not result and not candidate.failure:
        result = _because(result, _only_where(trial, mine.values()))
    yield replace(result, file=candidate.file, precision=trial.precision)


def _only_where(trial: Trial, tallies: Iterable[Tally]) -> str | None:
    """Say which integers of an input every case has that fails, and no other."""
    names = {case.removesuffix(AGAINST) for tally in tallies for case in tally.failed}
    # Samples of a dataset have rules of their own, and integers drawn from far around surround all others.
    answers = [answer for answer in trial.answers if answer.case.kind != DATASET]
    failed = [answer.feeds for answer in answers if answer.case.name in names]
    passed = [a.feeds for a in answers if a.case.name not in names and a.case.kind != EXTREME]
    return only_where(failed, passed)


def _quantized(candidate: Candidate, result: OutputResult) -> OutputResult:
    """The verdict on a quantized file: with what its steps do, and why it fails."""
    budget = None if candidate.subject is None else candidate.subject.steps
    if budget is None or budget.failure:
        return result
    result = replace(result, steps=budget.relative(result.output))
    if budget.altered and candidate.name == UNROUNDED:
        return replace(_because(result, budget.altered), verdict="fail")
    if result and candidate.name != UNROUNDED and result.steps is not None and result.steps > VOID:
        reason = (
            f"its quantization steps alone may move this output by {result.steps:.0%} of its size, so the default"
            " rule can't tell right from wrong: give a metric (--metric)"
        )
        return replace(result, verdict="fail", reason=reason)
    return result if result else _because(result, budget.why(candidate.name))


def _because(result: OutputResult, reason: str | None) -> OutputResult:
    """Add a reason, if there is one, to those of a result."""
    return replace(result, reason="; ".join(filter(None, (result.reason, reason))))


def _coarser(candidate: Candidate) -> str | None:
    """Say why a file in half precision is not right though its numbers are: it holds a type that is coarser still."""
    if candidate.subject is None or not candidate.subject.computing.coarser:
        return None
    found = candidate.subject.computing
    more = f" and {len(found.coarser) - 1} more tensors" if found.coarser[1:] else ""
    return (
        f"{found.coarser[0]!r}{more} of the file have a type coarser than {FLOATS[found.precision]}, which it computes"
        " in; keep them in that type, or give a metric"
    )
