"""``normdeploy inspect``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, cast

import typer

import normdeploy

from ..engines.engine_json import is_json_file
from ..errors import InputError
from ..reports.report import Report
from ..verb_options import LoadingOptions, as_keywords, find_option
from ..verbs.inspect.inspect_engine_options import InspectEngineOptions
from ..verbs.inspect.inspect_options import InspectOptions
from .console import print_report, require_reports, require_writable_report, show_progress
from .options import ReportingOptions


def inspect(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="ONNX file, any model that export accepts, or the layers of an engine (trtexec --exportLayerInfo).",
        ),
    ],
    load: LoadingOptions,
    options: InspectOptions,
    engine: InspectEngineOptions,
    reporting: ReportingOptions,
    other: Annotated[
        Path | None, typer.Argument(metavar="OTHER.json", help="Layers of a second engine to compare with.")
    ] = None,
) -> None:
    """List the normalizations of a file or model, how each would be rewritten, and how each runtime would run it.

    The file or model is not changed. For the layers of a TensorRT engine, show how the engine computes each
    normalization.
    """
    if other is not None or is_json_file(source):
        _inspect_engine(source, other, engine, reporting, (load, options))
        return
    _refuse_options("the layers of an engine, a JSON file of trtexec --exportLayerInfo", engine)
    require_reports(reporting, [source])
    with show_progress(reporting.quiet) as progress:
        summary = normdeploy.inspect(source, progress=progress, **as_keywords(options), **load.load_keywords)
    print_report(summary, Report("inspect", {"source": str(source)}, summary, seconds=summary.seconds), reporting)


def _inspect_engine(
    source: Path,
    other: Path | None,
    engine: InspectEngineOptions,
    reporting: ReportingOptions,
    of_models: tuple[Any, ...],
) -> None:
    """Show how one or two engines compute norms."""
    for group in of_models:
        _refuse_options("models, and this is the JSON of an engine's layers", group)
    files = _name_files(source, other, engine)
    require_reports(reporting, files.values())
    if engine.node_data is not None:
        used = [*files.values(), *filter(None, (reporting.report, reporting.html))]
        require_writable_report(engine.node_data, used=used, kind="node data")
    with show_progress(reporting.quiet) as progress:
        report = normdeploy.inspect_engine(source, other, progress=progress, **as_keywords(engine))
    notes = tuple(note for build in report.builds for note in build.notes)
    account = Report(
        "inspect", files, sections={"engine_layers": report}, notes=notes, seconds={"inspect": report.seconds}
    )
    print_report(report, account, reporting)


def _refuse_options(accepted: str, group: Any) -> None:
    """Refuse options that do not apply.

    Raises:
        InputError: an option of ``group`` was given.
    """
    for each in fields(group):
        if "option" in each.metadata and getattr(group, each.name) != each.default:
            raise InputError(f"{find_option(type(group), each.name).flag} is for {accepted}; omit it")


def _name_files(source: Path, other: Path | None, engine: InspectEngineOptions) -> dict[str, str]:
    """List the files that are read, by role."""
    groups: tuple[tuple[str, Sequence[Path]], ...] = (
        ("source", [source] if other is None else [source, other]),
        ("onnx", cast("Sequence[Path]", engine.onnx_files)),
        ("profile", cast("Sequence[Path]", engine.profile_json)),
    )
    return {
        role if index == 0 else f"{role} {index + 1}": str(path)
        for role, paths in groups
        for index, path in enumerate(paths)
    }
