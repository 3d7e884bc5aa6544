"""What ``package`` and ``recheck`` print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import escape_line

if TYPE_CHECKING:
    from ..verbs.package.package_function import Package
    from ..verbs.package.sample_judgement import Judgement
    from ..verbs.recheck.recheck_function import Recheck


# of changes
_ROWS = 200


def show_package(console: Console, made: Package) -> None:
    """What was written, how Triton is to serve it, and what the runtimes make of the samples."""
    batch = made.serving.max_batch
    served = f"batches of up to {batch}" if batch else "no batching"
    line = f"{made.path}: {', '.join(made.models)}; {served}; {made.files} files, {made.bytes / 1e6:.1f} MB"
    console.print(Text(escape_line(line)))
    show_judgement(console, made.judgement)
    for note in made.notes:
        console.print(Text(escape_line(f"note: {note}"), style="yellow"))
    _print_verdict(console, bool(made), "every sample is as expected, as the models are configured", "NOT as expected")


def show_recheck(console: Console, outcome: Recheck) -> None:
    """What changed, what the runtimes make of the samples now, and the verdict."""
    console.print(
        Text(escape_line(f"{outcome.path}: {outcome.name}, made {outcome.made}; {outcome.files} files compared"))
    )
    if outcome.changes:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("changed", "what", "was", "is now"):
            table.add_column(column, overflow="fold")
        # A manifest may name any number of versions and files; what is worse is told first.
        first = sorted(outcome.changes, key=lambda change: not change.worse)[:_ROWS]
        for change in first:
            cells = (change.what, change.name, change.was or "–", change.now or "–")
            table.add_row(*(Text(escape_line(cell)) for cell in cells), style="red" if change.worse else "")
        console.print(table)
        if len(outcome.changes) > _ROWS:
            console.print(f"and {len(outcome.changes) - _ROWS} more changes; --report writes all")
    else:
        console.print("nothing changed")
    if outcome.judgement is not None:
        show_judgement(console, outcome.judgement)
    for note in outcome.notes:
        console.print(Text(escape_line(f"note: {note}"), style="yellow"))
    worse = sum(change.worse for change in outcome.changes)
    _print_verdict(console, bool(outcome), "nothing got worse", f"{worse} got worse")


def show_judgement(console: Console, judgement: Judgement) -> None:
    """One line for each output and runtime, and what was not run."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("output", "runtime", "max abs error", "allowed", "verdict", "worst sample"):
        table.add_column(column, overflow="fold")
    for r in judgement.results:
        cells = (r.output, r.runtime, f"{r.max_abs_error:.2e}", f"{r.allowed:.2e}", r.verdict, r.case)
        table.add_row(*(Text(escape_line(cell)) for cell in cells), style="" if r else "red")
    console.print(table)
    # A reason is a sentence, which a column would fold into pieces; a runtime's often holds for all of its outputs.
    for line in dict.fromkeys(f"{r.verdict}: {r.runtime}: {r.reason}" for r in judgement.results if r.reason):
        console.print(Text(escape_line(line), style="red"))
    console.print(Text(escape_line(f"{len(judgement.cases)} samples; expected: {judgement.reference}")))
    for missed in judgement.not_run:
        console.print(Text(escape_line(f"not run: {missed.runtime}: {missed.reason}"), style="dim"))


def _print_verdict(console: Console, good: bool, well: str, badly: str) -> None:
    console.print(Text(well, style="green") if good else Text(badly, style="red"))
