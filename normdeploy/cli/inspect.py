"""``normdeploy inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from .console import bars, check_report, tell
from .options import (
    LOADING,
    FuseOption,
    HtmlFile,
    LoadingOptions,
    Quiet,
    ReportFile,
    RuntimeOption,
)


def inspect(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="An ONNX file, or what export takes.")],
    load: LoadingOptions = LOADING,
    runtime: RuntimeOption = "any",
    fuse: FuseOption = "standard",
    explain: Annotated[
        str | None,
        typer.Option("--explain", metavar="NAME", help="Say why this tensor, node or module path was fused or not."),
    ] = None,
    report: ReportFile = None,
    html: HtmlFile = None,
    quiet: Quiet = False,
) -> None:
    """List the normalizations of an ONNX file or a model, what would become of each, and what runtimes make of it;
    changes nothing."""
    from ..reports.report import Report

    loading = load.keywords()
    check_report(report, html, [source])
    with bars(quiet) as progress:
        summary = normdeploy.inspect(source, runtime=runtime, fuse=fuse, explain=explain, progress=progress, **loading)
    tell(Report("inspect", {"source": str(source)}, summary, seconds=summary.seconds), report, quiet, html)
