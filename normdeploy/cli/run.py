"""``normdeploy run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from ..reports.report import Report
from ..verb_options import as_keywords
from ..verbs.run.run_options import RunOptions, TokenOptions
from .console import print_report, require_reports, silence_output
from .options import QuietOption, ReportingOptions, ReportOption


def run(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="ONNX file or engine, recognized by its content. Or a folder with a single ONNX file.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT.npz",
            help="Write the outputs to OUT.npz, and generated inputs to OUT.inputs.npz. Default: only print a summary.",
        ),
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--inputs", metavar="IN.npz", help="File of input arrays by name. Inputs are generated if omitted."
        ),
    ] = None,
    *,
    options: RunOptions,
    tokens: TokenOptions,
    written: ReportOption,
    shown: QuietOption,
) -> None:
    """Run an ONNX file or an engine once, and summarize its outputs. With --generate, run a decoder token by token."""
    reporting = ReportingOptions(report=written.report, quiet=shown.quiet)
    used = (source, output, inputs, tokens.tokenizer)
    require_reports(reporting, [path for path in used if path is not None])
    with silence_output(quiet=shown.quiet):
        done = normdeploy.run(source, inputs, output, **as_keywords(options), **as_keywords(tokens))
    files = {"source": str(source)}
    if output is not None:
        files["output"] = str(output)
    account = Report("run", files, sections={"inference": done.to_json()}, notes=done.notes, seconds=done.seconds)
    print_report(done, account, reporting)
