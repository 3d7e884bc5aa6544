"""``normdeploy fleet ...``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError, printable
from ..storage.atomic import write_bytes
from .console import _console, check_report, require_run, say, silenced
from .options import Quiet, SignOption, TrustedKeys

if TYPE_CHECKING:
    from ..fleet.ends import FleetRun
    from ..types import Progress

FleetFile = Annotated[Path, typer.Argument(metavar="FLEET.toml", help="The models, variants and targets.")]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="PLACE",
        help="A folder or URL (s3://bucket/folder); without it the file's, NORMDEPLOY_STORE, or the folder store.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="PATTERN", help="Models, or model/variant, that are looked at. Repeatable."),
]
On = Annotated[str, typer.Option("--on", metavar="WHERE", help="local, or a Ray cluster: auto, ray://head:10001.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Steps at a time on this machine; without it one for each CPU.")
]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE.html", help="Write the page.")]
Markdown = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE.md", help="Write the tables for a pull request.")
]
Json = Annotated[Path | None, typer.Option("--report", metavar="FILE.json", help="Write the cells as JSON.")]


def run(
    file: FleetFile,
    store: StoreOption = None,
    on: On = "local",
    jobs: Jobs = None,
    only: Only = None,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", min=0, metavar="SECONDS", help="With --on: how long a step waits for a node that can run it."
        ),
    ] = 0.0,
    sign: SignOption = None,
    trust: TrustedKeys = None,
    html: Html = None,
    markdown: Markdown = None,
    report: Json = None,
    quiet: Quiet = False,
) -> None:
    """Run what is not in the store; exit code 1 where a cell is wrong or failed, 3 where one was not run."""
    from ..fleet import fleet

    _check(html, markdown, report, file)
    with _bars(quiet) as progress:
        done = fleet.run(
            file,
            store=store,
            on=on,
            jobs=jobs,
            only=only or (),
            wait=wait,
            sign=sign,
            trust=trust or (),
            progress=progress,
        )
    _tell(done, html, markdown, report, quiet)


def recheck(
    file: FleetFile,
    store: StoreOption = None,
    on: On = "local",
    jobs: Jobs = None,
    only: Only = None,
    sign: SignOption = None,
    trust: TrustedKeys = None,
    quiet: Quiet = False,
) -> None:
    """Run the last run's bundles again with what is installed now; exit code 1 where something got worse, 3
    where a bundle was not run."""
    from ..fleet.rechecks import recheck as rechecked
    from ..reports.fleet import by_reason, show_rechecks

    with _bars(quiet) as progress:
        ends = rechecked(
            file, store=store, on=on, jobs=jobs, only=only or (), sign=sign, trust=trust or (), progress=progress
        )
    if not quiet:
        show_rechecks(_console(), ends)
    if any(end.outcome in ("wrong", "failed") for end in ends):
        raise typer.Exit(1)
    unrun = {end.step.removesuffix("/recheck"): end.reason for end in ends if end.outcome == "not run"}
    require_run(by_reason(unrun))


def status(
    file: FleetFile,
    store: StoreOption = None,
    only: Only = None,
    trust: TrustedKeys = None,
    html: Html = None,
    markdown: Markdown = None,
    report: Json = None,
    quiet: Quiet = False,
) -> None:
    """Show what is in the store; nothing is run."""
    from ..fleet import fleet

    _check(html, markdown, report, file)
    _tell(fleet.status(file, store=store, only=only or (), trust=trust or ()), html, markdown, report, quiet)


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
    store: StoreOption = None,
    only: Only = None,
    trust: TrustedKeys = None,
    html: Html = None,
    markdown: Markdown = None,
    report: Json = None,
    quiet: Quiet = False,
) -> None:
    """Show what an update would make stale; nothing is run."""
    from ..fleet import fleet

    _check(html, markdown, report, file)
    versions = dict[str, str]()
    for text in against or ():
        name, equals, version = text.partition("=")
        if not (name and equals and version):
            raise InputError(f"--against is {text!r}; give a library and a version, such as onnxruntime=1.32.0")
        versions[name] = version
    _tell(
        fleet.diff(file, against=versions, store=store, only=only or (), trust=trust or ()),
        html,
        markdown,
        report,
        quiet,
    )


def show(
    file: FleetFile,
    name: Annotated[str, typer.Argument(help="A cell (model/variant/target), a step of it, or the start of a key.")],
    store: StoreOption = None,
    trust: TrustedKeys = None,
    log: Annotated[bool, typer.Option("--log", help="Print what the step printed.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Copy what the steps made into a new folder."),
    ] = None,
) -> None:
    """Show the steps of a cell in the last run: commands, what they depended on and made, logs."""
    from ..fleet import shown
    from ..reports.fleet import show_steps

    found = shown.steps(file, name, store=store, trust=trust or ())
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
    store: StoreOption = None,
    only: Only = None,
    built: Annotated[
        bool, typer.Option("--built", help="Publish engines too that were built and not run on their GPU.")
    ] = False,
    trust: TrustedKeys = None,
    quiet: Quiet = False,
) -> None:
    """Publish the bundles of verified cells; exit code 1 where one is refused."""
    from ..fleet import publish as publishing
    from ..reports.fleet import show_published

    with _bars(quiet) as progress:
        done = publishing.publish(
            file, to, store=store, only=only or (), built=built, trust=trust or (), progress=progress
        )
    if not quiet:
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


def _check(html: Path | None, markdown: Path | None, report: Path | None, file: Path) -> None:
    check_report(report, html, [file])
    check_report(markdown, None, [file, *(p for p in (report, html) if p is not None)])


def _tell(done: FleetRun, html: Path | None, markdown: Path | None, report: Path | None, quiet: bool) -> None:
    from ..reports import fleet as tables

    if report is not None:
        write_bytes(report, tables.as_json(done).encode(errors="backslashreplace"))
    if markdown is not None:
        write_bytes(markdown, tables.markdown(done).encode())
    if html is not None:
        from ..fleet.shown import logs
        from ..reports.fleet_page import page

        write_bytes(html, page(done, *logs(done.store, html)).encode(errors="replace"))
    if not quiet:
        tables.show(_console(), done)
    if not done:
        raise typer.Exit(1)
    require_run(tables.by_reason({cell.name: cell.reason for cell in done.unrun}))


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
