"""Output of a verb: a progress bar while it works, tables at the end, and the report as a file."""

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
from ..types import PathLike

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ..findings.rendering import Renderable
    from ..reports.report import Report
    from ..types import Progress
    from .options import ReportingOptions


# File descriptors of standard output and standard error. C++ libraries write to these directly, not through Python's
# streams.
_PRINTED_TO = (1, 2)


def require_reports(reporting: ReportingOptions, used: Iterable[Any] = ()) -> None:
    """Check that the report and the page can be written. Call this before the work starts.

    Args:
        reporting: files of the report and the page.
        used: paths that the verb reads or writes; the report must not replace them or a file inside them.

    Raises:
        NormdeployError: a report would replace a file, can't be written, or needs a missing library.
    """
    require_writable_report(reporting.report, reporting.html, used)


def require_writable_report(
    file: PathLike | None, html: Path | None = None, used: Iterable[Any] = (), kind: str = "report"
) -> None:
    """Check the same as `require_reports`, for single files. A file that is None is skipped.

    Args:
        kind: name of the file in errors.
    """
    taken = {os.path.realpath(path): path for path in used}
    for path in (file, html):
        if path is None:
            continue
        target = os.fspath(resolve_writable_path(path))
        replaced = taken.get(target) or (
            path if os.path.exists(target) and any(target.startswith(f"{t}{os.sep}") for t in taken) else None
        )
        if replaced is not None:
            raise NormdeployError(f"the {kind} {str(path)!r} would replace {str(replaced)!r}; choose another name")
        taken[target] = path
    if html is not None:
        require_page_libraries()


def require_all_run(missed: Iterable[object]) -> None:
    """Exit with code 3 if a file that the user named was not run. Call this after a verb found no error.

    Args:
        missed: reasons; they become the error's message.

    Raises:
        RuntimeUnavailable: ``missed`` is not empty.
    """
    if told := "; ".join(map(str, missed)):
        raise RuntimeUnavailable(told)


def print_line(text: Text | str = "") -> None:
    """Print one line on standard output, where the tables are printed too."""
    make_console().print(text)


def print_report(result: Renderable, account: Report, reporting: ReportingOptions) -> None:
    """Write the report's files, then print the result's tables unless quiet."""
    if reporting.report is not None or reporting.html is not None:
        text = replace(account, command=shlex.join(["normdeploy", *sys.argv[1:]])).to_json()
        if reporting.report is not None:
            # UTF-8 can't encode the surrogates of an undecodable file name, so they are written as escapes.
            write_bytes(reporting.report, text.encode(errors="backslashreplace"))
        if reporting.html is not None:
            from ..reports.report_page import render_page

            write_bytes(reporting.html, render_page(json.loads(text)).encode(errors="replace"))
    if not reporting.quiet:
        result.show(make_console())


def make_console() -> Console:
    """Return a console for standard output; 120 columns wide for a file or a pipe, so that tables fit."""
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(highlight=False, width=120)


@contextmanager
def silence_output(*, quiet: bool) -> Iterator[None]:
    """Drop all output of libraries while a quiet verb works, including output that bypasses Python's streams.

    With ``-v`` nothing is dropped, because the log is written to standard error too.
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
    """Redirect standard output and error to ``targets``. Flush first, so that buffered text goes to the old target."""
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor, target in zip(_PRINTED_TO, targets, strict=True):
        os.dup2(target, descriptor)


@contextmanager
def show_progress(quiet: bool) -> Iterator[Progress | None]:
    """Show a progress bar on standard error and remove it afterwards.

    No bar is shown if the verb is quiet or standard error is not a terminal. A quiet verb also drops the output of
    libraries.

    Yields:
        a callback (stage, done, total) that updates the bar, or None without a bar.
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
            """Set the bar's text and count. A ``total`` of 0 means that the total is unknown."""
            shown.update(task, description=escape_line(stage), completed=done, total=total or None)

        yield update_bar
