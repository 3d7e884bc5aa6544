"""Print the report on a quantization, and the quantized layers of a file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from .console_tables import WordTable, make_table
from .metric_tables import drift_lines, exclusion_table, metric_table
from .quantization_report import LayerReport, Migration, QuantizationReport
from .records import QuantizedLayer

_OF = {"center": "stream", "rotate": "stream"}
_COLOURS = {"quantized": "green", "weight": "green", "activation": "yellow", "float": "yellow"}


def quantization_summary(account: QuantizationReport) -> RenderableType:
    """Build the tables of a quantization.

    Returns:
        the layers, the metrics compared with float32, the effect of each exclusion, and the totals with the refused
        migrations.
    """
    parts: list[RenderableType]
    if account.layers:
        parts = [_layer_table(account.layers)]
    else:
        parts = []
    if account.judged:
        parts.append(metric_table(account.judged, "quantized"))
    if account.exclusions:
        parts.append(exclusion_table(account.exclusions))
    return Group(*parts, *_iter_totals(account))


def show_quantization(console: Console, account: QuantizationReport) -> None:
    """Print the tables of `quantization_summary`, and the notes."""
    console.print(quantization_summary(account))
    for note in account.notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _layer_table(layers: Sequence[LayerReport]) -> WordTable:
    """Build a table of the layers.

    Layers that differ only in names and numbers share a line; the JSON report lists each.
    """
    told = make_table("layer", "status", "weight", "activation", "migrated", "error alone", "because")
    for alike in _group_alike_layers(layers):
        first = alike[0]
        if len(alike) > 1:
            many = f" and {len(alike) - 1} more"
        else:
            many = ""
        errors = [layer.error for layer in alike if layer.error is not None]
        told.add_row(
            _layer_name(f"{first.module}{many}" if first.module else "", f"{first.tensor}{many}", first.op),
            Text(first.status, style=_COLOURS[first.status]),
            first.weight if len({layer.weight for layer in alike}) == 1 else first.weight.split(" for each")[0],
            first.activation if many else _describe_activation(first.activation, first.scale, first.zero_point),
            ", ".join(first.migrated),
            f"{max(errors):.1e}" if errors else "",
            Text(first.reason),
        )
    return told


def _group_alike_layers(layers: Sequence[LayerReport]) -> list[list[LayerReport]]:
    """Group layers that differ only in names and numbers, in the order of each group's first layer."""
    lots: dict[tuple[str, ...], list[LayerReport]] = {}
    for layer in layers:
        weight = layer.weight.split(" for each")[0]
        lot = (layer.status, layer.op, weight, layer.activation, " ".join(layer.migrated), layer.reason)
        lots.setdefault(lot, []).append(layer)
    return list(lots.values())


def _iter_totals(account: QuantizationReport) -> Iterator[Text]:
    count = sum(layer.status == "quantized" for layer in account.layers)
    before, after = (f"{size / 1e6:.1f} MB" for size in account.bytes)
    if account.calibrated:
        how = f"{account.calibration} on {account.calibrated} samples"
    else:
        how = account.calibration
    if account.judging:
        judged = f", metrics on {account.judging} other samples"
    else:
        judged = ""
    if account.runtime == "any":
        runtime = "any runtime"
    else:
        runtime = account.runtime
    yield Text(
        f"{account.to} for {runtime}: {count} of {len(account.layers)} linear layers; weights {before} →"
        f" {after}; calibration {how}{judged}"
    )
    yield from drift_lines(account.moved)
    fitted = sum(layer.rounding == "GPTQ" for layer in account.layers)
    if fitted:
        yield Text(f"weights of {fitted} layer{'' if fitted == 1 else 's'} rounded by GPTQ")
    made: dict[str, set[str]] = {}
    refused: dict[tuple[str, str], list[Migration]] = {}
    for migration in account.migrations:
        if migration.status == "made":
            made.setdefault(migration.kind, set()).add(migration.norm)
        else:
            # Print refusals that differ only in the names of nodes on one line.
            refused.setdefault((migration.kind, re.sub(r"'[^']*'", "", migration.reason)), []).append(migration)
    for (kind, _), alike in refused.items():
        if len(alike) > 1:
            more = f" and {len(alike) - 1} more"
        else:
            more = ""
        yield Text(f"not migrated: {kind} of {alike[0].norm}{more}: {alike[0].reason}", style="yellow")
    if made:
        told = (f"{kind} of {len(of)} {_OF.get(kind, 'norm')}{'s' * (len(of) > 1)}" for kind, of in made.items())
        yield Text("migrated: " + ", ".join(told))


def show_layers(console: Console, layers: Sequence[QuantizedLayer]) -> None:
    """Print the linear layers and convolutions of a quantized file, one per row, then the totals."""
    told = make_table("layer", "status", "weight", "input", "input's range")
    for layer in layers:
        told.add_row(
            _layer_name(layer.module, layer.tensor, layer.op).append(
                f"\nin {layer.place}" if layer.place else "", style="dim"
            ),
            Text(layer.status, style=_COLOURS[layer.status]),
            _describe_weight(layer),
            _describe_activation(layer.activation, layer.scale, layer.zero_point, layer.dynamic),
            _format_range(layer.low, layer.high),
        )
    console.print(told)
    counts = {status: sum(layer.status == status for layer in layers) for status in _COLOURS}
    words = {"weight": "with its weight alone", "activation": "with its input alone", "float": "in float"}
    parts = [f"{counts['quantized']} of {len(layers)} linear layers quantized"]
    console.print(Text(", ".join(parts + [f"{counts[s]} {word}" for s, word in words.items() if counts[s]])))


def _describe_weight(layer: QuantizedLayer) -> str:
    if not layer.weight:
        return ""
    each = {"tensor": "one scale", "": "scale after it"}.get(layer.granularity, layer.granularity)
    return f"{layer.weight}, {each}" + ("" if layer.weight_symmetric else ", zero points")


def _describe_activation(kind: str, scale: float | None, zero_point: int | None, dynamic: bool = False) -> str:
    if not kind:
        return ""
    if scale is None:
        if dynamic:
            return f"{kind}, range computed at run time"
        return kind
    return f"{kind}, scale {scale:.3g}" + (f", zero point {zero_point}" if zero_point else "")


def _format_range(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    return f"{low:.4g} to {high:.4g}"


def _layer_name(module: str, tensor: str, op: str) -> Text:
    return Text(module or f"({tensor})").append(f"  {op}", style="dim")
