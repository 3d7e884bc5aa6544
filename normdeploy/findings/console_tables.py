"""Tables of the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import escape_line


def make_table(*columns: str) -> Table:
    """Make a table without rows that wraps long cells.

    Returns:
        the table.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def file_title(file: str) -> Text:
    """Make the title above a file's tables, for verbs with several files.

    Returns:
        bold file name on one line.
    """
    return Text(escape_line(file), style="bold")


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Print the notes, one per line."""
    for note in notes:
        console.print(Text(f"note: {escape_line(note)}", style="yellow"))
