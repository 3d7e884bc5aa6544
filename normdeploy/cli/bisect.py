"""``normdeploy bisect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from .console import bars, check_report, tell
from .options import (
    LOADING,
    HtmlFile,
    LoadingOptions,
    ModelFile,
    OnnxFile,
    Quiet,
    ReportFile,
)


def bisect(
    source: ModelFile,
    onnx: OnnxFile,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Write the smallest failing model, its inputs and a script; a new folder.",
        ),
    ] = None,
    engine: Annotated[
        list[Path] | None, typer.Option("--engine", help="Compare an engine too, at its outputs only. Repeatable.")
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Random inputs at the usual sizes, besides those at other sizes.")
    ] = 3,
    given: Annotated[
        list[Path] | None,
        typer.Option(
            "--inputs",
            metavar="IN.npz",
            help="Arrays by name; only these are run instead of generated ones. Repeatable.",
        ),
    ] = None,
    map_: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="THEIRS=OURS",
            help="An input or output of the file is the model's of another name. Repeatable.",
        ),
    ] = None,
    load: LoadingOptions = LOADING,
    report: ReportFile = None,
    html: HtmlFile = None,
    quiet: Quiet = False,
) -> None:
    """Find the first tensor that leaves the bound of verify, the node that makes it so, and why; exit code 1 where
    there is one.

    Options that were given to export need not be given again; those that run code only where you or your team signed
    them (docs/teams.md).
    """
    from ..reports.report import Report

    loading = load.keywords()
    check_report(report, html, (source, onnx, *(engine or ()), *(given or ()), *([output] if output else ())))
    with bars(quiet) as progress:
        bisection = normdeploy.bisect(
            source,
            onnx,
            output=output,
            engines=engine or (),
            seeds=seeds,
            feeds=given or None,
            map=map_ or (),
            progress=progress,
            **loading,
        )
    files = {"model": str(source), "onnx": str(onnx)} | ({"engines": ", ".join(map(str, engine))} if engine else {})
    if bisection.reproduction is not None and output is not None:
        files["reproduction"] = str(output)
    account = Report(
        "bisect", files, parity=bisection.parity, bisection=bisection, seconds={"bisect": bisection.seconds}
    )
    tell(account, report, quiet, html)
    if not bisection:
        raise typer.Exit(1)
