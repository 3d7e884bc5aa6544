"""Print the metrics of a quantized or half-precision file, and the steps that reached them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from .console_tables import Column, WordTable, make_table
from .quantization_report import LayerExclusion, MetricReport, OutputDrift, format_metric


def metric_table(judged: Sequence[MetricReport], title: str) -> WordTable:
    """Build a table of the metrics of each output.

    Args:
        title: title of the column with the file's value.

    Returns:
        the table, with the float32 file's value beside the file's.
    """
    numbers = (Column(name, whole=True) for name in (title, "float32", "required", "verdict"))
    told = make_table("output", "metric", *numbers)
    for j in judged:
        if j.met:
            verdict = Text("met", style="green")
        else:
            verdict = Text("not met", style="red")
        values = map(format_metric, (j.value, j.float32, j.threshold))
        told.add_row(Text(j.output), Text(j.metric), *values, verdict)
    return told


def exclusion_table(exclusions: Sequence[LayerExclusion]) -> WordTable:
    """Build a table of the steps that left parts of the model in float.

    Returns:
        the table, with the metric before and after each step.
    """
    told = make_table("left in float", "metric", Column("before", whole=True), Column("after", whole=True))
    for e in exclusions:
        told.add_row(Text(", ".join(e.tensors)), Text(e.metric), format_metric(e.before), format_metric(e.after))
    return told


def drift_lines(moved: Sequence[OutputDrift]) -> Iterator[Text]:
    """Write the error of each output.

    Yields:
        one line per output, red above a tenth.
    """
    for m in moved:
        errors = f"relative error {m.error:.2g}, cosine {m.cosine:.6g}; relative error of float32 {m.float32:.1g}"
        off = f"{m.output}: {errors}"
        yield Text(off, style="" if m.error <= 0.1 else "bold red")
