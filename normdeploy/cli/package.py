"""``normdeploy package``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from ..verb_options import LoadingOptions, as_keywords
from ..verbs.package.package_options import FoundReport, PackageOptions
from .console import make_console, require_all_run, show_progress
from .options import OnnxFile, QuietOption


def package(
    onnx: OnnxFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the bundle. It appears only when the bundle is complete.")
    ],
    options: PackageOptions,
    load: LoadingOptions,
    shown: QuietOption,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="PLACE",
            help="Store in which an export or a fleet keeps its results. It is searched for the file's report. Default:"
            " the environment variable NORMDEPLOY_STORE.",
        ),
    ] = None,
) -> None:
    """Write a Triton model repository with samples, expected outputs, report, certificates, versions and hashes.

    Exit code 1: a runtime with the bundle's configuration gives wrong results on the samples. Exit code 3: no result is
    wrong, but an engine was not run.

    The bundle is written in both cases.
    """

    def find_report(digest: str) -> FoundReport | None:
        """Find the report of the file in the store."""
        from ..fleet.stored_reports import find_stored_report

        return find_stored_report(digest, store)

    with show_progress(shown.quiet) as progress:
        made = normdeploy.package(
            onnx, output, find_report=find_report, progress=progress, **as_keywords(options), **load.load_keywords
        )
    if not shown.quiet:
        made.show(make_console())
    if not made:
        raise typer.Exit(1)
    require_all_run(made.judgement.unrun)
