"""Print how engines compute norms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ...engines.layer_info import EngineLayer
from ...engines.layer_kinds import LayerKind
from ...errors import escape_line
from ...findings.console_tables import Column, file_title, make_table, print_notes
from .engine_norms import EngineNorm, NormForm

if TYPE_CHECKING:
    from .engine_report import EngineBuild, EngineReport, NormChange

# Maximum number of layers that are printed
_LAYERS = 10
# Maximum number of names that a cell lists
_NAMES = 4
# Maximum number of characters of a name in a cell
_LONGEST = 60
_STYLES = {NormForm.SEVERAL: "yellow", NormForm.ABSENT: "dim"}


def show_engines(console: Console, report: EngineReport) -> None:
    """Print one engine, or the comparison of two engines."""
    for build in report.builds:
        if len(report.builds) > 1:
            console.print(file_title(build.path))
        _show_build(console, build)
    if report.changes:
        _show_changes(console, report)


def _show_build(console: Console, build: EngineBuild) -> None:
    if build.norms:
        console.print(_norm_table(build.norms, timed=build.total_ms is not None))
    else:
        console.print("no norm was found")
    if not build.onnx:
        console.print(Text("layers by time" if build.total_ms is not None else "first layers", style="bold"))
        console.print(_layer_table(build.layers, build.total_ms))
    console.print(Text(describe_build(build)))
    print_notes(console, build.notes)


def describe_build(build: EngineBuild) -> str:
    """Describe an engine in one line: its layers, its time and the norms' share of it."""
    count = sum(layer.kind is not LayerKind.NONE for layer in build.layers)
    guessed = "" if build.onnx else " (guessed from names; --onnx reads them from the model)"
    text = f"{len(build.norms)} {'norm' if len(build.norms) == 1 else 'norms'} in {count} layers{guessed}"
    if build.total_ms is None:
        return f"{text}; not timed (--profile-json)"
    text = f"{text}; {format_ms(build.total_ms)} in all"
    if build.norm_ms is not None:
        text = f"{text}, layers of norms {format_ms(build.norm_ms)} ({format_share(build.norm_ms, build.total_ms)})"
    if build.reformat_ms:
        text = f"{text}, reformats around them {format_ms(build.reformat_ms)}"
    return text


def format_ms(ms: float | None) -> str:
    """Format milliseconds with three digits; "" for None."""
    if ms is None:
        return ""
    return f"{ms:.3g} ms"


def format_share(part: float | None, whole: float | None) -> str:
    """Format a share in percent; "" if a value is unknown."""
    if part is None or not whole:
        return ""
    return f"{100 * part / whole:.1f} %"


def _norm_table(norms: Sequence[EngineNorm], *, timed: bool) -> object:
    reformatted = any(norm.reformats for norm in norms)
    titles: list[str | Column] = ["norm", "in the engine", "fused with", "types"]
    if timed:
        titles += [Column("ms", whole=True, justify="right"), Column("share", whole=True, justify="right")]
    if reformatted:
        titles.append("reformats")
    table = make_table(*titles)
    for norm in norms:
        cells: list[str | Text] = [
            Text(escape_line(_shorten(norm.name))).append(f" {norm.kind}" if norm.kind else "", style="dim"),
            Text(describe_form(norm), style=_STYLES.get(norm.form, "")),
            describe_fused(norm),
            describe_types(norm),
        ]
        if timed:
            cells += ["" if norm.ms is None else f"{norm.ms:.3g}", _share_of(norm)]
        if reformatted:
            cells.append(_describe_reformats(norm))
        table.add_row(*cells)
    return table


def describe_form(norm: EngineNorm) -> str:
    """Describe the form with TensorRT's types of the layers, for example "one compiled kernel (kgen)"."""
    types = escape_line(", ".join(map(_shorten, norm.layer_types[:_NAMES])))
    if norm.form is NormForm.SEVERAL:
        return f"{len(norm.layers)} layers ({types})"
    if norm.form is NormForm.ABSENT:
        return str(norm.form)
    return f"{norm.form} ({types})" if types and types != norm.form else str(norm.form)


