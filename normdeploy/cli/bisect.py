"""``normdeploy bisect``."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import typer

import normdeploy

from ..reports.report import Report
from ..verb_options import LoadingOptions, as_keywords
from ..verbs.bisect.bisect_options import BisectOptions
from .console import print_report, require_all_run, require_reports, show_progress
from .options import OnnxFile, Original, ReportingOptions


def bisect(
    source: Original, onnx: OnnxFile, options: BisectOptions, load: LoadingOptions, reporting: ReportingOptions
) -> None:
    """Find the first tensor whose error exceeds verify's bound, the node at fault, and the cause.

    Exit code 1: an output fails.
    Exit code 3: no output fails, but an engine was not run.

    An ONNX file that export wrote records the options given to export, so you need not repeat them.
    Recorded options that run code are used only if you or your team signed them (docs/reference/teams.md).
    """
    output = options.output
    used = [path for path in (options.policy, options.dataset, output) if path is not None]
    given = cast("list[Path]", options.feeds or [])
    require_reports(reporting, (source, onnx, *options.engines, *given, *used))
    with show_progress(reporting.quiet) as progress:
        bisection = normdeploy.bisect(source, onnx, progress=progress, **as_keywords(options), **load.load_keywords)
    files = {"model": str(source), "onnx": str(onnx)}
    if options.engines:
        files["engines"] = ", ".join(map(str, options.engines))
    if bisection.reproduction is not None and output is not None:
        files["reproduction"] = str(output)
    told = {"parity": bisection.parity.to_json(), "bisection": bisection.to_json()}
    account = Report("bisect", files, sections=told, seconds={"bisect": bisection.seconds})
    print_report(bisection, account, reporting)
    if bisection.parity.outcome == "failed":
        raise typer.Exit(1)
    require_all_run(bisection.parity.unrun)
