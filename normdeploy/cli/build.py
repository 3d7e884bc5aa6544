"""``normdeploy build``."""

from __future__ import annotations

import re
from typing import Any

import typer

import normdeploy

from ..reports.report import Report
from ..verb_options import as_keywords
from ..verbs.build.build_options import BuildCall, EngineOptions, TrtexecOption
from .console import print_report, require_reports, show_progress
from .options import OnnxFile, Output, ReportingOptions
from .other_words import TranslatingCommand

# Option that takes several values, such as ``--compute-capability 8.6 8.9 12.0`` -> form of each value.
_REPEATED = {
    "--compute-capability": r"\d+(\.\d+)?",
    # Polygraphy separates the shapes of several inputs by spaces.
    "--trt-min-shapes": r".+:\[?\d[\dx,\s]*\]?",
    "--trt-opt-shapes": r".+:\[?\d[\dx,\s]*\]?",
    "--trt-max-shapes": r".+:\[?\d[\dx,\s]*\]?",
}


class RepeatedValuesCommand(TranslatingCommand):
    """Accept several values after one option by repeating the option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the option before each further value, then parse as typer does.

        Returns:
            arguments that are not parsed yet, as typer returns them.
        """
        spread: list[str] = []
        for arg in args:
            before = spread[-2] if len(spread) > 1 else ""
            if before in _REPEATED and re.fullmatch(_REPEATED[before], arg):
                spread.append(before)
            spread.append(arg)
        return super().parse_args(ctx, spread)


def build(
    source: OnnxFile, output: Output, options: EngineOptions, instead: TrtexecOption, reporting: ReportingOptions
) -> None:
    """Build a TensorRT-RTX or TensorRT engine. TensorRT-RTX needs no GPU to build."""
    if instead.print_trtexec:
        from ..verbs.build.trtexec_command import trtexec_lines

        typer.echo(str(trtexec_lines(BuildCall(source, output, **as_keywords(options)))))
        return
    require_reports(reporting, (source, output))
    with show_progress(reporting.quiet) as progress:
        engine = normdeploy.build(source, output, progress=progress, **as_keywords(options))
    files = {"source": str(source), "output": str(output)}
    account = Report("build", files, sections={"engine": engine.to_json()}, seconds={"build": engine.seconds})
    print_report(engine, account, reporting)
