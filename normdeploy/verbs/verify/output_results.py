"""The verdict on one output in one runtime: by the default rule (``verbs.verify.file_comparison``), or by rules that
were given for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ...compare.error_tally import ErrorTally
from ...inputs.input_cases import DATASET, EXTREME, HIDDEN, INFINITE, NAN
from .quantization_budget import AGAINST, BUDGET
from .reference_models import OWN, runtime_label
from .rule_measures import RuleVerdict

DEFAULT = "default rule"
# Of cases, the plainest first.
KINDS = ("given", "random", DATASET, "small", HIDDEN, "zeros", EXTREME, INFINITE, NAN)
# of quantized files, whose error budget takes dozens of runs in float64
NOT_JUDGED = "--also-default asks for it"
COLUMNS = ("output", "runtime", "abs error", "max rel error", "allowed", "verdict", "worst case")


@dataclass(frozen=True)
class OutputResult:
    """One output in one runtime; true where it passes.

    ``rules`` are those that were given for the output, and decide; where there are none the default rule does, of which
    ``by_default`` is the verdict in any case ("" where the runtime could not be run at all, and of a quantized file on
    which rules alone decide). The numbers are the default rule's: ``max_abs_error`` and ``allowed`` are of the element
    that came nearest to failing (or of all, where they have one bound), ``case`` is where; ``max_rel_error`` is
    relative to each element, and informs only. Both are NaN or infinite where the output is, and NaN where there is
    none. ``near_ties`` counts integers that differ on a rounding. ``file`` is "" of eager; ``precision`` is "fp16" or
    "bf16" where it was judged by eager in that, else "". ``culprit`` names onnxruntime's optimizers without which the
    file passes. ``steps``: of a quantized file, whose default rule is the error budget of its steps, what these alone
    move the output by over its size (root mean squares); None of others.
    """

    output: str
    runtime: str
    dtype: str
    max_abs_error: float
    max_rel_error: float
    allowed: float
    verdict: Literal["pass", "fail"]
    case: str
    near_ties: int = 0
    reason: str = ""
    file: str = ""
    precision: str = ""
    culprit: tuple[str, ...] = ()
    rules: tuple[RuleVerdict, ...] = ()
    by_default: Literal["pass", "fail", ""] = ""
    # why the default rule fails, where no error can say it
    default_reason: str = ""
    steps: float | None = None

    def __bool__(self) -> bool:
        return self.verdict == "pass"

    @property
    def decided_by(self) -> str:
        """The rules that the verdict comes from."""
        return ", ".join(rule.rule for rule in self.rules) or self.default_rule_name

    @property
    def default_rule_name(self) -> str:
        """What the default rule is called here."""
        if self.steps is None:
            return DEFAULT
        return BUDGET

    @property
    def rules_summary(self) -> str:
        """What the rules that were given say, and beside them the default rule; "" where none was given."""
        if not self.rules:
            return ""
        beside = f"{self.by_default or 'not judged'}{f', {self.default_reason}' if self.default_reason else ''}"
        return f"{'; '.join(map(str, self.rules))}; {self.default_rule_name}: {beside}"

    def row(self) -> tuple[str, ...]:
        """The cells under COLUMNS."""
        remark = self.reason or (f"{self.near_ties} near-ties" if self.near_ties else "")
        numbers = (f"{self.max_abs_error:.2e}", f"{self.max_rel_error:.2e}", f"{self.allowed:.2e}")
        return (self.output, self.runtime, *numbers, f"{self.verdict}: {remark}" if remark else self.verdict, self.case)


def judge_output(
    output: str, runtime: str, mine: Mapping[str, ErrorTally], eager: Mapping[str, ErrorTally], own: str = OWN[0]
) -> OutputResult:
    """The verdict on the tallies of one output by kind of case: the plainest kind that fails speaks for it, or the one
    that comes nearest to failing.

    ``own``: the runtime that ``eager`` is of, one of ``OWN``.
    """
    badness = {kind: tally.failure_ratio(eager[kind]) for kind, tally in mine.items()}
    failing = [kind for kind, bad in badness.items() if bad > 1]
    if failing:
        kind = min(failing, key=kind_rank)
    else:
        kind = max(badness, key=lambda kind: badness[kind])
    tally = mine[kind]
    reason = tally.broken or ""
    verdict = tally.deciding_verdict(eager[kind])
    if math.isfinite(verdict.error):
        relative = max(t.relative for t in mine.values())
    else:
        relative = verdict.error
    if reason and runtime not in OWN and eager[kind].broken:
        reason += (
            f"; {own} fails here too ({eager[kind].broken}): {runtime_label(own)} itself leaves the range of "
            f"{tally.dtype}"
        )
    return OutputResult(
        output,
        runtime,
        str(tally.dtype),
        verdict.error,
        relative,
        verdict.allowed,
        "fail" if failing else "pass",
        tally.case,
        sum(t.ties for t in mine.values()),
        reason,
    )


def failed_result(output: str, runtime: str, dtype: np.dtype, case: str, reason: str) -> OutputResult:
    """Return the result of a runtime that does not run the model."""
    nan = float("nan")
    return OutputResult(output, runtime, str(dtype), nan, nan, nan, "fail", case, reason=reason)


def kind_rank(kind: str) -> tuple[int, bool]:
    """Rank a kind of case: numbers as a user has them first, those that are not finite last."""
    return KINDS.index(kind.removesuffix(AGAINST)), kind.endswith(AGAINST)


def apply_rules(result: OutputResult, rules: Sequence[RuleVerdict], required: bool) -> OutputResult:
    """``found``, the default rule's verdict, beside the rules that were given, which decide; with ``required`` the
    default rule too."""
    result = replace(result, by_default=result.verdict)
    if not rules:
        return result
    failing = [str(rule) for rule in rules if not rule]
    if required and not result:
        failing.append(
            f"{result.default_rule_name}: {result.reason or f'error {result.max_abs_error:.2e} > {result.allowed:.2e}'}"
        )
    verdict: Literal["pass", "fail"]
    if failing:
        verdict = "fail"
    else:
        verdict = "pass"
    return replace(result, rules=tuple(rules), verdict=verdict, reason="; ".join(failing), default_reason=result.reason)
