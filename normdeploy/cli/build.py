"""``normdeploy build``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import normdeploy

from ..choices import EngineRuntime, NormImpl
from .console import bars, require_reports, tell
from .options import REPORTING, OnnxFile, Output, Reporting


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
    ] = "tensorrt-rtx",
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
    ] = "native",
    add_profile: Annotated[
        list[str] | None,
        typer.Option(
            "--add-profile",
            metavar="RANGE[,RANGE]",
            help="A further optimization profile, as --profile; several ranges joined by commas. Repeatable.",
        ),
    ] = None,
    timing_cache: Annotated[
        Path | None,
        typer.Option(
            "--timing-cache",
            metavar="FILE",
            help="What earlier builds have timed: read, added to, shared by builds side by side (tensorrt only).",
        ),
    ] = None,
    workspace: Annotated[
        str | None,
        typer.Option("--workspace", metavar="SIZE", help="The most memory that a layer may use: bytes, 512M, 2G."),
    ] = None,
    optimization_level: Annotated[
        int | None,
        typer.Option(
            "--optimization-level", metavar="N", help="How long the builder looks for faster kernels, 0 to 5."
        ),
    ] = None,
    hardware_compatibility: Annotated[
        str | None,
        typer.Option(
            "--hardware-compat",
            metavar="LEVEL",
            help="Other GPUs that the engine is to run on: ampere-plus or same-compute-capability (tensorrt only).",
        ),
    ] = None,
    version_compatible: Annotated[
        bool,
        typer.Option("--version-compatible", help="Let newer versions of the library load the engine (tensorrt only)."),
    ] = False,
    refit: Annotated[
        bool, typer.Option("--refit", help="Let the engine's weights be replaced; needs a GPU to build.")
    ] = False,
    weight_streaming: Annotated[
        bool, typer.Option("--weight-streaming", help="Let weights stay in host memory while the engine runs.")
    ] = False,
    ep_context: Annotated[
        str | None,
        typer.Option(
            "--ep-context",
            metavar="MODE",
            help=(
                "Write an ONNX file for onnxruntime's TensorRT-RTX provider: embed holds the engine, file has it"
                " beside."
            ),
        ),
    ] = None,
    reporting: Reporting = REPORTING,
) -> None:
    """Build a TensorRT-RTX or TensorRT engine; TensorRT-RTX needs no GPU for it."""
    from ..reports.report import Report

    require_reports(reporting, (source, output))
    with bars(reporting.quiet) as progress:
        engine = normdeploy.build(
            source,
            output,
            runtime=runtime,
            compute_capabilities=compute_capability or (),
            profiles=profile or (),
            norm_impl=norm_impl,
            more_profiles=add_profile or (),
            timing_cache=timing_cache,
            workspace=workspace,
            optimization_level=optimization_level,
            hardware_compatibility=hardware_compatibility,
            version_compatible=version_compatible,
            refit=refit,
            weight_streaming=weight_streaming,
            ep_context=ep_context,
            progress=progress,
        )
    files = {"source": str(source), "output": str(output)}
    tell(Report("build", files, engine=engine, seconds={"build": engine.seconds}), reporting)
