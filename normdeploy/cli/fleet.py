"""``normdeploy fleet ...``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError, printable
from ..fleet.options import FleetOptions, FleetRunOptions, PublishOptions, RecheckOptions
from ..options import keywords, option, same_option
from ..storage.atomic import write_bytes
from .console import _console, check_report, require_run, say, silenced
from .options import QuietOption

if TYPE_CHECKING:
    from ..fleet.ends import FleetRun
    from ..types import Progress

FleetFile = Annotated[Path, typer.Argument(metavar="FLEET.toml", help="The models, variants and targets.")]


@dataclass(frozen=True, kw_only=True)
class TablesOptions:
    """Where the cells of a run are written."""

    html: Path | None = option(None, "--html", "Write the page.", metavar="FILE.html")
    markdown: Path | None = option(None, "--markdown", "Write the tables for a pull request.", metavar="FILE.md")
    report: Path | None = option(None, "--report", "Write the cells as JSON.", metavar="FILE.json")
    quiet: bool = same_option(QuietOption, "quiet")


@dataclass(frozen=True, kw_only=True)
class StoredOptions:
    """As `FleetOptions`, of one cell."""

    store: str | None = same_option(FleetOptions, "store")
    trust: list[Path] = same_option(FleetOptions, "trust")


def run(file: FleetFile, options: FleetRunOptions, tables: TablesOptions) -> None:
    """Run what is not in the store; exit code 1 where a cell is wrong or failed, 3 where one was not run."""
    from ..fleet import fleet

    _check(tables, file)
    with _bars(tables.quiet) as progress:
        done = fleet.run(file, progress=progress, **keywords(options))
    _tell(done, tables)


def recheck(file: FleetFile, options: RecheckOptions, shown: QuietOption) -> None:
    """Run the last run's bundles again with what is installed now; exit code 1 where something got worse, 3
    where a bundle was not run."""
    from ..fleet.rechecks import recheck as rechecked
    from ..reports.fleet import by_reason, show_rechecks

    with _bars(shown.quiet) as progress:
        ends = rechecked(file, progress=progress, **keywords(options))
    if not shown.quiet:
        show_rechecks(_console(), ends)
    if any(end.outcome in ("wrong", "failed") for end in ends):
        raise typer.Exit(1)
    unrun = {end.step.removesuffix("/recheck"): end.reason for end in ends if end.outcome == "not run"}
    require_run(by_reason(unrun))


def status(file: FleetFile, options: FleetOptions, tables: TablesOptions) -> None:
    """Show what is in the store; nothing is run."""
    from ..fleet import fleet

    _check(tables, file)
    _tell(fleet.status(file, **keywords(options)), tables)


def diff(
    file: FleetFile,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            metavar="LIBRARY=VERSION",
            help="An update, such as onnxruntime=1.32.0 or driver=580.95; without it what changed here. Repeatable.",
        ),
    ] = None,
    *,
    options: FleetOptions,
    tables: TablesOptions,
) -> None:
    """Show what an update would make stale; nothing is run."""
    from ..fleet import fleet

    _check(tables, file)
    versions = dict[str, str]()
    for text in against or ():
        name, equals, version = text.partition("=")
        if not (name and equals and version):
            raise InputError(f"--against is {text!r}; give a library and a version, such as onnxruntime=1.32.0")
        versions[name] = version
    _tell(fleet.diff(file, against=versions, **keywords(options)), tables)


def show(
    file: FleetFile,
    name: Annotated[str, typer.Argument(help="A cell (model/variant/target), a step of it, or the start of a key.")],
    options: StoredOptions,
    log: Annotated[bool, typer.Option("--log", help="Print what the step printed.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Copy what the steps made into a new folder."),
    ] = None,
) -> None:
    """Show the steps of a cell in the last run: commands, what they depended on and made, logs."""
    from ..fleet import shown
    from ..reports.fleet import show_steps

    found = shown.steps(file, name, **keywords(options))
    show_steps(_console(), found, None if not log else shown.log_of)
    if output is not None:
        shown.copied(found, output)


def publish(
    file: FleetFile,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="PLACE", help="oci://HOST/REPOSITORY, mlflow://HOST/EXPERIMENT; oci+http://: by http."
        ),
    ],
    options: PublishOptions,
    shown: QuietOption,
) -> None:
    """Publish the bundles of verified cells; exit code 1 where one is refused."""
    from ..fleet import publish as publishing
    from ..reports.fleet import show_published

    with _bars(shown.quiet) as progress:
        done = publishing.publish(file, to, progress=progress, **keywords(options))
    if not shown.quiet:
        show_published(_console(), done)
    if not done:
        raise typer.Exit(1)


def gc(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A folder or URL.")],
    older: Annotated[
        float, typer.Option("--older", min=0, metavar="DAYS", help="What no run of these days has used may go.")
    ] = 30.0,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it; without it only say what would go.")] = False,
) -> None:
    """Say what may go from a store, or remove it."""
    from ..fleet import collect

    found = collect.collect(store, days=older, remove=yes)
    done = "removed" if yes else "would be removed; --yes does it"
    say(
        f"{found.runs} runs, {found.steps} steps and {found.objects} objects of {found.objects + found.kept},"
        f" {found.bytes / 1e6:.1f} MB: {done}"
    )


def _check(tables: TablesOptions, file: Path) -> None:
    check_report(tables.report, tables.html, [file])
    check_report(tables.markdown, None, [file, *(p for p in (tables.report, tables.html) if p is not None)])


def _tell(done: FleetRun, tables: TablesOptions) -> None:
    from ..reports import fleet as reports

    if tables.report is not None:
        write_bytes(tables.report, reports.as_json(done).encode(errors="backslashreplace"))
    if tables.markdown is not None:
        write_bytes(tables.markdown, reports.markdown(done).encode())
    if tables.html is not None:
        from ..fleet.shown import logs
        from ..reports.fleet_page import page

        write_bytes(tables.html, page(done, *logs(done.store, tables.html)).encode(errors="replace"))
    if not tables.quiet:
        reports.show(_console(), done)
    if not done:
        raise typer.Exit(1)
    require_run(reports.by_reason({cell.name: cell.reason for cell in done.unrun}))


@contextmanager
def _bars(quiet: bool) -> Iterator[Progress | None]:
    """Steps done of all, with an estimate of the rest; none where nobody would see it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        with silenced(quiet=quiet):
            yield None
        return
    columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}", markup=False), console=console, transient=True) as shown:
        task = shown.add_task("", total=None)

        def tell(step: str, done: int, total: int) -> None:
            shown.update(task, description=printable(step), completed=done, total=total or None)

        yield tell
