"""What a verb shows: a bar while it works, tables afterwards, and the report as a file."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import NormdeployError, RuntimeUnavailable, escape_line
from ..log import log
from ..reports.page_templates import require_page_libraries
from ..storage.file_replacement import resolve_writable_path, write_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ..findings.rendering import Renderable
    from ..reports.report import Report
    from ..types import Progress
    from .options import ReportingOptions


# Standard output and standard error, to which C++ writes past Python's streams.
_PRINTED_TO = (1, 2)


def require_reports(reporting: ReportingOptions, used: Iterable[Any] = ()) -> None:
    """Before any work: report and page can be written, and replace nothing of ``used``, what the verb reads and writes,
    or in it."""
    require_writable_report(reporting.report, reporting.html, used)


def require_writable_report(file: Path | None, html: Path | None = None, used: Iterable[Any] = ()) -> None:
    """As `require_reports`."""
    taken = {os.path.realpath(path): path for path in used}
    for path in (file, html):
        if path is None:
            continue
        target = os.fspath(resolve_writable_path(path))
        replaced = taken.get(target) or (
            path if os.path.exists(target) and any(target.startswith(f"{t}{os.sep}") for t in taken) else None
        )
        if replaced is not None:
            raise NormdeployError(f"the report {str(path)!r} would replace {str(replaced)!r}; give it another name")
        taken[target] = path
    if html is not None:
        require_page_libraries()


def require_all_run(missed: Iterable[object]) -> None:
    """End a verb that found nothing wrong with the exit code of what was not run.

    Raises:
        RuntimeUnavailable: something that the user named was not.
    """
    if told := "; ".join(map(str, missed)):
        raise RuntimeUnavailable(told)


def print_line(text: Text | str = "") -> None:
    """Print a line beside the tables."""
    make_console().print(text)


def print_report(result: Renderable, account: Report, reporting: ReportingOptions) -> None:
    """Print the tables of a result, and write the files of its report."""
    if reporting.report is not None or reporting.html is not None:
        text = replace(account, command=shlex.join(["normdeploy", *sys.argv[1:]])).to_json()
        if reporting.report is not None:
            # A name that is no text keeps its bytes as JSON writes them.
            write_bytes(reporting.report, text.encode(errors="backslashreplace"))
        if reporting.html is not None:
            from ..reports.report_page import render_page

            write_bytes(reporting.html, render_page(json.loads(text)).encode(errors="replace"))
    if not reporting.quiet:
        result.show(make_console())


def make_console() -> Console:
    """Standard output; wide enough for the tables where it is a file or a pipe."""
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(highlight=False, width=120)


@contextmanager
def silence_output(*, quiet: bool) -> Iterator[None]:
    """Drop what libraries print while a verb works, where the user wants nothing: they write past Python's streams.

    The log of ``-v`` is wanted, so nothing is dropped then.
    """
    closed = sys.stdout is None or sys.stderr is None
    if not quiet or closed or log.isEnabledFor(logging.INFO):
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    kept = [os.dup(descriptor) for descriptor in _PRINTED_TO]
    _redirect_output([nowhere, nowhere])
    try:
        yield
    finally:
        _redirect_output(kept)
        for descriptor in (nowhere, *kept):
            os.close(descriptor)


def _redirect_output(targets: Iterable[int]) -> None:
    """Let standard output and error go there; what the streams hold back goes where it was written to."""
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor, target in zip(_PRINTED_TO, targets, strict=True):
        os.dup2(target, descriptor)


@contextmanager
def show_progress(quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on standard error that is gone afterwards; none where nobody would see it.

    A quiet verb has none, and what libraries print is dropped.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        with silence_output(quiet=quiet):
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

        def update_bar(stage: str, done: int, total: int) -> None:
            shown.update(task, description=escape_line(stage), completed=done, total=total or None)

        yield update_bar
