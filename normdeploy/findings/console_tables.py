"""Tables of the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import escape_line


def make_table(*columns: str) -> Table:
    """Return a table without rows, whose cells are broken where they are too long."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def file_title(file: str) -> Text:
    """The name of a file above its tables, where a verb is about several."""
    return Text(escape_line(file), style="bold")


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Print the notes, one per line."""
    for note in notes:
        console.print(Text(f"note: {escape_line(note)}", style="yellow"))
