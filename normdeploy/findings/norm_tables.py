"""Print the norms of a graph: the result of each norm, the reasons of skipped norms, and the totals."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from .census_tables import show_census, show_explanations
from .console_tables import make_table, print_notes
from .finding_groups import (
    group_findings,
    kind_text,
    location_text,
    result_text,
    summarize_proof,
)
from .quantization_tables import show_layers
from .records import STATUS_WORDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .records import Finding, Summary

SKIPPED = tuple(status for status, word in STATUS_WORDS.items() if word == "skipped")
# Maximum number of op types that are named if a file has more nodes than before
_NAMED = 3
# Op type -> reason why a file has more nodes of this type than before
_WHY_MORE = {
    "Cast": " (between half precision and float32)",
    "QuantizeLinear": " (quantization)",
    "DequantizeLinear": " (quantization)",
    "Reshape": " (copies nothing)",
}
_OTHERS = {
    "attention": ("Attention",),
    "activation": ("Gelu", "HardSwish", "HardSigmoid", "Sigmoid", "Tanh", "Softsign"),
}


def show_summary(console: Console, summary: Summary) -> None:
    """Print every norm with its proposed rewrite. With ``--explain``, print only the explained norms."""
    if summary.explanations:
        show_explanations(console, summary.explanations)
        return
    show_census(console, summary)
    if summary.layers:
        show_layers(console, summary.layers)
    console.print(Text(f"with optimize: {describe_totals(summary)}"))
    print_notes(console, summary.notes)


def show_norms(console: Console, summary: Summary) -> None:
    """Print the rewritten norms, the skipped norms with reasons, and the totals."""
    _show_norm_table(console, [f for f in summary.findings if f.status not in SKIPPED])
    _show_norm_table(console, [f for f in summary.findings if f.status in SKIPPED])
    console.print(Text(describe_totals(summary)))


def describe_totals(summary: Summary) -> str:
    """Count norms by status, and nodes before and after.

    Returns:
        one line, for example "1 fused; norm nodes 10 → 1, all nodes 18 → 2; opset 21".
    """
    parts = [_count_norms(summary)]
    if summary.findings:
        parts.append(f"norm nodes {summary.norm_nodes}, {_count_nodes(summary)}")
    else:
        parts.append(_count_nodes(summary))
    for word, ops in _OTHERS.items():
        if count := sum(max(0, added) for added in (_count_added(summary, op) for op in ops)):
            parts.append(f"{count} {word}{'s' * (count > 1)} as one node each")
    return "; ".join([*parts, f"opset {summary.opset}"])


def _count_norms(summary: Summary) -> str:
    counts = Counter(STATUS_WORDS[f.status] for f in summary.findings)
    left = Counter(" and ".join(f.remains.split()) for f in summary.findings if f.remains)
    remains = f" (left: {', '.join(f'{count} × {ops}' for ops, count in left.items())})" if left else ""
    words = [
        f"{counts[word]} {word}{remains if word == STATUS_WORDS['folded'] else ''}"
        for word in dict.fromkeys(STATUS_WORDS.values())
        if counts[word]
    ]
    return ", ".join(words) or "no normalization found"


def _count_nodes(summary: Summary) -> str:
    """Describe the change of the number of nodes. If it grew, name the added ops and the reason."""
    text = f"all nodes {summary.nodes_before} → {summary.nodes_after}"
    if summary.nodes_after <= summary.nodes_before:
        return text
    ops = sorted(summary.ops_after, key=lambda op: -_count_added(summary, op))
    added = [f"{n} more {op}{_WHY_MORE.get(op, '')}" for op in ops[:_NAMED] if (n := _count_added(summary, op)) > 0]
    return f"{text}: {', '.join(added)}" if added else text


def _count_added(summary: Summary, op: str) -> int:
    return summary.ops_after.get(op, 0) - summary.ops_before.get(op, 0)


def _show_norm_table(console: Console, findings: Sequence[Finding]) -> None:
    if not findings:
        return
    groups = group_findings(findings)
    proofs = [", ".join(summarize_proof(group)) for group in groups]
    columns = ("module", "norm", "result", "proof") if any(proofs) else ("module", "norm", "result")
    table = make_table(*columns)
    for group, proof in zip(groups, proofs, strict=True):
        status = group.first_finding.status
        result = result_text(group)
        for note in group.first_finding.notes:
            result.append(f"\n{note}", style="yellow")
        cells = (location_text(group), kind_text(group, brief=status not in SKIPPED), result, Text(proof))
        table.add_row(*cells[: len(columns)])
    console.print(table)
