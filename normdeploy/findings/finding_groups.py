"""Group findings that differ only in numbers, such as the norms of all layers, and describe each group."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from .records import STATUS_WORDS

if TYPE_CHECKING:
    from .records import Certificate, Finding

COLOURS = {"fused": "green", "folded": "green", "kept": "cyan", "refused": "yellow", "undone": "red"}
# Last words of the evidence of a norm that was not run itself, because an equal norm was run
LIKE = " of its like"
# Maximum number of numbers that a name lists one by one
_LISTED = 6


@dataclass(frozen=True)
class FindingGroup:
    """Findings that differ only in the numbers in their names, such as the layers of an encoder.

    Attributes:
        name: "layers.{0..11}.norm", or "(mul_{3,17,31})" if the file records no module paths.
    """

    name: str
    findings: tuple[Finding, ...]

    @property
    def first_finding(self) -> Finding:
        """Return the first member; the other members differ only in numbers."""
        return self.findings[0]


def group_findings(findings: Iterable[Finding]) -> list[FindingGroup]:
    """Group findings whose lines in a table would differ only in numbers.

    Returns:
        groups in the order of their first members.
    """
    alike: dict[tuple[Any, ...], list[Finding]] = {}
    for f in findings:
        key = (
            f.kind,
            f.status,
            f.spelling,
            without_numbers(f.became),
            without_numbers(f.reason),
            f.notes,
            f.axes,
            f.epsilon,
            f.dtype,
        )
        known = (f.ddof, f.outside, f.statistics, *(p and (p.data, p.axes, p.one_plus) for p in (f.gamma, f.beta)))
        half = tuple((h.vanishes, bool(h.overflow)) for h in f.half)
        failed = f.certificate is not None and not f.certificate
        place = (without_numbers(f.place), bool(f.module), re.sub(r"\d+", "#", finding_name(f)))
        proved = tuple(p.removesuffix(LIKE) for p in f.proved)
        alike.setdefault((key, known, half, f.runtimes, proved, failed, place), []).append(f)
    return [group for members in alike.values() for group in _merge_paths(members)]


def finding_name(finding: Finding) -> str:
    """Name a finding.

    Returns:
        the module path, or the tensor in parentheses if the path is unknown.
    """
    return finding.module or f"({finding.tensor})"


def describe_outcome(group: FindingGroup) -> str:
    """Describe the form after the rewrite, without the status that precedes it.

    Returns:
        text, for example "into Conv 'c'" for "folded into Conv 'c'".
    """
    first = group.first_finding
    if len(group.findings) > 1:
        text = without_numbers(first.became)
    else:
        text = first.became
    return text.removeprefix(f"{first.status} ")


def result_text(group: FindingGroup) -> Text:
    """Describe the result for a group's norms.

    Returns:
        the status, the outcome and the reason, for example "fused into LayerNormalization(axis=-1)".
    """
    first = group.first_finding
    text = Text(STATUS_WORDS[first.status], style=COLOURS[first.status])
    outcome = describe_outcome(group)
    if outcome:
        if first.became.startswith(f"{first.status} "):
            joint = " "
        else:
            joint = " into " if first.status == "fused" else ": "
        text.append(f"{joint}{outcome}", style="default")
    if reason := describe_reason(group):
        text.append(f"{'; ' if outcome else ': '}{reason}", style="dim" if outcome else "default")
    return text


def without_numbers(text: str) -> str:
    """Replace numbers in quoted names by *, so that 'layers.3.conv' and 'layers.4.conv' become equal.

    Returns:
        the new text.
    """
    return re.sub(r"'[^']*'", lambda name: re.sub(r"\d+", "*", name[0]), text)


def _merge_paths(findings: list[Finding]) -> list[FindingGroup]:
    """Merge findings whose paths differ only in numbers.

    Paths that differ in one number are merged, beginning with the last number.
    """
    words = re.split(r"\d+", finding_name(findings[0]))
    rows: list[tuple[tuple[frozenset[int], ...], list[Finding]]] = [
        (tuple(frozenset({int(n)}) for n in re.findall(r"\d+", finding_name(f))), [f]) for f in findings
    ]
    for place in reversed(range(-1, len(words) - 1)):
        merged: dict[tuple[frozenset[int], ...], list[tuple[tuple[frozenset[int], ...], list[Finding]]]] = {}
        for numbers, members in rows:
            if place < 0:
                others = numbers
            else:
                others = numbers[:place] + numbers[place + 1 :]
            merged.setdefault(others, []).append((numbers, members))
        rows = [
            (
                tuple(frozenset().union(*column) for column in zip(*(numbers for numbers, _ in same), strict=True)),
                [f for _, members in same for f in members],
            )
            for same in merged.values()
        ]
    return [FindingGroup(_format_path(words, numbers), tuple(members)) for numbers, members in rows]


def _format_path(words: list[str], numbers: tuple[frozenset[int], ...]) -> str:
    return words[0] + "".join(_format_numbers(n) + word for n, word in zip(numbers, words[1:], strict=True))


def _format_numbers(numbers: frozenset[int]) -> str:
    low = min(numbers)
    high = max(numbers)
    if low == high:
        return str(low)
    if len(numbers) == high - low + 1:
        return f"{{{low}..{high}}}"
    ordered = [str(n) for n in sorted(numbers)]
    if len(ordered) <= _LISTED:
        listed = ordered
    else:
        listed = [*ordered[: _LISTED - 2], "…", ordered[-1]]
    return f"{{{','.join(listed)}}}"


def location_text(group: FindingGroup) -> Text:
    """Format a group's name, count and place.

    Returns:
        text for the first column.
    """
    if len(group.findings) > 1:
        count = f" ×{len(group.findings)}"
    else:
        count = ""
    if group.first_finding.place:
        place = f" in {group.first_finding.place}"
    else:
        place = ""
    return Text(group.name).append(count + place, style="dim")


def kind_text(group: FindingGroup, *, brief: bool = False) -> Text:
    """Describe the kind of a group's norms, and the nodes of one norm.

    Args:
        brief: True to count nodes instead of listing them, and to omit a single standard node of the same kind.

    Returns:
        for example "LayerNorm in 9 nodes", "BatchNorm" or "LayerNorm SkipLayerNormalization (com.microsoft)".
    """
    first = group.first_finding
    spelling = first.spelling
    if brief and (count := first.count_nodes_before()) > 1:
        spelling = f"in {count} nodes"
    elif brief and spelling == f"{first.kind}alization":
        spelling = ""
    return Text(first.kind, style="bold").append(f" {spelling}" if spelling else "", style="not bold dim")


def describe_reason(group: FindingGroup) -> str:
    """Return the group's reason, without the numbers in names if there are several findings.

    Returns:
        text; "" without a reason.
    """
    several = len(group.findings) > 1
    if several:
        return without_numbers(group.first_finding.reason)
    return group.first_finding.reason


def _describe_identity(worst: Certificate, cases: int, exact: bool, bits: int) -> str:
    if exact:
        return f"exact, {cases} points, error 2^-{bits}"
    return f"identity {worst.error:.1g} ≤ {worst.bound:.0g}, {cases} inputs"


def summarize_proof(group: FindingGroup) -> list[str]:
    """Describe briefly how a group's rewrites were proved. The reports contain points and probabilities.

    Returns:
        for example ["exact", "checked in onnxruntime"].
    """
    lines = {
        "onnxruntime run": "checked in onnxruntime",
        f"onnxruntime run{LIKE}": "one like it checked in onnxruntime",
    }
    proofs = [f.certificate for f in group.findings if f.certificate is not None]
    if proofs:
        worst = _worst_certificate(proofs)
        exact = all(c.method == "exact" for c in proofs)
        lines["identity"] = "exact" if exact else f"float64, error {worst.error:.1g}"
        for c in proofs:
            if c.is_rounding_ok is False:
                inaccurate = f"onnxruntime: error {c.rounding_after:.1g} > {c.rounding_bound:.1g}"
                lines["onnxruntime run"] = lines[f"onnxruntime run{LIKE}"] = inaccurate
    return [lines.get(place, place) for place in group.first_finding.proved]


def _worst_certificate(proofs: list[Certificate]) -> Certificate:
    return max(proofs, key=lambda c: math.inf if math.isnan(c.error) else c.error)


def describe_proof(group: FindingGroup) -> list[str]:
    """Describe the evidence of a group, with the worst errors of its certificates.

    Returns:
        one text per kind of evidence.
    """
    proofs = [f.certificate for f in group.findings if f.certificate is not None]
    if not proofs:
        return list(group.first_finding.proved)
    worst = _worst_certificate(proofs)
    lines = {
        "identity": _describe_identity(
            worst, sum(c.cases for c in proofs), all(c.method == "exact" for c in proofs), min(c.bits for c in proofs)
        )
    }
    rounding = [c for c in proofs if c.rounding_after is not None and c.rounding_bound is not None]
    if rounding:
        ran = max(rounding, key=lambda c: (c.rounding_after or 0) / (c.rounding_bound or 1))
        if ran.is_rounding_ok:
            sign = "≤"
        else:
            sign = ">"
        lines["onnxruntime run"] = f"onnxruntime run {ran.rounding_after:.1g} {sign} {ran.rounding_bound:.1g}"
    return [lines.get(place, place) for place in group.first_finding.proved]
