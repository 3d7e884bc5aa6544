"""``normdeploy package``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from ..options import LoadingOptions, keywords
from ..verbs.package.options import PackageOptions
from .console import _console, bars, require_run
from .options import OnnxFile, QuietOption


def package(
    onnx: OnnxFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder of the bundle; it appears only when it is whole.")
    ],
    options: PackageOptions,
    load: LoadingOptions,
    shown: QuietOption,
) -> None:
    """Write a Triton model repository with samples, expected outputs, report, certificates, versions and hashes beside
    it.

    Exit code 1 where a runtime is wrong on the samples, as the models are configured, 3 where none is and an engine was
    not run; the bundle is written then too.
    """
    from ..reports.package import show_package

    with bars(shown.quiet) as progress:
        made = normdeploy.package(onnx, output, progress=progress, **keywords(options), **load.loading)
    if not shown.quiet:
        show_package(_console(), made)
    if not made:
        raise typer.Exit(1)
    require_run(made.judgement.unrun)
