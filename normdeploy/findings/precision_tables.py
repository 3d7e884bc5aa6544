"""Print the float32 regions of a half-precision file."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from .console_tables import make_table
from .finding_groups import FindingGroup, describe_reason, group_findings, kind_text, location_text
from .metric_tables import drift_lines, exclusion_table, metric_table
from .precision_report import PrecisionReport
from .records import Finding


def show_precision(console: Console, account: PrecisionReport) -> None:
    """Print one line per reason, with all layers that share it, then the metrics, their steps and the totals."""
    values = {region.tensor: region.value for region in account.islands if region.kind == "range"}
    if account.islands:
        table = make_table("module", "kept in float32", "because", "nodes")
        findings = [
            Finding(
                i.op,
                "kept",
                i.tensor,
                i.module,
                reason=i.reason,
                spelling="" if i.kind == "norm" else i.kind,
                tensors=i.nodes,
            )
            for i in account.islands
        ]
        for group in group_findings(findings):
            count = sum(len(f.tensors) for f in group.findings)
            table.add_row(
                location_text(group),
                kind_text(group),
                Text(_describe_largest_value(group, values) + describe_reason(group)),
                str(count),
            )
        console.print(table)
    if account.judged:
        console.print(metric_table(account.judged, account.to))
    if account.exclusions:
        console.print(exclusion_table(account.exclusions))
    before, after = (f"{size / 1e6:.1f} MB" for size in account.bytes)
    if account.calibrated:
        ran = f"calibrated on {account.samples} {account.calibrated} input{'' if account.samples == 1 else 's'}"
    else:
        ran = "not calibrated"
    kept = f"{account.kept} of {account.nodes} floating-point nodes in float32, {account.casts} Casts"
    if account.judging:
        ran += f", metrics on {account.judging} samples"
    console.print(Text(f"{account.to}: {kept}; weights {before} → {after}; {ran}"))
    for line in drift_lines(account.moved):
        console.print(line)
    types = {**account.inputs, **account.outputs}
    console.print(Text("types: " + ", ".join(f"{name}: {kind}" for name, kind in types.items()), style="dim"))
    for note in account.notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _describe_largest_value(group: FindingGroup, values: dict[str, float | None]) -> str:
    """Describe the largest magnitude that calibration saw; "" if the reason is not a value out of range."""
    seen = [v for v in (values.get(f.tensor) for f in group.findings) if v is not None]
    if seen and group.first_finding.spelling == "range":
        return f"largest value {max(seen):.3g}; "
    return ""
