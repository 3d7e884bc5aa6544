"""Judge one output in one runtime, by the default rule (``verbs.verify.file_comparison``) or by given rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ...compare.error_tally import ErrorTally
from ...findings.rendering import ShortRepr
from ...inputs.input_cases import DATASET, EXTREME, HIDDEN, INFINITE, NAN
from .quantization_budget import AGAINST, BUDGET
from .reference_models import OWN, runtime_label
from .rule_measures import RuleVerdict

DEFAULT = "default rule"
# Kind of a given tolerance.
TOLERANCE = "tolerance"
# Kinds of input cases, from the most ordinary to the most extreme.
KINDS = ("given", "random", DATASET, "small", HIDDEN, "zeros", EXTREME, INFINITE, NAN)
# Reason why the default rule was not judged for a quantized file: it takes dozens of runs in float64.
NOT_JUDGED = "--also-default asks for it"
COLUMNS = ("output", "runtime", "abs error", "max rel error", "allowed", "verdict", "worst case")


@dataclass(frozen=True, repr=False)
class OutputResult(ShortRepr):
    """Result of one output in one runtime; true if it passes.

    Errors are those of the default rule. They are NaN or infinite if the output is, and NaN if there is no output.

    Attributes:
        max_abs_error: absolute error of the element that came nearest to failing. If all elements share one bound, this
            is the largest absolute error.
        max_rel_error: largest error relative to its element; informational only.
        allowed: allowed error of the element of ``max_abs_error``; NaN if only given rules judge the output.
        case: input case of this element.
        near_ties: number of integers that differ because of rounding.
        file: label of the file; "" for eager mode.
        precision: "fp16" or "bf16" if the output was compared with eager mode in this type, otherwise "".
        culprit: optimizers of onnxruntime that must be disabled for the file to pass.
        rules: verdicts of the rules that the user gave for the output. They decide; without such rules, the default
            rule decides.
        by_default: verdict of the default rule; "" if the runtime could not run, or if only given rules judge a
            quantized file.
        default_reason: reason why the default rule fails, if the error does not show it.
        steps: for a quantized file, change of the output by its quantization steps, relative to the output (root mean
            squares); None for other files.
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
    default_reason: str = ""
    steps: float | None = None

    def summarize(self) -> str:
        """Return the main facts in one line."""
        what = ", ".join(filter(None, (self.output, self.runtime, self.file)))
        numbers = f"error {self.error_text}, allowed {self.allowed_text}"
        return f"{self.verdict}, {what}: {self.reason or numbers}{f', at {self.case}' if self.case else ''}"

    def __bool__(self) -> bool:
        return self.verdict == "pass"

    @property
    def decisive_tolerance(self) -> RuleVerdict | None:
        """Return the given tolerance that decided; None if no tolerance was given, or if it measured no element."""
        return next((r for r in self.rules if r.kind == TOLERANCE and not math.isnan(r.measured)), None)

    @property
    def error_text(self) -> str:
        """Return the absolute error for a table. It belongs to the same element as ``allowed_text``."""
        # A verdict that fails is false, so the comparison with None is needed.
        if (tolerance := self.decisive_tolerance) is not None:
            return f"{tolerance.measured:.2e}"
        return f"{self.max_abs_error:.2e}"

    @property
    def allowed_text(self) -> str:
        """Return the allowed error for a table, by the rule that decided.

        Returns:
            the bound of a given tolerance; "by metric" if only metrics decided; otherwise the default rule's bound.
        """
        # A verdict that fails is false, so the comparison with None is needed.
        if (tolerance := self.decisive_tolerance) is not None:
            return f"{tolerance.wanted:.2e}"
        if self.rules and all(rule.kind != TOLERANCE for rule in self.rules):
            return "by metric"
        return f"{self.allowed:.2e}"

    @property
    def decided_by(self) -> str:
        """Return the rules that decided the verdict."""
        return ", ".join(rule.rule for rule in self.rules) or self.default_rule_name

    @property
    def default_rule_name(self) -> str:
        """Return the name of the default rule for this file."""
        if self.steps is None:
            return DEFAULT
        return BUDGET

    @property
    def rules_summary(self) -> str:
        """Return the verdicts of the given rules and of the default rule; "" without given rules."""
        if not self.rules:
            return ""
        beside = f"{self.by_default or 'not judged'}{f', {self.default_reason}' if self.default_reason else ''}"
        return f"{'; '.join(map(str, self.rules))}; {self.default_rule_name}: {beside}"

    def row(self) -> tuple[str, ...]:
        """Return the cells under COLUMNS."""
        remark = self.reason or (f"{self.near_ties} near-ties" if self.near_ties else "")
        numbers = (self.error_text, f"{self.max_rel_error:.2e}", self.allowed_text)
        tolerance = self.decisive_tolerance
        if tolerance is None:
            case = self.case
        else:
            case = tolerance.case
        return (self.output, self.runtime, *numbers, f"{self.verdict}: {remark}" if remark else self.verdict, case)


def judge_output(
    output: str, runtime: str, mine: Mapping[str, ErrorTally], eager: Mapping[str, ErrorTally], own: str = OWN[0]
) -> OutputResult:
    """Judge one output from its tallies.

    The numbers of the result come from the most ordinary kind of case that fails. If no kind fails, they come from the
    kind that is nearest to failing.

    Args:
        mine: kind of case -> tally of the runtime.
        eager: kind of case -> tally of ``own``.
        own: runtime of ``eager``, one of ``OWN``.

    Returns:
        the result by the default rule.
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
            f"; {own} also fails here ({eager[kind].broken}): {runtime_label(own)} itself exceeds the range of"
            f" {tally.dtype}"
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
    """Build the result of a runtime that can't run the model.

    Returns:
        a failed result with NaN for all errors.
    """
    nan = float("nan")
    return OutputResult(output, runtime, str(dtype), nan, nan, nan, "fail", case, reason=reason)


def kind_rank(kind: str) -> tuple[int, bool]:
    """Rank a kind of case: ordinary numbers first, non-finite numbers last.

    Returns:
        a sort key.
    """
    return KINDS.index(kind.removesuffix(AGAINST)), kind.endswith(AGAINST)


def apply_rules(result: OutputResult, rules: Sequence[RuleVerdict], required: bool) -> OutputResult:
    """Add the given rules to the result of the default rule. The given rules decide.

    Args:
        required: True if the default rule must hold as well.

    Returns:
        ``result`` with the final verdict and the default rule's verdict in ``by_default``.
    """
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
