"""What a verb shows: a bar while it works, tables afterwards, and the report as a file."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import NormdeployError, RuntimeUnavailable, printable
from ..reports.html import require
from ..storage.atomic import writable, write_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ..reports.report import Report
    from ..types import Progress


def check_report(file: Path | None, html: Path | None = None, used: Iterable[Path] = ()) -> None:
    """Before any work: report and page can be written, and replace nothing of ``used``, what the verb reads and writes,
    or in it."""
    taken = {os.path.realpath(path): path for path in used}
    for path in (file, html):
        if path is None:
            continue
        target = os.fspath(writable(path))
        replaced = taken.get(target) or (
            path if os.path.exists(target) and any(target.startswith(f"{t}{os.sep}") for t in taken) else None
        )
        if replaced is not None:
            raise NormdeployError(f"the report {str(path)!r} would replace {str(replaced)!r}; give it another name")
        taken[target] = path
    if html is not None:
        require()


def of_file(report: Path | None, file: str) -> Path | None:
    """Where the report of one of several files goes: ``out.json`` is ``out.encoder_model.json`` for
    encoder_model.onnx."""
    return None if report is None else report.with_name(f"{report.stem}.{Path(file).stem}{report.suffix}")


def require_run(missed: Iterable[object]) -> None:
    """End a verb that found nothing wrong with the exit code of what was not run.

    Raises:
        RuntimeUnavailable: something that the user named was not.
    """
    if told := "; ".join(map(str, missed)):
        raise RuntimeUnavailable(told)


def say(text: Text | str = "") -> None:
    """Print a line beside the tables."""
    _console().print(text)


def tell(account: Report, file: Path | None, quiet: bool, html: Path | None = None) -> None:
    """Print the report and write its files."""
    if file is not None or html is not None:
        text = replace(account, command=shlex.join(["normdeploy", *sys.argv[1:]])).json()
        if file is not None:
            # A name that is no text keeps its bytes as JSON writes them.
            write_bytes(file, text.encode(errors="backslashreplace"))
        if html is not None:
            from ..reports.page import page

            write_bytes(html, page(json.loads(text)).encode(errors="replace"))
    if not quiet:
        account.show(_console())


def _console() -> Console:
    """Standard output; wide enough for the tables where it is a file or a pipe."""
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
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as shown:
        task = shown.add_task("")

        def show(stage: str, done: int, total: int) -> None:
            shown.update(task, description=printable(stage), completed=done, total=total or None)

        yield show
