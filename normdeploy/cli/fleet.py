"""``normdeploy fleet ...``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError, escape_line
from ..fleet.fleet_options import FleetOptions, FleetRunOptions, PublishOptions, RecheckOptions
from ..storage.file_replacement import write_bytes
from ..verb_options import as_keywords, option_field, repeat_option_field
from .console import make_console, print_line, require_all_run, require_writable_report, silence_output
from .options import QuietOption

if TYPE_CHECKING:
    from ..fleet.outcomes import FleetRun
    from ..types import PathLike, Progress

FleetFile = Annotated[
    Path, typer.Argument(metavar="FLEET.toml", help="File that lists the models, variants and targets.")
]


@dataclass(frozen=True, kw_only=True)
class TablesOptions:
    """Options for the files to which the results of a run's cells are written."""

    html: Path | None = option_field(None, "--html", "Also write the results as an HTML page.", metavar="FILE.html")
    markdown: Path | None = option_field(
        None, "--markdown", "Also write the results as Markdown tables for a pull request.", metavar="FILE.md"
    )
    report: Path | None = option_field(None, "--report", "Also write the results as JSON.", metavar="FILE.json")
    quiet: bool = repeat_option_field(QuietOption, "quiet")


@dataclass(frozen=True, kw_only=True)
class StoredOptions:
    """Options of `FleetOptions` for verbs that show one cell."""

    store: str | None = repeat_option_field(FleetOptions, "store")
    trust: list[Path] = repeat_option_field(FleetOptions, "trust")


def run(file: FleetFile, options: FleetRunOptions, tables: TablesOptions) -> None:
    """Run every step that has no result in the store.

    A cell is one model in one variant on one target.

    Exit code 1: a cell is wrong or failed.
    Exit code 3: no cell is wrong or failed, but a cell was not run.
    """
    from ..fleet import fleet_commands

    _require_writable_reports(tables, file)
    with _show_step_progress(tables.quiet) as progress:
        done = fleet_commands.run_fleet(file, progress=progress, **as_keywords(options))
    _report_run(done, tables, file, options.store)


def recheck(file: FleetFile, options: RecheckOptions, shown: QuietOption) -> None:
    """Run the bundles of the last run again, with the versions that are installed now.

    Exit code 1: a result got worse. Exit code 3: no result got worse, but a bundle was not run.
    """
    from ..fleet.fleet_recheck import recheck_fleet as rechecked
    from ..fleet.fleet_tables import group_names_by_reason, show_rechecks

    with _show_step_progress(shown.quiet) as progress:
        ends = rechecked(file, progress=progress, **as_keywords(options))
    if not shown.quiet:
        show_rechecks(make_console(), ends)
    if any(end.outcome in ("wrong", "failed") for end in ends):
        raise typer.Exit(1)
    unrun = {end.step.removesuffix("/recheck"): end.reason for end in ends if end.outcome == "not run"}
    require_all_run(group_names_by_reason(unrun))


def status(file: FleetFile, options: FleetOptions, tables: TablesOptions) -> None:
    """Show the stored state of each cell (model/variant/target) without running anything."""
    from ..fleet import fleet_commands

    _require_writable_reports(tables, file)
    _report_run(fleet_commands.fleet_status(file, **as_keywords(options)), tables, file, options.store)


def diff(
    file: FleetFile,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            metavar="LIBRARY=VERSION",
            help=(
                "Update to preview, such as onnxruntime=1.32.0 or driver=580.95. Without --against, the effect of"
                " changes already made on this machine is shown. Repeatable."
            ),
        ),
    ] = None,
    *,
    options: FleetOptions,
    tables: TablesOptions,
) -> None:
    """Show which cells (model/variant/target) an update would make stale, without running anything."""
    from ..fleet import fleet_commands

    _require_writable_reports(tables, file)
    versions = dict[str, str]()
    for text in against or ():
        name, equals, version = text.partition("=")
        if not (name and equals and version):
            raise InputError(f"--against is {text!r}; pass a library and a version, such as onnxruntime=1.32.0")
        versions[name] = version
    done = fleet_commands.preview_update(file, against=versions, **as_keywords(options))
    _report_run(done, tables, file, options.store)


