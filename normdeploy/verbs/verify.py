"""``normdeploy verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import bars, check_report, tell
from .options import Dims, Eval, Factory, FactoryArgs, HtmlFile, Imports, Inputs, Key, ModelFile, Quiet, ReportFile, Trust, loading_of


def verify(
    source: ModelFile,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="ONNX files and engines, told apart by their content.")],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Random inputs at the usual sizes, besides those at other sizes.")] = 3,
    given: Annotated[
        list[Path] | None,
        typer.Option("--inputs", metavar="IN.npz", help="Arrays by name; only these are run instead of generated ones. Repeatable."),
    ] = None,
    drift: Annotated[
        bool, typer.Option("--drift", help="Also compare inner tensors of ONNX files with the model's: where does the error grow?")
    ] = False,
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
    """Compare what onnxruntime, and engines on a GPU, make of files with the PyTorch model; exit code 1 where one is worse than rounding.

    Options that were given to export need not be given again, unless the files come from somebody else.
    """
    from .. import deploy
    from ..reports.report import Report

    loading = loading_of(model, model_arg, key, trust, import_, input_, dim, eval_mode)
    check_report(report, html, (source, *files, *(given or ())))
    with bars(quiet) as progress:
        parity = deploy.verify(source, files, seeds=seeds, feeds=given or None, drift=drift, progress=progress, **loading)
    tell(Report("verify", _roles(source, files), parity=parity, seconds={"verify": parity.seconds}), report, quiet, html)
    if not parity:
        raise typer.Exit(1)


def _roles(source: Path, files: list[Path]) -> dict[str, str]:
    """Each file under its kind, from the second of a kind on with its number: "onnx", "onnx 2", "engine"."""
    from ..runtimes.trt import is_engine

    roles = {"model": str(source)}
    kinds = ["engine" if is_engine(file) else "onnx" for file in files]
    for place, (kind, file) in enumerate(zip(kinds, files, strict=True)):
        number = kinds[:place].count(kind) + 1
        roles[kind if number == 1 else f"{kind} {number}"] = str(file)
    return roles
