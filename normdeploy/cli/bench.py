"""``normdeploy bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from ..reports.report import Report
from ..verb_options import LoadingOptions, as_keywords
from ..verbs.bench.bench_options import BenchOptions
from .console import print_report, require_all_run, require_reports, show_progress
from .options import ReportingOptions


def bench(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE...",
            help="At most one model, ONNX files and engines, in any order. Each file is recognized by its content.",
        ),
    ] = None,
    *,
    options: BenchOptions,
    load: LoadingOptions,
    reporting: ReportingOptions,
) -> None:
    """Benchmark a model, in eager mode and with torch.compile, against ONNX files and engines.

    The contestants take turns.

    Exit code 1: an output is wrong. Exit code 3: no output is wrong, but an engine or a runtime that you named
    was not run.

    An ONNX file that export wrote records the options given to export, so you need not repeat them.
    Recorded options that run code are used only if you or your team signed them (docs/reference/teams.md).
    """
    given = () if options.feeds is None else (options.feeds,)
    require_reports(reporting, (*(sources or ()), *given))
    with show_progress(reporting.quiet) as progress:
        race = normdeploy.bench(sources or (), progress=progress, **as_keywords(options), **load.load_keywords)
    files = {f"source {i}" if i > 1 else "source": str(path) for i, path in enumerate(sources or (), 1)}
    if options.feeds is not None:
        files["inputs"] = str(options.feeds)
    print_report(race, Report("bench", files, sections={"race": vars(race)}), reporting)
    if not race:
        raise typer.Exit(1)
    require_all_run(race.unrun)
