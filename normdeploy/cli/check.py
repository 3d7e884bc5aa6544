"""``normdeploy check``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

import normdeploy

from ..errors import NormdeployError, RuntimeUnavailable, escape_lines
from ..storage.file_replacement import write_bytes
from ..verb_options import LoadingOptions, as_keywords, option_field
from ..verbs.check.check_options import FailOption, JudgingOptions
from ..verbs.check.check_text import render_check as told
from .console import require_all_run, require_writable_report, show_progress
from .options import QuietOption

Format = Literal["text", "json", "sarif"]


@dataclass(frozen=True, kw_only=True)
class FindingsOptions:
    """Options for the format and the file of the findings."""

    form: Format = option_field(
        "text",
        "--format",
        "With --output: format of the written file. Without --output: format of the printed findings.",
    )
    output: Path | None = option_field(None, "--output", "Write the findings to this file.", short="-o")


def check(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="ONNX files, folders of ONNX files, or any model that export accepts."),
    ],
    failing: FailOption,
    written: FindingsOptions,
    judging: JudgingOptions,
    load: LoadingOptions,
    shown: QuietOption,
) -> None:
    """Check the normalizations of files for CI.

    Exit code 1: a rule of --fail-on has a finding.
    Exit code 2: no rule has a finding, but a file, an option or the baseline could not be read.
    Exit code 3: no rule has a finding, but a runtime that a rule needs is not installed.
    """
    try:
        _check(sources, failing, written, judging, load, shown)
    except RuntimeUnavailable:
        raise
    except NormdeployError as error:
        from ..verbs.check.check_function import NOT_JUDGED

        typer.echo(f"error: {escape_lines(str(error))}", err=True)
        raise typer.Exit(NOT_JUDGED) from error


def _check(
    sources: list[Path],
    failing: FailOption,
    written: FindingsOptions,
    judging: JudgingOptions,
    load: LoadingOptions,
    shown: QuietOption,
) -> None:
    """Check the files, then write and print the findings.

    Raises:
        Exit: a rule has a finding, or a file could not be judged.
        NormdeployError: nothing could be judged.
    """
    from ..verbs.arguments.argument_validation import require_writable_output
    from ..verbs.check.check_function import find_onnx_files
    from ..verbs.check.sarif import to_sarif

    output = written.output
    form = written.form
    require_writable_report(output)
    if output is not None:
        for source in (file for given in sources for file in find_onnx_files(os.fspath(given))):
            require_writable_output(output, source)
    with show_progress(shown.quiet) as progress:
        result = normdeploy.check(
            sources, progress=progress, **as_keywords(failing), **as_keywords(judging), **load.load_keywords
        )
    text = {"text": told, "json": lambda r: r.json(), "sarif": to_sarif}[form](result)
    # A file name may contain surrogates, which UTF-8 can't encode. They are replaced.
    text = text.encode(errors="replace").decode()
    if output is not None:
        write_bytes(output, text.encode())
    if form != "text" and output is None:
        typer.echo(text, nl=False)
    elif not shown.quiet:
        typer.echo(told(result), nl=False)
    for file in result.files:
        if file.error:
            typer.echo(f"error: {escape_lines(file.error)}", err=True)
    if result.exit_code:
        raise typer.Exit(result.exit_code)
    require_all_run(filter(None, [result.unasked]))
