"""``normdeploy run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from ..reports.report import Report
from ..verb_options import as_keywords
from ..verbs.run.run_options import RunOptions
from .console import print_report, require_reports, silence_output
from .options import Output, QuietOption, ReportingOptions, ReportOption


def run(
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="An ONNX file or an engine, told apart by their content.")
    ],
    output: Output,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="IN.npz", help="Arrays by name; without it some are generated.")
    ] = None,
    *,
    options: RunOptions,
    written: ReportOption,
    shown: QuietOption,
) -> None:
    """Run an ONNX file or an engine once. Outputs and generated inputs are written to .npz files."""
    reporting = ReportingOptions(report=written.report, quiet=shown.quiet)
    require_reports(reporting, [source, output, *([inputs] if inputs else ())])
    with silence_output(quiet=shown.quiet):
        done = normdeploy.run(source, inputs, output, **as_keywords(options))
    files = {"source": str(source), "output": str(output)}
    account = Report("run", files, sections={"inference": done.to_json()}, notes=done.notes, seconds=done.seconds)
    print_report(done, account, reporting)
