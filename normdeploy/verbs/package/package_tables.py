"""Print the files that ``package`` wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ...errors import escape_line
from ...findings.console_tables import Column, make_table

if TYPE_CHECKING:
    from .package_function import Package
    from .sample_judgement import Judgement


def show_package(console: Console, made: Package) -> None:
    """Print the bundle, its batching, and the verdicts of the runtimes on the samples."""
    batch = made.serving.max_batch
    if batch:
        served = f"batches of up to {batch}"
    else:
        served = "no batching"
    line = f"{made.path}: {', '.join(made.models)}; {served}; {made.files} files, {made.bytes / 1e6:.1f} MB"
    console.print(Text(escape_line(line)))
    show_judgement(console, made.judgement)
    for note in made.notes:
        console.print(Text(escape_line(f"note: {note}"), style="yellow"))
    print_verdict(console, bool(made), "every sample gives the expected outputs", "some outputs are NOT as expected")


def show_judgement(console: Console, judgement: Judgement) -> None:
    """Print a line for each output in each runtime, followed by the runtimes that were not run."""
    table = make_table(
        "output",
        "runtime",
        *(Column(title, whole=True) for title in ("max abs error", "allowed", "verdict")),
        "worst sample",
    )
    for r in judgement.results:
        cells = (r.output, r.runtime, f"{r.max_abs_error:.2e}", f"{r.allowed:.2e}", r.verdict, r.case)
        table.add_row(*(Text(escape_line(cell)) for cell in cells), style="" if r else "red")
    console.print(table)
    # Reasons are too long for a column, so they are printed below the table. The same reason often applies to all
    # outputs of a runtime, so equal reasons are printed once.
    for line in dict.fromkeys(f"{r.verdict}: {r.runtime}: {r.reason}" for r in judgement.results if r.reason):
        console.print(Text(escape_line(line), style="red"))
    console.print(Text(escape_line(f"{len(judgement.cases)} samples; expected outputs from: {judgement.reference}")))
    for missed in judgement.not_run:
        console.print(Text(escape_line(f"not run: {missed.runtime}: {missed.reason}"), style="dim"))


def print_verdict(console: Console, good: bool, well: str, badly: str) -> None:
    """Print ``well`` in green if everything passed, else ``badly`` in red."""
    console.print(Text(well, style="green") if good else Text(badly, style="red"))
