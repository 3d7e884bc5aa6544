"""Parse the user's own rules for outputs: tolerances and metrics with thresholds (``verify --tolerance``, ``--metric``,
``--policy``).

A rule for an output replaces the default rule (``verbs.verify.file_comparison``). The default rule is still evaluated
and shown. With ``required``, it must pass as well. A rule for a single output overrides the rule of the same kind (the
tolerance, or a metric) for all outputs. All rules of an output must pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError
from .metrics import METRICS, Metric

# Key for the rules of all outputs.
ALL = ""
_METRIC = re.compile(
    r"(?:(?P<output>.+)=)?\s*(?P<metric>(?:[A-Za-z_][\w.]*:)?[A-Za-z_]\w*)\s*(?P<sign>>=|<=|==|=|>|<|:)\s*(?P<least>[^<>=:\s]+)\s*",
    re.DOTALL,
)

Tolerances = str | Sequence[str] | Mapping[str, "str | Sequence[float]"]
Thresholds = str | Sequence[str] | Mapping[str, "str | Sequence[str]"]


@dataclass(frozen=True)
class Tolerance:
    """Bound |value − reference| ≤ absolute + relative · |reference| for each element, as in numpy.allclose."""

    absolute: float
    relative: float
    kind: str = "tolerance"

    def __str__(self) -> str:
        return f"tolerance {self.absolute:g}:{self.relative:g}"


@dataclass(frozen=True)
class Threshold:
    """Limit of a metric. The metric must be at least ``least``. If the metric needs labels, it must be at most
    ``least``.

    Attributes:
        kind: name of the metric: a key of ``METRICS``, or ``MODULE:FUNCTION``.
        own: the user's metric; None for a metric of ``METRICS``.
    """

    kind: str
    least: float
    own: Metric | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.kind}{self.metric.comparison_sign}{self.least:g}"

    @property
    def metric(self) -> Metric:
        return self.own or METRICS[self.kind]


Rule = Tolerance | Threshold


@dataclass(frozen=True)
class Policy:
    """Rules of all outputs.

    Attributes:
        rules: output (``ALL`` for all outputs) -> kind -> rule.
        required: the default rule must pass as well.
    """

    rules: Mapping[str, Mapping[str, Rule]] = field(default_factory=dict)
    required: bool = False

    def __bool__(self) -> bool:
        return any(self.rules.values())

    def rules_for(self, output: str) -> tuple[Rule, ...]:
        """Return the rules that decide on an output.

        Returns:
            rules; empty if the default rule decides.
        """
        return tuple({**self.rules.get(ALL, {}), **self.rules.get(output, {})}.values())

    @property
    def labeled_metrics(self) -> tuple[str, ...]:
        """Return the metrics that need labels.

        Returns:
            names, each once.
        """
        kinds = dict.fromkeys(kind for rules in self.rules.values() for kind in rules)
        return tuple(kind for kind in kinds if kind in METRICS and METRICS[kind].labelled)

    @property
    def has_own_metrics(self) -> bool:
        """Return whether a rule is for a metric of the user."""
        return any(
            isinstance(r, Threshold) and r.own is not None for rules in self.rules.values() for r in rules.values()
        )

    def merge_under(self, other: Policy) -> Policy:
        """Add the rules of ``other`` that this policy does not have.

        Returns:
            policy in which the rules of this policy take precedence.
        """
        names = dict.fromkeys([*other.rules, *self.rules])
        rules = {name: {**other.rules.get(name, {}), **self.rules.get(name, {})} for name in names}
        return Policy(rules, self.required or other.required)

    def require_default(self, default: bool) -> Policy:
        """Require the default rule too if ``default`` is set.

        Call this after the rules of the options and of the policy file are merged.

        Returns:
            the same rules; ``required`` is set if this policy or ``default`` requires the default rule.

        Raises:
            InputError: the default rule is required, but no other rule is given.
        """
        required = self.required or default
        if required and not self:
            raise InputError(
                "--also-default (in a policy file also-default) adds the default rule to your rules, but there are "
                "none; pass a tolerance or a metric too, or omit it"
            )
        return Policy(self.rules, required)

    def check(self, outputs: Sequence[str]) -> None:
        """Check that each rule's output exists.

        Raises:
            InputError: a rule is for an output that the model does not have.
        """
        if unknown := [name for name in self.rules if name != ALL and name not in outputs]:
            raise InputError(
                f"a rule is for the output {unknown[0]!r}, which the model does not have; its outputs are "
                f"{list(outputs)}"
            )


def parse_policy(
    tolerance: Tolerances | None, metric: Thresholds | None, own: Callable[[str], Metric] | None = None
) -> Policy:
    """Parse rules given as texts such as "logits=1e-3:1e-2" and "logits=cosine>=0.995", or as mappings from output to
    "1e-3:1e-2" or (1e-3, 1e-2).

    Args:
        own: function that imports the user's metric ``MODULE:FUNCTION``; None if there are no such metrics.

    Returns:
        the policy.

    Raises:
        InputError: a rule can't be parsed, or an output has two different rules of one kind.
    """
    rules: dict[str, dict[str, Rule]] = {}
    for output, rule in [*_parse_tolerances(tolerance), *_parse_thresholds(metric, own)]:
        if (other := rules.setdefault(output, {}).setdefault(rule.kind, rule)) != rule:
            raise InputError(
                f"{f'the output {output!r}' if output else 'every output'} has the rules {other} and {rule}; pass "
                "one of them"
            )
    return Policy(rules)


def parse_allclose(absolute: float | None, relative: float | None) -> Policy:
    """Build the rule for all outputs that two numbers state, as atol and rtol of numpy.allclose.

    Args:
        absolute: value of --atol; None for 0.
        relative: value of --rtol; None for 0.

    Returns:
        the policy; empty if both are None.

    Raises:
        InputError: a number is negative or not finite.
    """
    if absolute is None and relative is None:
        return Policy()
    for flag, value in (("--atol", absolute), ("--rtol", relative)):
        if value is not None and not _is_tolerance(value):
            raise InputError(f"{flag} is {value!r}; pass a number of 0 or more")
    return Policy({ALL: {"tolerance": Tolerance(float(absolute or 0), float(relative or 0))}})


def _is_tolerance(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _parse_tolerances(given: Tolerances | None) -> Iterable[tuple[str, Rule]]:
    if isinstance(given, Mapping):
        return [(name, parse_tolerance(value)) for name, value in given.items()]
    texts = [given] if isinstance(given, str) else () if given is None else given
    # A value such as 1e-3 or (1e-3, 1e-2) names no output. A single number could also mean either the absolute or the
    # relative tolerance.
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InputError(
            f'the tolerance {given!r} can\'t be read; write the text "ABS:REL" for every output, for example'
            ' "1e-3:0", or {"logits": "1e-3:1e-2"} for one'
        )
    return [(text.rpartition("=")[0], parse_tolerance(text.rpartition("=")[2], text)) for text in texts]


def _parse_thresholds(given: Thresholds | None, own: Callable[[str], Metric] | None) -> Iterable[tuple[str, Rule]]:
    if isinstance(given, Mapping):
        return [
            (name, parse_threshold(text, own=own))
            for name, texts in given.items()
            for text in ([texts] if isinstance(texts, str) else texts)
        ]
    return [
        (_split_rule(text)["output"] or ALL, parse_threshold(text, named=True, own=own))
        for text in ([given] if isinstance(given, str) else given or ())
    ]


def parse_tolerance(value: object, written: str | None = None) -> Tolerance:
    """Parse ``1e-3:1e-2`` or (1e-3, 1e-2).

    Args:
        written: text for error messages.

    Returns:
        the tolerance.

    Raises:
        InputError: the value has another form, or a number is negative or not finite.
    """
    if written is None:
        written = str(value)
    parts: list[Any]
    if isinstance(value, str):
        parts = value.split(":")
    elif isinstance(value, Sequence):
        parts = list(value)
    else:
        parts = [value]
    try:
        absolute, relative = (float(part) for part in parts)
    except (ValueError, TypeError):
        raise InputError(
            f"the tolerance {written!r} can't be read; write ABS:REL or OUTPUT=ABS:REL, for example logits=1e-3:1e-2 "
            "(0 turns one off)"
        ) from None
    if not all(math.isfinite(n) and n >= 0 for n in (absolute, relative)):
        raise InputError(f"the tolerance {written!r} holds a number that is negative or not finite; use 0 or more")
    return Tolerance(absolute, relative)


def parse_threshold(text: object, *, named: bool = False, own: Callable[[str], Metric] | None = None) -> Threshold:
    """Parse ``cosine>=0.995`` or ``cosine:0.995``. The form with ":" needs no quotes in a shell.

    Args:
        named: the text may name an output.
        own: as for ``parse_policy``.

    Returns:
        the threshold.

    Raises:
        InputError: the text can't be parsed, the metric does not exist, or the threshold is out of the metric's range.
    """
    parts = _split_rule(text)
    if parts["output"] and not named:
        raise InputError(
            f"the metric {text!r} names an output, but it is already for one output; write "
            f"{parts['metric']}:{parts['least']}"
        )
    if own is not None and ":" in parts["metric"]:
        metric = own(parts["metric"])
    elif parts["metric"] in METRICS:
        metric = METRICS[parts["metric"]]
    else:
        raise InputError(
            f"unknown metric {parts['metric']!r} (in {text!r}); choose one of {', '.join(METRICS)}, or name your own"
            " function MODULE:FUNCTION"
        )
    if parts["sign"] not in (metric.comparison_sign, ":"):
        if metric.labelled:
            better = "smaller"
        else:
            better = "larger"
        raise InputError(
            f"{text!r}: the {better} {metric.name} is, the better; write "
            f"{metric.name}{metric.comparison_sign}{parts['least']}"
        )
    try:
        least = float(parts["least"])
    except ValueError:
        example = f"{metric.name}{metric.comparison_sign}{'0.01' if metric.labelled else '0.99'}"
        raise InputError(
            f"{text!r}: the threshold {parts['least']!r} is not a number; write {example}, for example"
        ) from None
    if not (math.isfinite(least) and metric.least <= least <= metric.most):
        if math.isfinite(metric.most):
            span = f"between {metric.least:g} and {metric.most:g}"
        else:
            span = "a finite number of decibels" if metric.name in METRICS else "a finite number"
        raise InputError(f"{text!r}: {metric.name} is {span}; use such a threshold")
    return Threshold(metric.name, least, None if metric.name in METRICS else metric)


def _split_rule(text: object) -> re.Match[str]:
    if not isinstance(text, str) or (match := _METRIC.fullmatch(text)) is None:
        raise InputError(
            f"the metric {text!r} can't be read; write NAME>=THRESHOLD or OUTPUT=NAME>=THRESHOLD, in a shell within "
            f"quotes (> is a redirection) or with a colon: logits=cosine:0.995. The names are {', '.join(METRICS)}"
        )
    return match