def show(
    file: FleetFile,
    name: Annotated[
        str,
        typer.Argument(
            help="Name of a cell (model/variant/target) or of one of its steps, or the start of a step's key."
        ),
    ],
    options: StoredOptions,
    log: Annotated[bool, typer.Option("--log", help="Print each step's log.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Copy the steps' outputs into a new folder."),
    ] = None,
) -> None:
    """Show the steps of a cell (model/variant/target) in the last run: commands, dependencies, outputs and logs."""
    from ..fleet import step_details
    from ..fleet.fleet_tables import show_steps

    found = step_details.find_steps(file, name, **as_keywords(options))
    show_steps(make_console(), found, None if not log else step_details.read_log)
    if output is not None:
        step_details.copy_outputs(found, output)


def publish(
    file: FleetFile,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="PLACE",
            help="oci://HOST/REPOSITORY or mlflow://HOST/EXPERIMENT. For plain HTTP, write oci+http://.",
        ),
    ],
    options: PublishOptions,
    shown: QuietOption,
) -> None:
    """Publish the bundles of verified cells (model/variant/target).

    Exit code 1: a bundle was refused.
    """
    from ..fleet import publishing
    from ..fleet.fleet_tables import show_published

    with _show_step_progress(shown.quiet) as progress:
        done = publishing.publish_bundles(file, to, progress=progress, **as_keywords(options))
    if not shown.quiet:
        show_published(make_console(), done)
    if not done:
        raise typer.Exit(1)


def gc(
    store: Annotated[str, typer.Argument(metavar="STORE", help="Folder or URL of the store.")],
    older: Annotated[
        float,
        typer.Option(
            "--older", min=0, metavar="DAYS", help="Select objects that no run used for DAYS. Only --yes deletes them."
        ),
    ] = 30.0,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete the objects. Without --yes, they are only counted.")
    ] = False,
) -> None:
    """Count the objects of a store that no recent run uses; with --yes, delete them."""
    from ..fleet import garbage_collection

    found = garbage_collection.collect_garbage(store, days=older, remove=yes)
    if yes:
        done = "removed"
    else:
        done = "would be removed; run again with --yes to remove them"
    print_line(
        f"{found.runs} runs, {found.steps} steps and {found.objects} objects of {found.objects + found.kept},"
        f" {found.bytes / 1e6:.1f} MB: {done}"
    )


def _require_writable_reports(tables: TablesOptions, file: Path) -> None:
    require_writable_report(tables.report, tables.html, [file])
    require_writable_report(tables.markdown, None, [file, *(p for p in (tables.report, tables.html) if p is not None)])


def _report_run(done: FleetRun, tables: TablesOptions, file: Path, store: PathLike | None) -> None:
    from ..fleet import fleet_tables as reports

    place = None if store is None else str(store)
    if tables.report is not None:
        write_bytes(tables.report, reports.run_to_json(done).encode(errors="backslashreplace"))
    if tables.markdown is not None:
        write_bytes(tables.markdown, reports.run_to_markdown(done).encode())
    if tables.html is not None:
        from ..fleet.fleet_page import render_fleet_page
        from ..fleet.step_details import log_readers

        command = reports.copy_command(done, file=str(file), store=place)
        page = render_fleet_page(done, *log_readers(done.store, tables.html), command=command)
        write_bytes(tables.html, page.encode(errors="replace"))
    if not tables.quiet:
        html = None if tables.html is None else str(tables.html)
        reports.show_fleet_run(make_console(), done, file=str(file), store=place, page=html)
    if not done:
        raise typer.Exit(1)
    require_all_run(reports.group_names_by_reason({cell.name: cell.reason for cell in done.cells_not_run}))


@contextmanager
def _show_step_progress(quiet: bool) -> Iterator[Progress | None]:
    """Show how many steps are done and the estimated remaining time; show nothing if quiet or without a terminal."""
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
        with silence_output(quiet=quiet):
            yield None
        return
    columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}", markup=False), console=console, transient=True) as shown:
        task = shown.add_task("", total=None)

        def update_bar(step: str, done: int, total: int) -> None:
            """Set the bar's text and count. A ``total`` of 0 means that the total is unknown."""
            shown.update(task, description=escape_line(step), completed=done, total=total or None)

        yield update_bar
