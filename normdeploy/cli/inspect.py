"""``normdeploy inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from ..options import InspectOptions, LoadingOptions, keywords
from .console import bars, require_reports, tell
from .options import Reporting


def inspect(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="An ONNX file, or what export takes.")],
    load: LoadingOptions,
    options: InspectOptions,
    reporting: Reporting,
) -> None:
    """List the normalizations of an ONNX file or a model, what would become of each, and what runtimes make of it;
    changes nothing."""
    from ..reports.report import Report

    require_reports(reporting, [source])
    with bars(reporting.quiet) as progress:
        summary = normdeploy.inspect(source, progress=progress, **keywords(options), **load.loading)
    tell(Report("inspect", {"source": str(source)}, summary, seconds=summary.seconds), reporting)
