"""Results as text and as HTML: what the command line prints of them, without a terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.text import Text

from ..errors import escape_line
from .check_text import render_check as lines
from .package_tables import show_judgement, show_package, show_recheck
from .report import Report

# columns, as the command line takes for a file or a pipe
_WIDTH = 120
_PRE = '<pre style="white-space:pre;overflow-x:auto;line-height:1.3">{code}</pre>'


def file_title(file: str) -> Text:
    """The name of a file above its tables, where a verb is about several."""
    return Text(escape_line(file), style="bold")


def parts_verdict(result: Any) -> Text:
    """One line on all files of a ``PartsComparison``."""
    notes = "".join(f"note: {escape_line(note)}\n" for note in result.notes)
    failing = [file for file, comparison in result.comparisons.items() if not comparison]
    count = len(result.comparisons)
    if failing:
        verdict = f"{len(failing)} of {count} parts fail: {escape_line(', '.join(failing))}"
    else:
        verdict = f"all {count} parts are verified"
    return Text(notes, style="yellow").append(verdict, style="red" if failing else "green")


def render_text(result: Any) -> str:
    """The tables of a result, without colours and without a newline at the end."""
    console = Console(file=io.StringIO(), width=_WIDTH, highlight=False, color_system=None)
    show_result(console, result)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).strip("\n")  # type: ignore[attr-defined]


def render_html(result: Any) -> str:
    """The same as a block of HTML with its colours; what files brought along is escaped."""
    console = Console(
        file=io.StringIO(), width=_WIDTH, highlight=False, record=True, color_system="standard", force_terminal=True
    )
    show_result(console, result)
    return console.export_html(inline_styles=True, code_format=_PRE)


def show_result(console: Console, result: Any) -> None:
    """Print what the verb prints that gives such a result."""
    # the classes live with their verbs, and importing one would import torch
    match type(result).__name__:
        case "ExportResult":
            Report("export", {}, result.summary, precision=result.precision, notes=result.notes).show(console)
        case "Summary":
            Report("inspect", {}, result).show(console)
        case "Engine":
            Report("build", {}, engine=result).show(console)
        case "Comparison":
            Report("verify", {}, parity=result).show(console)
        case "ExportedParts":
            for file, exported in result.items():
                console.print(file_title(file))
                show_result(console, exported)
                console.print()
        case "PartsComparison":
            for file, comparison in result.comparisons.items():
                console.print(file_title(file))
                show_result(console, comparison)
                console.print()
            console.print(parts_verdict(result))
        case "Bisection":
            Report("bisect", {}, parity=result.parity, bisection=result).show(console)
        case "Race":
            Report("bench", {}, race=result).show(console)
        case "Inference":
            Report("run", {}, inference=result, notes=result.notes).show(console)
        case "Check":
            console.print(Text(lines(result).rstrip("\n")), soft_wrap=True)
        case "Package":
            show_package(console, result)
        case "Recheck":
            show_recheck(console, result)
        case "Judgement":
            show_judgement(console, result)
        case name:
            raise TypeError(f"nothing shows a {name}")
