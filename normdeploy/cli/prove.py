"""``normdeploy prove``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from ..reports.proof_page import render_proof_page
from ..reports.report import to_plain
from ..storage.file_replacement import write_bytes
from ..verb_options import as_keywords
from ..verbs.prove.prove_options import ProveOptions
from .console import make_console, require_reports, show_progress
from .options import ReportingOptions


def prove(
    first: Annotated[Path, typer.Argument(metavar="A.onnx", help="ONNX file.")],
    second: Annotated[Path, typer.Argument(metavar="B.onnx", help="ONNX file with the same inputs and outputs.")],
    options: ProveOptions,
    written: ReportingOptions,
) -> None:
    """Prove that two ONNX files compute the same function, or show an input at which they differ.

    The proof is about exact arithmetic on finite numbers: rounding, overflow, NaN and infinite inputs are not covered.

    Exit code 0: proved equal, exactly or up to the rounding of stored constants.
    Exit code 1: different.
    Exit code 2: not known.
    """
    require_reports(written, (first, second))
    with show_progress(written.quiet) as progress:
        proof = normdeploy.prove(first, second, progress=progress, **as_keywords(options))
    document = to_plain(proof.to_json())
    if written.report is not None:
        text = json.dumps(document, indent=2, allow_nan=False)
        write_bytes(written.report, (text + "\n").encode(errors="backslashreplace"))
    if written.html is not None:
        write_bytes(written.html, render_proof_page(document, proof.describe()).encode(errors="replace"))
    if not written.quiet:
        proof.show(make_console())
    if proof.exit_code:
        raise typer.Exit(proof.exit_code)
