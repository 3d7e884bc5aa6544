"""``normdeploy check``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

import normdeploy

from ..errors import printable_lines
from ..options import LoadingOptions
from ..reports.check import text as told
from ..storage.atomic import write_bytes
from .console import bars, check_report, require_run
from .options import (
    LOADING,
    FuseOption,
    Quiet,
    RuntimeOption,
)
from .options import precision as half

Format = Literal["text", "json", "sarif"]


def check(
    sources: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="ONNX files, folders of them, or what export takes.")
    ],
    fail_on: Annotated[
        str,
        typer.Option(
            "--fail-on",
            metavar="RULES",
            show_default=False,  # it would be cut at 80 columns
            help=(
                "Which findings fail the check, by comma: decomposed, unfolded, train-mode, eps-lost, fp16-overflow,"
                " wrong-form, missing-kernel, refused, asymmetric, int32, per-tensor, blocked-fusion, fp8,"
                " weight-zero-point, unpaired, misbound, unparsed, or a package's; or all, or none. Without it"
                " decomposed, train-mode and eps-lost."
            ),
        ),
    ] = "decomposed,train-mode,eps-lost",
    form: Annotated[
        Format, typer.Option("--format", help="Of the file, or of what is printed where none is given.")
    ] = "text",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the findings to this file.")] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline", metavar="OLD", help="JSON or SARIF of an earlier check; what it holds does not fail again."
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            parser=half,
            metavar="fp16|bf16",
            help=(
                "Judge epsilons as though the file computed in half precision (float16 and bfloat16 are understood"
                " too)."
            ),
        ),
    ] = None,
    runtime: RuntimeOption = "any",
    compute_capability: Annotated[
        str | None,
        typer.Option(
            "--compute-capability", metavar="8.6", help="Of the oldest GPU that the files are for: has it FP8?"
        ),
    ] = None,
    fuse: FuseOption = "standard",
    load: LoadingOptions = LOADING,
    quiet: Quiet = False,
) -> None:
    """Judge the normalizations of files for CI; exit code 1 where something of --fail-on is found or a file can't be
    read, 3 where nothing is and a runtime that a rule asks is not here."""
    from ..arguments import check_output
    from ..verbs.check.check import onnx_files
    from ..verbs.check.sarif import sarif

    loading = load.loading
    check_report(output)
    if output is not None:
        for source in (file for given in sources for file in onnx_files(os.fspath(given))):
            check_output(output, source)
    with bars(quiet) as progress:
        rules = [name.strip() for name in fail_on.split(",") if name.strip() != "none"]
        result = normdeploy.check(
            sources,
            fail_on=rules,
            runtime=runtime,
            fuse=fuse,
            precision=precision or None,
            compute_capability=compute_capability,
            baseline=baseline,
            progress=progress,
            **loading,
        )
    text = {"text": told, "json": lambda r: r.json(), "sarif": sarif}[form](result)
    text = text.encode(errors="replace").decode()  # a file's name may be no text
    if output is not None:
        write_bytes(output, text.encode())
    if form != "text" and output is None:
        typer.echo(text, nl=False)
    elif not quiet:
        typer.echo(told(result), nl=False)
    for file in result.files:
        if file.error:
            typer.echo(f"error: {printable_lines(file.error)}", err=True)
    if not result:
        raise typer.Exit(1)
    require_run(filter(None, [result.unasked]))
