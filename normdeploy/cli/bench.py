"""``normdeploy bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from ..options import LoadingOptions, keywords
from ..verbs.bench.options import BenchOptions
from .console import bars, require_reports, require_run, tell
from .options import Reporting


def bench(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="A model, ONNX files and engines, told apart by their content."),
    ] = None,
    *,
    options: BenchOptions,
    load: LoadingOptions,
    reporting: Reporting,
) -> None:
    """Race a model in eager and torch.compile, ONNX files and engines, in turns; exit code 1 where one gives a wrong
    answer, 3 where none does and a file was not run.

    Options that were given to export need not be given again; those that run code only where you or your team signed
    them (docs/teams.md).
    """
    from ..reports.report import Report

    given = () if options.feeds is None else (options.feeds,)
    require_reports(reporting, (*(sources or ()), *given))
    with bars(reporting.quiet) as progress:
        race = normdeploy.bench(sources or (), progress=progress, **keywords(options), **load.loading)
    files = {f"source {i}" if i > 1 else "source": str(path) for i, path in enumerate(sources or (), 1)}
    if options.feeds is not None:
        files["inputs"] = str(options.feeds)
    tell(Report("bench", files, race=race), reporting)
    if not race:
        raise typer.Exit(1)
    require_run(race.unrun)
