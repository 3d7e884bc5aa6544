"""``normdeploy package``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from ..verb_options import LoadingOptions, as_keywords
from ..verbs.package.package_options import PackageOptions
from .console import make_console, require_all_run, show_progress
from .options import OnnxFile, QuietOption


def package(
    onnx: OnnxFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the bundle; appears only once complete.")],
    options: PackageOptions,
    load: LoadingOptions,
    shown: QuietOption,
) -> None:
    """Write a bundle: a Triton model repository with samples, expected outputs, certificates, versions and hashes.

    Exit code 1 if a runtime is wrong on the samples with the models' configuration, 3 if none is and an engine was not
    run. The bundle is written in each case.
    """
    with show_progress(shown.quiet) as progress:
        made = normdeploy.package(onnx, output, progress=progress, **as_keywords(options), **load.load_keywords)
    if not shown.quiet:
        made.show(make_console())
    if not made:
        raise typer.Exit(1)
    require_all_run(made.judgement.unrun)
