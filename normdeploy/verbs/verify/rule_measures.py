"""Measure an output by the rules that the user gave for it, one input after the other.

``compare.policy`` defines the rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, cast

import numpy as np

from ...compare.element_errors import absolute_difference, finite_magnitude, first_true_index, nonfinite_mismatch
from ...compare.number_text import format_pair
from ...compare.policy import Policy, Rule, Threshold, Tolerance
from ...compare.verdict import Verdict, nearest_to_bound
from ...errors import InputError
from ...inputs.input_cases import DATASET, HIDDEN, InputCase
from ...types import Array, Arrays

_USUAL = frozenset({"random", "given", DATASET})
# Kinds of input cases on which a tolerance is judged. Metrics are judged on fewer kinds, because they are meaningless
# where outputs vanish.
_TOLERATED = _USUAL | {
    "small",
    "zeros",
    HIDDEN,
}


@dataclass(frozen=True)
class RuleVerdict:
    """Verdict of one rule on one output in one runtime; true if it passes.

    Attributes:
        measured: value of the metric; for a tolerance, the error of the element that is nearest to failing.
        wanted: threshold of the metric; for a tolerance, the allowed error of this element.
        case: input case of ``measured``; "" for metrics that are shares of all rows.
        reason: reason of a failure, if the numbers do not show it.
        accuracies: for a metric with labels, accuracy of the reference and of this output.
        samples: number of labeled samples.
    """

    rule: str
    kind: str
    measured: float
    wanted: float
    verdict: Literal["pass", "fail"]
    case: str = ""
    reason: str = ""
    accuracies: tuple[float, ...] = ()
    samples: int = 0

    def __bool__(self) -> bool:
        return self.verdict == "pass"

    def __str__(self) -> str:
        if self.case and not self:
            where = f" at {self.case}"
        else:
            where = ""
        if self.reason:
            return f"{self.rule}: {self.reason}{where}"
        if self.kind == "tolerance":
            return f"{self.rule}: error {self.measured:.2e} {'≤' if self else '>'} {self.wanted:.2e}{where}"
        if self.accuracies:
            text = " and ".join(
                f"{share:.6g}{whose}"
                for share, whose in zip(self.accuracies, (" in the reference", " here"), strict=True)
            )
            return (
                f"{self.kind} {self.measured:.6g} {'≤' if self else '>'} {self.wanted:g}: {text}, of {self.samples}"
                " samples"
            )
        return f"{self.kind} {self.measured:.6g} {'≥' if self else '<'} {self.wanted:g}{where}"


class RuleMeasure:
    """Measurement of one rule on one output of one runtime, over all inputs on which the rule is judged.

    Args:
        dataset: True to measure metrics only on the dataset.
    """

    def __init__(self, rule: Rule, dataset: bool) -> None:
        self.rule = rule
        if isinstance(rule, Tolerance):
            self.kinds = _TOLERATED
        elif dataset:
            self.kinds = frozenset({DATASET})
        else:
            self.kinds = _USUAL
        self._broken = ""
        self._case = ""
        self._seen = False

    def add(
        self,
        case: str,
        value: Array | None,
        reference: Array,
        dtype: np.dtype,
        labels: Array | None = None,
    ) -> None:
        """Add one input.

        Args:
            value: the output; None if it is missing.
            dtype: the model's type of the output. A large number of the reference may be infinite in this type.
            labels: right classes, whole numbers [rows].

        Raises:
            InputError: a label is not one of the classes, or the numbers of labels and rows differ.
        """
        if value is None:
            self._record_failure(case, "there is no such output")
        elif value.shape != reference.shape:
            self._record_failure(
                case, f"its shape is {list(value.shape)}, but the reference has {list(reference.shape)}"
            )
        elif value.dtype.kind in "OSU":
            self._record_failure(case, f"it is a tensor of strings, but the reference is {dtype}")
        elif not self._broken and value.size:
            self._seen = True
            with np.errstate(all="ignore"):
                self._measure_input(case, value, reference, dtype, labels)

    def verdict(self) -> RuleVerdict:
        """Judge the inputs added so far.

        Returns:
            the verdict. It is failed if no input was added.
        """
        if not self._broken and not self._seen:
            self._record_failure("", "the rule applies to no input that was run")
        if not self._broken:
            return self._measured_verdict()
        verdict = self._make_verdict(float("nan"), self._least_value(), passes=False, case=self._case)
        return replace(verdict, reason=self._broken)

    def _make_verdict(self, measured: float, wanted: float, *, passes: bool, case: str = "") -> RuleVerdict:
        verdict: Literal["pass", "fail"]
        if passes:
            verdict = "pass"
        else:
            verdict = "fail"
        return RuleVerdict(str(self.rule), self.rule.kind, measured, wanted, verdict, case)

    def _record_failure(self, case: str, reason: str) -> None:
        if not self._broken:
            self._broken = reason
            self._case = case

    def _measure_input(self, case: str, value: Array, reference: Array, dtype: np.dtype, labels: Array | None) -> None:
        raise NotImplementedError

    def _measured_verdict(self) -> RuleVerdict:
        raise NotImplementedError

    def _least_value(self) -> float:
        if isinstance(self.rule, Threshold):
            return self.rule.least
        return float("nan")


class _ToleranceMeasure(RuleMeasure):
    """Measure of a tolerance."""

    # Before any input is added: error 0, allowed error 0.
    _worst = Verdict(0.0, 0.0)

    def _measure_input(self, case: str, value: Array, reference: Array, dtype: np.dtype, labels: Array | None) -> None:
        assert isinstance(self.rule, Tolerance)
        got = value.astype(np.float64)
        expected = reference.astype(np.float64)
        if dtype.kind not in "iub":
            expected = np.where(
                np.isinf(reference.astype(dtype).astype(np.float64)), np.sign(expected) * np.inf, expected
            )
        wrong = nonfinite_mismatch(got, expected)
        if wrong.any():
            index = first_true_index(wrong)
            if index:
                place = f" at {list(index)}"
            else:
                place = ""
            texts = format_pair(got[index], expected[index])
            self._record_failure(case, f"{texts[0]}, but the reference has {texts[1]}{place}")
            return
        allowed = self.rule.absolute + self.rule.relative * finite_magnitude(expected)
        worst = nearest_to_bound(absolute_difference(got, expected, one_sided=0.0), allowed)
        if worst.bound_ratio > self._worst.bound_ratio:
            self._worst = worst
            self._case = case

    def _measured_verdict(self) -> RuleVerdict:
        worst = self._worst
        return self._make_verdict(worst.error, worst.allowed, passes=bool(worst), case=self._case)


class _MetricMeasure(RuleMeasure):
    """Measure of a metric without labels."""

    def __init__(self, rule: Threshold, dataset: bool) -> None:
        super().__init__(rule, dataset)
        self._metric = rule.metric
        self._least = float("inf")
        self._where = ""
        self._agreeing: list[Array] = []
        self._rows: list[tuple[Array, Array]] = []

    def _measure_input(self, case: str, value: Array, reference: Array, dtype: np.dtype, labels: Array | None) -> None:
        if reason := _describe_non_finite(value, reference):
            self._record_failure(case, f"{reason}, so {self._metric.name} can't be measured")
        elif self._metric.joined:
            if self._rows and self._rows[0][1].shape[1:] != reference.shape[1:]:
                self._record_failure(
                    case, f"its rows are {list(reference.shape[1:])} here and {list(self._rows[0][1].shape[1:])} before"
                )
                return
            self._rows.append((value, reference))
        elif self._metric.pooled:
            self._agreeing.append(np.asarray(self._metric.of(value, reference)))
        elif (score := float(self._metric.of(value, reference))) < self._least or np.isnan(score) or not self._where:  # type: ignore[arg-type]
            self._least = score
            self._where = case

    def _measured_verdict(self) -> RuleVerdict:
        if self._rows:
            value, reference = (np.concatenate(side) for side in zip(*self._rows, strict=True))
            measured = self._metric.of(value, reference)
            if self._metric.pooled:
                self._agreeing = [np.asarray(measured)]
            else:
                self._least = float(cast("float", measured))
        if self._metric.pooled:
            rows = np.concatenate(self._agreeing)
            if not rows.size:
                self._record_failure("", "a single row has no neighbor; pass more inputs, or a larger batch")
                return self.verdict()
            self._least = float(rows.mean())
            self._where = ""
        wanted = self._least_value()
        return self._make_verdict(self._least, wanted, passes=self._least >= wanted, case=self._where)


def _describe_non_finite(value: Array, reference: Array) -> str | None:
    """Name the array that has a NaN or an infinity; return None if both arrays are finite."""
    if not np.isfinite(reference).all():
        return "the reference contains a NaN or an infinity"
    if np.isfinite(value.astype(np.float64)).all():
        return None
    return "it contains a NaN or an infinity"


class _AccuracyMeasure(RuleMeasure):
    """Measure of a metric with labels: the accuracy of the reference minus the accuracy of this output."""

    def __init__(self, rule: Threshold, dataset: bool) -> None:
        super().__init__(rule, dataset)
        self._metric = rule.metric
        # Numbers of right answers: of the reference, and of this output.
        self._right, self._samples = [0, 0], 0

    def _measure_input(self, case: str, value: Array, reference: Array, dtype: np.dtype, labels: Array | None) -> None:
        if labels is None:
            return
        rows, classes = reference.shape
        if rows != len(labels):
            raise InputError(
                f"{case}: the output has {rows} rows, but there are {len(labels)} labels; {self._metric.name}"
                " needs one label for each row"
            )
        if strange := [(row, label) for row, label in enumerate(labels.tolist()) if not 0 <= label < classes]:
            row, label = strange[0]
            raise InputError(
                f"{case}: the label in row {row} is {label}, but the output has the classes 0 to {classes - 1}"
            )
        if reason := _describe_non_finite(value, reference):
            self._record_failure(case, f"{reason}, so {self._metric.name} can't be measured")
            return
        for side, scores in enumerate((reference, value)):
            self._right[side] += int(np.asarray(self._metric.of(scores, labels)).sum())
        self._samples += rows

    def _measured_verdict(self) -> RuleVerdict:
        if not self._samples:
            self._record_failure("", "there are no labels")
            return self.verdict()
        (theirs, own), count, wanted = self._right, self._samples, self._least_value()
        # Whole numbers are subtracted before the division, so that a drop of 1 in 50 equals the literal 0.02.
        drop = (theirs - own) / count
        shares = (theirs / count, own / count)
        return replace(self._make_verdict(drop, wanted, passes=drop <= wanted), accuracies=shares, samples=count)


@dataclass
class OutputMeasures:
    """Rules on all outputs of one runtime.

    Attributes:
        dataset: True if metrics are measured only on the dataset.
    """

    policy: Policy
    dataset: bool = False
    _held: dict[str, tuple[RuleMeasure, ...]] = field(default_factory=dict)

    def add(self, output: str, case: InputCase, value: Array | None, reference: Array, dtype: np.dtype) -> None:
        """Add one output of one input to the rules that are judged on this kind of case."""
        if output not in self._held:
            self._held[output] = tuple(_make_measure(rule, self.dataset) for rule in self.policy.rules_for(output))
        for measure in self._held[output]:
            if case.kind in measure.kinds:
                measure.add(case.name, value, reference, dtype, case.labels)

    def verdicts_of(self, output: str) -> tuple[RuleVerdict, ...]:
        """Judge an output by each of its rules.

        Returns:
            one verdict for each rule.
        """
        return tuple(measure.verdict() for measure in self._held.get(output, ()))


def _make_measure(rule: Rule, dataset: bool) -> RuleMeasure:
    if isinstance(rule, Tolerance):
        return _ToleranceMeasure(rule, dataset)
    if rule.metric.labelled:
        return _AccuracyMeasure(rule, dataset)
    return _MetricMeasure(rule, dataset)


def resolve_policy(policy: Policy, outputs: Arrays) -> tuple[Policy, list[str]]:
    """Split the policy into rules for each output.

    Rules for all outputs apply only to floating-point outputs. The default rule judges integers better, because it
    knows ties. A rule that is given for one integer output applies to this output. If a rule for all outputs does not
    apply to an output, a note says so.

    Args:
        outputs: the reference's outputs for one input.

    Returns:
        (policy with rules for each output, notes).

    Raises:
        InputError: a metric for one output can't be measured on this output, or a metric for all outputs can't be
            measured on any output.
    """
    rules: dict[str, dict[str, Rule]] = {}
    notes = list[str]()
    measured = set[str]()
    refused = dict[str, str]()
    for output, value in outputs.items():
        rules[output] = {}
        for rule in policy.rules_for(output):
            own = rule.kind in policy.rules.get(output, {})
            reason = _explain_unmeasured(rule, value, own)
            if reason and own:
                raise InputError(f"{rule.kind} can't be measured on the output {output!r}: {reason}")
            if reason:
                notes.append(f"{rule} does not apply to {output}: {reason}")
                refused[rule.kind] = f"{output!r}: {reason}"
            else:
                measured.add(rule.kind)
                rules[output][rule.kind] = rule
    for kind in refused.keys() - measured:
        raise InputError(f"{kind} can't be measured on any output; {refused[kind]}")
    return Policy(rules, policy.required), notes


def _explain_unmeasured(rule: Rule, value: Array, own: bool) -> str:
    if value.dtype.kind in "iub" and not (own and isinstance(rule, Tolerance)):
        return f"it is {value.dtype}, not floating-point"
    if isinstance(rule, Tolerance):
        return ""
    metric = rule.metric
    if metric.labelled and value.ndim != metric.axes:
        return f"it has {value.ndim} dims, but needs [samples, classes]"
    if value.ndim < metric.axes:
        return f"it has {value.ndim} dims, but needs {metric.axes}"
    if metric.among and value.shape[-1] <= metric.among:
        return f"its shape is {list(value.shape)}, but the last axis (classes) needs more than {metric.among} entries"
    return ""
