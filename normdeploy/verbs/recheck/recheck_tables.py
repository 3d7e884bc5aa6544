"""Print the findings of ``recheck``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ...errors import escape_line
from ...findings.console_tables import make_table
from ..package.package_tables import print_verdict, show_judgement

if TYPE_CHECKING:
    from .recheck_function import Recheck

# Maximum number of changes that are printed. A manifest may name any number of versions and files.
_ROWS = 200


def show_recheck(console: Console, outcome: Recheck) -> None:
    """Print the changes, the verdicts of the runtimes on the samples, and the overall verdict."""
    console.print(
        Text(escape_line(f"{outcome.path}: {outcome.name}, made {outcome.made}; {outcome.files} files compared"))
    )
    if outcome.changes:
        table = make_table("kind", "name", "before", "now")
        # Regressions are printed first, so that the limit does not hide them.
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
    print_verdict(console, bool(outcome), "nothing got worse", f"{worse} got worse")
