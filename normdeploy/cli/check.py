"""``normdeploy check``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

import normdeploy

from ..errors import printable_lines
from ..options import LoadingOptions, keywords, option
from ..reports.check import text as told
from ..storage.atomic import write_bytes
from ..verbs.check.options import FailOption, JudgingOptions
from .console import bars, check_report, require_run
from .options import QuietOption

Format = Literal["text", "json", "sarif"]


@dataclass(frozen=True, kw_only=True)
class FindingsOptions:
    """How findings are written."""

    form: Format = option("text", "--format", "Of the file, or of what is printed where none is given.")
    output: Path | None = option(None, "--output", "Write the findings to this file.", short="-o")


def check(
    sources: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="ONNX files, folders of them, or what export takes.")
    ],
    failing: FailOption,
    written: FindingsOptions,
    judging: JudgingOptions,
    load: LoadingOptions,
    shown: QuietOption,
) -> None:
    """Judge the normalizations of files for CI; exit code 1 where something of --fail-on is found or a file can't be
    read, 3 where nothing is and a runtime that a rule asks is not here."""
    from ..arguments import check_output
    from ..verbs.check.check import onnx_files
    from ..verbs.check.sarif import sarif

    output, form = written.output, written.form
    check_report(output)
    if output is not None:
        for source in (file for given in sources for file in onnx_files(os.fspath(given))):
            check_output(output, source)
    with bars(shown.quiet) as progress:
        result = normdeploy.check(sources, progress=progress, **keywords(failing), **keywords(judging), **load.loading)
    text = {"text": told, "json": lambda r: r.json(), "sarif": sarif}[form](result)
    text = text.encode(errors="replace").decode()  # a file's name may be no text
    if output is not None:
        write_bytes(output, text.encode())
    if form != "text" and output is None:
        typer.echo(text, nl=False)
    elif not shown.quiet:
        typer.echo(told(result), nl=False)
    for file in result.files:
        if file.error:
            typer.echo(f"error: {printable_lines(file.error)}", err=True)
    if not result:
        raise typer.Exit(1)
    require_run(filter(None, [result.unasked]))
