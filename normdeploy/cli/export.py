"""``normdeploy export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import normdeploy

from ..options import EveryPartOptions, ExportOptions, keywords
from .console import bars, require_reports, say, tell
from .options import ModelFile, Output, Reporting

if TYPE_CHECKING:
    from ..reports.report import Report
    from ..results import ExportResult


def export(
    source: ModelFile, output: Output, load: EveryPartOptions, options: ExportOptions, reporting: Reporting
) -> None:
    """Turn a PyTorch model into ONNX, every normalization fused or folded with proof."""
    if load.part == "all":
        _export_parts(source, output, load, options, reporting)
        return
    require_reports(reporting, (source, output, *options.calibrate))
    with bars(reporting.quiet) as progress:
        result = normdeploy.export(source, output=output, progress=progress, **keywords(options), **load.loading)
    tell(_account(source, output, result), reporting)


def _export_parts(
    source: Path, output: Path, load: EveryPartOptions, options: ExportOptions, reporting: Reporting
) -> None:
    """A folder of all parts; tables, report and page of each by itself."""
    from ..loading.tasks import PART_FILES
    from ..reports.shown import title

    for file in PART_FILES.values():
        require_reports(reporting.of_file(file), (source, output))
    with bars(reporting.quiet) as progress:
        results = normdeploy.export_parts(source, output, progress=progress, **keywords(options), **load.loading)
    for file, result in results.items():
        if not reporting.quiet:
            say(title(file))
        tell(_account(source, output / file, result), reporting.of_file(file))
        if not reporting.quiet:
            say()


def _account(source: Path, output: Path, result: ExportResult) -> Report:
    from ..reports.report import Report

    files = {"source": str(source), "output": str(output)}
    return Report(
        "export",
        files,
        result.summary,
        precision=result.precision,
        quantization=result.quantization,
        notes=result.notes,
        seconds=result.seconds,
    )
