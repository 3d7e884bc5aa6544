"""What a verb shows: a bar while it works, tables afterwards, and the report as a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from ..deploy import Progress
    from ..report import Report


def check_report(file: Path | None) -> None:
    """Before any work: the report can be written."""
    if file is not None:
        from ..atomic import writable

        writable(file)


def tell(account: Report, file: Path | None, quiet: bool) -> None:
    """Print the report and write its file."""
    if file is not None:
        from ..atomic import write_bytes

        write_bytes(file, account.json().encode())
    if not quiet:
        account.show(_console())


def _console() -> Console:
    """Standard output; wide enough for the tables where it is a file or a pipe."""
    import os

    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=120)


@contextmanager
def bars(quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on standard error that is gone afterwards; none where nobody would see it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True) as shown:
        task = shown.add_task("")

        def show(stage: str, done: int, total: int) -> None:
            shown.update(task, description=stage, completed=done, total=total or None)

        yield show
