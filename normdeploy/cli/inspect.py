"""``normdeploy inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from ..options import LoadingOptions
from .console import bars, require_reports, tell
from .options import (
    LOADING,
    REPORTING,
    FuseOption,
    Reporting,
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
    reporting: Reporting = REPORTING,
) -> None:
    """List the normalizations of an ONNX file or a model, what would become of each, and what runtimes make of it;
    changes nothing."""
    from ..reports.report import Report

    loading = load.loading
    require_reports(reporting, [source])
    with bars(reporting.quiet) as progress:
        summary = normdeploy.inspect(source, runtime=runtime, fuse=fuse, explain=explain, progress=progress, **loading)
    tell(Report("inspect", {"source": str(source)}, summary, seconds=summary.seconds), reporting)
