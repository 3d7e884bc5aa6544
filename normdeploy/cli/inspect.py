"""``normdeploy inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from .console import bars, check_report, tell
from .options import (
    Dims,
    Eval,
    Factory,
    FactoryArgs,
    Fuse,
    FuseOption,
    HtmlFile,
    Imports,
    Inputs,
    Key,
    PartOption,
    Quiet,
    ReportFile,
    Runtime,
    RuntimeOption,
    TaskOption,
    Trust,
    loading_of,
)


def inspect(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="An ONNX file, or what export takes.")],
    model: Factory = None,
    model_arg: FactoryArgs = None,
    key: Key = None,
    trust: Trust = False,
    import_: Imports = None,
    input_: Inputs = None,
    dim: Dims = None,
    eval_mode: Eval = False,
    task: TaskOption = None,
    part: PartOption = None,
    runtime: RuntimeOption = Runtime.any,
    fuse: FuseOption = Fuse.standard,
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

    loading = loading_of(model, model_arg, key, trust, import_, input_, dim, eval_mode, task, part)
    check_report(report, html, [source])
    with bars(quiet) as progress:
        summary = normdeploy.inspect(source, runtime=runtime, fuse=fuse, explain=explain, progress=progress, **loading)
    tell(Report("inspect", {"source": str(source)}, summary, seconds=summary.seconds), report, quiet, html)
