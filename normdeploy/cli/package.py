"""``normdeploy package``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from ..options import LoadingOptions
from .console import _console, bars, require_run
from .options import (
    LOADING,
    OnnxFile,
    Quiet,
    SignOption,
)


def package(
    onnx: OnnxFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder of the bundle; it appears only when it is whole.")
    ],
    source: Annotated[
        Path | None,
        typer.Option("--source", metavar="MODEL", help="The PyTorch model, whose float64 answers are then expected."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="[CC=]FILE",
            help="An engine made of the ONNX file, and its compute capability. Repeatable.",
        ),
    ] = None,
    feeds: Annotated[
        list[Path] | None,
        typer.Option("--inputs", metavar="IN.npz", help="The samples; without it some are generated. Repeatable."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Of the models in the repository; the file's name without it.")
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option("--max-batch", min=0, help="For Triton; 0: no batching. Without it what the export recorded."),
    ] = None,
    instances: Annotated[int, typer.Option("--instances", min=1, help="Of each model; for engines on each GPU.")] = 1,
    provider: Annotated[str, typer.Option("--provider", help="Where Triton runs the ONNX file: cpu or cuda.")] = "cpu",
    report_from: Annotated[
        Path | None,
        typer.Option(
            "--report-from", metavar="FILE.json", help="What export --report wrote: it holds the certificates."
        ),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="An older bundle may be replaced.")] = False,
    sign: SignOption = None,
    load: LoadingOptions = LOADING,
    quiet: Quiet = False,
) -> None:
    """Write a Triton model repository with samples, expected outputs, report, certificates, versions and hashes beside
    it.

    Exit code 1 where a runtime is wrong on the samples, as the models are configured, 3 where none is and an engine was
    not run; the bundle is written then too.
    """
    from ..reports.package import show_package

    loading = load.loading
    with bars(quiet) as progress:
        made = normdeploy.package(
            onnx,
            output,
            source=source,
            engines=engine or (),
            feeds=feeds or (),
            name=name,
            max_batch=max_batch,
            instances=instances,
            provider=provider,
            report_from=report_from,
            replace=replace,
            sign=sign,
            progress=progress,
            **loading,
        )
    if not quiet:
        show_package(_console(), made)
    if not made:
        raise typer.Exit(1)
    require_run(made.judgement.unrun)