def describe_fused(norm: EngineNorm) -> str:
    """List the ops and norms that share the norm's layers."""
    parts = []
    if norm.fused_with:
        parts.append(" ".join(map(_shorten, norm.fused_with[:_NAMES])))
        if len(norm.fused_with) > _NAMES:
            parts[-1] += f" … {len(norm.fused_with)} in all"
    if norm.shared_with:
        more = len(norm.shared_with) - 1
        parts.append(f"norm {_shorten(norm.shared_with[0])}" + (f" and {more} more" if more else ""))
    return escape_line("; ".join(parts))


def describe_types(norm: EngineNorm) -> str:
    """Describe the types of inputs and outputs, for example "float16 → float16, float32"; "" if unknown."""
    if not norm.inputs and not norm.outputs:
        return ""
    return f"{', '.join(norm.inputs) or '?'} → {', '.join(norm.outputs) or '?'}"


def _share_of(norm: EngineNorm) -> str:
    return "" if norm.share is None else f"{100 * norm.share:.1f} %"


def _describe_reformats(norm: EngineNorm) -> str:
    if not norm.reformats:
        return ""
    time = "" if norm.reformat_ms is None else f", {format_ms(norm.reformat_ms)}"
    return f"{len(norm.reformats)}{time}"


def _layer_table(layers: Sequence[EngineLayer], total_ms: float | None) -> object:
    """Return a table of the slowest layers; of the first layers if no layer was timed."""
    computing = [layer for layer in layers if layer.kind is not LayerKind.NONE]
    titles: list[str | Column] = ["layer", "kind"]
    if total_ms is not None:
        computing.sort(key=lambda layer: -(layer.ms or 0))
        titles += [Column("ms", whole=True, justify="right"), Column("share", whole=True, justify="right")]
    table = make_table(*titles)
    for layer in computing[:_LAYERS]:
        named = f"{layer.kind} ({layer.plugin or layer.type})" if layer.type else str(layer.kind)
        cells = [escape_line(_shorten(layer.name)), escape_line(_shorten(named))]
        if total_ms is not None:
            cells += ["" if layer.ms is None else f"{layer.ms:.3g}", format_share(layer.ms, total_ms)]
        table.add_row(*cells)
    return table


def _show_changes(console: Console, report: EngineReport) -> None:
    first, second = report.builds
    changed = [change for change in report.changes if change.changed]
    console.print(Text("changes", style="bold"))
    if changed:
        table = make_table(
            "norm", "changed", *_two_titles(first.path, second.path), Column("time", whole=True, justify="right")
        )
        for change in changed:
            table.add_row(
                escape_line(_shorten(change.name)),
                ", ".join(change.changed),
                _describe_side(first, change.first),
                _describe_side(second, change.second),
                describe_factor(change),
            )
        console.print(table)
    same = len(report.changes) - len(changed)
    console.print(f"{len(changed)} of {len(report.changes)} norms changed, {same} did not")


def _two_titles(first: str, second: str) -> tuple[str, str]:
    """Return file names for the titles of two columns; whole paths if the names are equal."""
    names = Path(first).name, Path(second).name
    if names[0] == names[1]:
        names = first, second
    return escape_line(_shorten(names[0])), escape_line(_shorten(names[1]))


def _describe_side(build: EngineBuild, index: int | None) -> str:
    if index is None:
        return "not there"
    norm = build.norms[index]
    time = format_ms(norm.ms)
    if norm.reformat_ms:
        time = f"{time} and {format_ms(norm.reformat_ms)} of reformats"
    return "; ".join(filter(None, (describe_form(norm), describe_types(norm), time)))


def describe_factor(change: NormChange) -> str:
    """Format the factor between two times, for example "×0.52"; "" if unknown."""
    return "" if change.factor is None else f"×{change.factor:.2f}"


def _shorten(name: str) -> str:
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST // 2]}…{name[-_LONGEST // 2 + 1 :]}"
