"""``normdeploy verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import bars, check_report, tell
from .options import Dims, Eval, Factory, FactoryArgs, HtmlFile, Imports, Inputs, Key, ModelFile, OnnxFile, Quiet, ReportFile, Trust, loading_of


def verify(
    source: ModelFile,
    onnx: OnnxFile,
    engine: Annotated[
        list[Path] | None, typer.Option("--engine", help="An engine made of the ONNX file; run where a GPU is. Repeatable.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Random inputs at the usual sizes, besides those at other sizes.")] = 3,
    model: Factory = None,
    model_arg: FactoryArgs = None,
    key: Key = None,
    trust: Trust = False,
    import_: Imports = None,
    input_: Inputs = None,
    dim: Dims = None,
    eval_mode: Eval = False,
    report: ReportFile = None,
    html: HtmlFile = None,
    quiet: Quiet = False,
) -> None:
    """Compare onnxruntime, and engines on a GPU, with the PyTorch model; exit code 1 where one is worse than rounding.

    Options that were given to export need not be given again, unless the files come from somebody else.
    """
    from .. import deploy
    from ..report import Report

    loading = loading_of(model, model_arg, key, trust, import_, input_, dim, eval_mode)
    check_report(report, html, (source, onnx, *(engine or ())))
    with bars(quiet) as progress:
        parity = deploy.verify(source, onnx, engines=engine or (), seeds=seeds, progress=progress, **loading)
    files = {"model": str(source), "onnx": str(onnx)} | ({"engines": ", ".join(map(str, engine))} if engine else {})
    tell(Report("verify", files, parity=parity, seconds={"verify": parity.seconds}), report, quiet, html)
    if not parity:
        raise typer.Exit(1)
