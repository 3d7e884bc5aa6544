"""``normdeploy build``."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import normdeploy

from .console import bars, check_report, tell
from .options import EngineRuntime, HtmlFile, NormImpl, OnnxFile, Output, Quiet, ReportFile


class Spread(TyperCommand):
    """Lets one option take several values, as in ``--compute-capability 8.6 8.9 12.0``, by repeating it."""

    option = "--compute-capability"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        for arg in args:
            if spread[-2:-1] == [self.option] and re.fullmatch(r"\d+(\.\d+)?", arg):
                spread.append(self.option)
            spread.append(arg)
        return super().parse_args(ctx, spread)


def build(
    source: OnnxFile,
    output: Output,
    runtime: Annotated[
        EngineRuntime,
        typer.Option(
            "--runtime",
            metavar="RUNTIME",
            help="The library that builds and will run the engine: tensorrt-rtx or tensorrt.",
        ),
    ] = EngineRuntime.tensorrt_rtx,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(
            Spread.option,
            metavar="X.Y ...",
            help="The GPUs to build for (TensorRT-RTX), such as 8.6 8.9 12.0; all where not given.",
        ),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            "--profile",
            metavar="NAME=MIN:OPT:MAX",
            help="Sizes of a dynamic dim (batch=1:8:64) or input (ids=1x8:4x64:64x512). Repeatable.",
        ),
    ] = None,
    norm_impl: Annotated[
        NormImpl,
        typer.Option(
            "--norm-impl",
            metavar="FORM",
            help="native; plugin: norms in our kernels, held by the engine (tensorrt only); auto: where that helps.",
        ),
    ] = NormImpl.native,
    report: ReportFile = None,
    html: HtmlFile = None,
    quiet: Quiet = False,
) -> None:
    """Build a TensorRT-RTX or TensorRT engine; TensorRT-RTX needs no GPU for it."""
    from ..reports.report import Report

    check_report(report, html, (source, output))
    with bars(quiet) as progress:
        engine = normdeploy.build(
            source,
            output,
            runtime=runtime,
            compute_capabilities=compute_capability or (),
            profiles=profile or (),
            norm_impl=norm_impl,
            progress=progress,
        )
    files = {"source": str(source), "output": str(output)}
    tell(Report("build", files, engine=engine, seconds={"build": engine.seconds}), report, quiet, html)
