"""``normdeploy inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from ..reports.report import Report
from ..verb_options import LoadingOptions, as_keywords
from ..verbs.inspect.inspect_options import InspectOptions
from .console import print_report, require_reports, show_progress
from .options import ReportingOptions


def inspect(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="ONNX file, or any model that export accepts.")],
    load: LoadingOptions,
    options: InspectOptions,
    reporting: ReportingOptions,
) -> None:
    """List the normalizations of a file or model, how each would be rewritten, and how each runtime would run it.

    The file or model is not changed.
    """
    require_reports(reporting, [source])
    with show_progress(reporting.quiet) as progress:
        summary = normdeploy.inspect(source, progress=progress, **as_keywords(options), **load.load_keywords)
    print_report(summary, Report("inspect", {"source": str(source)}, summary, seconds=summary.seconds), reporting)
