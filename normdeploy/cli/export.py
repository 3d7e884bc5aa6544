"""``normdeploy export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import normdeploy

from ..errors import InputError
from ..reports.report import Report
from ..verb_options import CertificateOption, as_keywords
from ..verbs.export.export_options import EveryPartOptions, ExportOptions, GenaiOption
from .console import print_line, print_report, require_reports, require_writable_report, show_progress
from .options import ModelFile, Output, ReportingOptions

if TYPE_CHECKING:
    from ..verbs.arguments.export_result import ExportResult


def export(
    source: ModelFile,
    output: Output,
    load: EveryPartOptions,
    folder: GenaiOption,
    options: ExportOptions,
    proofs: CertificateOption,
    reporting: ReportingOptions,
) -> None:
    """Convert a PyTorch model to ONNX, with every normalization fused or folded and proved."""
    several = load.part == "all" or (load.part is None and _is_pipeline(source))
    if proofs.certificate is not None and (folder.genai or several):
        raise InputError(
            "--certificate writes the certificate of one file, but this export writes a folder; export one part with"
            " --part NAME, or omit --certificate"
        )
    if folder.genai:
        _export_genai(source, output, load, options, reporting)
        return
    if several:
        _export_parts(source, output, load, options, reporting)
        return
    require_reports(reporting, (source, output, *options.calibrate))
    require_writable_report(
        proofs.certificate,
        used=(source, output, *filter(None, (reporting.report, reporting.html))),
        kind="certificate",
    )
    with show_progress(reporting.quiet) as progress:
        result = normdeploy.export(
            source,
            output=output,
            progress=progress,
            **as_keywords(options),
            **as_keywords(proofs),
            **load.load_keywords,
        )
    print_report(result, _build_report(source, output, result), reporting)


def _export_genai(
    source: Path, output: Path, load: EveryPartOptions, options: ExportOptions, reporting: ReportingOptions
) -> None:
    """Export a decoder to a folder for onnxruntime-genai, with tables, report and page for its file."""
    require_reports(reporting, (source, output, *options.calibrate))
    with show_progress(reporting.quiet) as progress:
        result = normdeploy.export_genai(
            source, output, progress=progress, **as_keywords(options), **load.load_keywords
        )
    print_report(result, _build_report(source, result.path or output, result), reporting)


def _is_pipeline(source: Path) -> bool:
    """Return whether ``source`` is a diffusers pipeline, which is always exported as a folder of parts."""
    from ..loading.file_kinds import PIPELINE_INDEX
    from ..loading.hub import resolve_model_path

    return (resolve_model_path(source) / PIPELINE_INDEX).is_file()


def _export_parts(
    source: Path, output: Path, load: EveryPartOptions, options: ExportOptions, reporting: ReportingOptions
) -> None:
    """Export all parts of a model to a folder, with tables, report and page for each part."""
    from ..findings.console_tables import file_title
    from ..loading import find_part_files

    for file in find_part_files(source, trust=load.trust).values():
        require_reports(reporting.for_file(file), (source, output))
    with show_progress(reporting.quiet) as progress:
        results = normdeploy.export_parts(
            source, output, progress=progress, **as_keywords(options), **load.load_keywords
        )
    for file, result in results.items():
        if not reporting.quiet:
            print_line(file_title(file))
        print_report(result, _build_report(source, output / file, result), reporting.for_file(file))
        if not reporting.quiet:
            print_line()


def _build_report(source: Path, output: Path, result: ExportResult) -> Report:
    files = {"source": str(source), "output": str(output)}
    told = {"precision": result.precision, "quantization": result.quantization}
    return Report("export", files, result.summary, told, result.notes, seconds=result.seconds)
