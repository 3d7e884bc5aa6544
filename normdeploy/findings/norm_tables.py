"""Print the norms of a graph: each outcome, the reasons for unchanged norms, and the totals."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from .census_tables import show_census, show_explanations
from .console_tables import make_table, print_notes
from .finding_groups import (
    COLOURS,
    FindingGroup,
    describe_outcome,
    describe_proof,
    describe_reason,
    group_findings,
    kind_text,
    location_text,
)
from .quantization_tables import show_layers

if TYPE_CHECKING:
    from .records import Summary

_ORDER = ("fused", "folded", "reduced", "kept", "refused", "undone")
# Other single nodes that rewrites produce, besides norms.
_OTHERS = {
    "attention": ("Attention",),
    "activation": ("Gelu", "HardSwish", "HardSigmoid", "Sigmoid", "Tanh", "Softsign"),
}


def show_summary(console: Console, summary: Summary) -> None:
    """Print every norm with its proposed rewrite, or the explained norms only."""
    if summary.explanations:
        show_explanations(console, summary.explanations)
        return
    show_census(console, summary)
    if summary.layers:
        show_layers(console, summary.layers)
    _show_totals(console, summary, when="now")
    print_notes(console, summary.notes)


def show_norms(console: Console, summary: Summary) -> None:
    """Print the rewritten norms, the unchanged ones with their reasons, and the totals."""
    _show_done_norms(console, summary)
    _show_totals(console, summary, when="before")


def _show_totals(console: Console, summary: Summary, when: str) -> None:
    counts = Counter("reduced" if f.remains else f.status for f in summary.findings)
    text = (
        ", ".join(f"{counts[status]} {_describe_status(summary, status)}" for status in _ORDER if counts[status])
        or "no normalization found"
    )
    nodes = f"{summary.nodes_before} nodes {when}, {summary.nodes_after} after"
    others = "".join(
        f"; {n} {word}{'s' * (n > 1)} as one node each"
        for word, ops in _OTHERS.items()
        if (n := _count_added_nodes(summary, ops))
    )
    console.print(f"{text}; {nodes}{others}; opset {summary.opset}")


def _count_added_nodes(summary: Summary, ops: tuple[str, ...]) -> int:
    """Count the nodes of these ops that the rewrites added."""
    return sum(max(0, summary.ops_after.get(op, 0) - summary.ops_before.get(op, 0)) for op in ops)


def _describe_status(summary: Summary, status: str) -> str:
    """Return the word for a status. For norms that were not folded completely, add the ops that remain."""
    if status != "reduced":
        return status
    left = Counter(f.remains for f in summary.findings if f.remains)
    return (
        "reduced to one scale and shift (left: "
        + ", ".join(f"{n} × {' and '.join(ops.split())}" for ops, n in left.items())
        + ")"
    )


def _show_done_norms(console: Console, summary: Summary) -> None:
    done = [f for f in summary.findings if f.status in ("fused", "folded", "kept")]
    left = [f for f in summary.findings if f.status in ("refused", "undone")]
    if done:
        table = make_table("module", "found", "what became of it", "proof")
        for group in group_findings(done):
            table.add_row(*_outcome_row(group))
        console.print(table)
    if left:
        table = make_table("module", "found", "left as it is, because")
        for group in group_findings(left):
            table.add_row(
                location_text(group),
                kind_text(group),
                Text(describe_reason(group), style=COLOURS[group.first_finding.status]),
            )
        console.print(table)


def _outcome_row(group: FindingGroup) -> tuple[Text, Text, Text, Text]:
    first = group.first_finding
    what = Text("reduced:" if first.remains else first.status, style=COLOURS[first.status]).append(
        f" {text}" if (text := describe_outcome(group)) else "", style="default"
    )
    if first.reason:
        what.append(f"; {describe_reason(group)}", style="dim")
    for note in first.notes:
        what.append(f"\n{note}", style="yellow")
    return location_text(group), kind_text(group), what, Text("\n".join(describe_proof(group)))
