"""What became of each linear layer of a quantized file, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ..quantization.account import Layer, Quantization


def show_quantization(console: Console, account: Quantization) -> None:
    """Layers that share their lot in one line; then the metrics, what stayed float for their sake, and the totals."""
    table = _table("layers", "op", "weights", "input", "moved into them", "because")
    for layers in _alike(account.layers):
        first = layers[0]
        many = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
        quantized = first.status == "quantized"
        table.add_row(
            Text(f"{first.module or first.tensor}{many}"),
            first.op,
            first.weight if quantized else "float",
            (first.activation or "float") if quantized else "",
            ", ".join(first.migrated),
            Text(first.reason),
        )
    console.print(table)
    _metrics(console, account)
    refused: dict[str, int] = {}
    for m in account.migrations:
        if m.status == "refused":
            refused[m.reason] = refused.get(m.reason, 0) + len(m.linears)
    for reason, count in refused.items():
        console.print(Text(f"not moved into {count} layer{'s' if count > 1 else ''}: {reason}", style="dim"))
    done = sum(layer.status == "quantized" for layer in account.layers)
    before, after = (f"{size / 1e6:.1f} MB" for size in account.bytes)
    ran = f"{account.calibrated} samples calibrated ({account.calibration}), {account.judging} judged"
    told = ran if account.calibrated else "no samples: nothing was judged"
    console.print(Text(f"{account.to}: {done} of {len(account.layers)} layers; weights {before} → {after}; {told}"))
    for note in account.notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _metrics(console: Console, account: Quantization) -> None:
    if account.judged:
        table = _table("output", "metric", "asked for", "quantized", "float32")
        for j in account.judged:
            table.add_row(j.output, j.metric, f"{j.threshold:g}", f"{j.value:.6g}", f"{j.float32:.6g}")
        console.print(table)
    if account.exclusions:
        table = _table("left in float", "metric", "before", "after")
        for step in account.exclusions:
            table.add_row(", ".join(step.tensors), step.metric, f"{step.before:.6g}", f"{step.after:.6g}")
        console.print(table)


def _alike(layers: tuple[Layer, ...]) -> Iterator[list[Layer]]:
    """Layers that differ in their names alone, in the order of the first."""

    def lot(layer: Layer) -> tuple[str, ...]:
        reason = "" if layer.status == "quantized" else layer.reason.replace(repr(layer.tensor), "")
        weight = layer.weight.split(" for each")[0]
        return layer.status, layer.op, weight, layer.activation, " ".join(layer.migrated), reason

    places = {lot(layer): i for i, layer in reversed(list(enumerate(layers)))}
    for _, group in groupby(sorted(layers, key=lambda layer: places[lot(layer)]), key=lot):
        yield list(group)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
