"""``normdeploy recheck``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from ..reports.report import to_plain
from ..storage.file_replacement import write_bytes
from .console import make_console, require_all_run, require_writable_report, show_progress
from .options import QuietOption, ReportOption, TrustedKeys


def recheck(
    bundle: Annotated[Path, typer.Argument(metavar="DIR", help="Bundle that `normdeploy package` wrote.")],
    onnx: Annotated[
        Path | None,
        typer.Option(
            "--onnx",
            metavar="FILE",
            help="Newer ONNX file of the same model. It runs instead of the bundle's ONNX file.",
        ),
    ] = None,
    trust: TrustedKeys = None,
    *,
    written: ReportOption,
    shown: QuietOption,
) -> None:
    """Verify a bundle's hashes, run its samples again, and report changes.

    Exit code 1: a result got worse. Exit code 3: no result got worse, but an engine was not run.
    """
    require_writable_report(written.report, used=[bundle, *([onnx] if onnx else ()), *(trust or ())])
    with show_progress(shown.quiet) as progress:
        outcome = normdeploy.recheck(bundle, onnx=onnx, trust=trust or (), progress=progress)
    if written.report is not None:
        write_bytes(
            written.report, (json.dumps(to_plain(outcome.to_json()), indent=2, allow_nan=False) + "\n").encode()
        )
    if not shown.quiet:
        outcome.show(make_console())
    if not outcome:
        raise typer.Exit(1)
    require_all_run(outcome.judgement.unrun if outcome.judgement is not None else ())
