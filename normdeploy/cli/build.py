"""``normdeploy build``."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

import normdeploy

from ..reports.report import Report
from ..verb_options import as_keywords
from ..verbs.build.build_options import EngineOptions
from .console import print_report, require_reports, show_progress
from .options import OnnxFile, Output, ReportingOptions


class RepeatedValuesCommand(TyperCommand):
    """Accept several values after one option, as in ``--compute-capability 8.6 8.9 12.0``, by repeating the option."""

    option = "--compute-capability"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the option before each further value, then parse as typer does.

        Returns:
            arguments that are not parsed yet, as typer returns them.
        """
        spread: list[str] = []
        for arg in args:
            if spread[-2:-1] == [self.option] and re.fullmatch(r"\d+(\.\d+)?", arg):
                spread.append(self.option)
            spread.append(arg)
        return super().parse_args(ctx, spread)


def build(source: OnnxFile, output: Output, options: EngineOptions, reporting: ReportingOptions) -> None:
    """Build a TensorRT-RTX or TensorRT engine. TensorRT-RTX needs no GPU to build."""
    require_reports(reporting, (source, output))
    with show_progress(reporting.quiet) as progress:
        engine = normdeploy.build(source, output, progress=progress, **as_keywords(options))
    files = {"source": str(source), "output": str(output)}
    account = Report("build", files, sections={"engine": engine.to_json()}, seconds={"build": engine.seconds})
    print_report(engine, account, reporting)
