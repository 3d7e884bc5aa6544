"""``normdeploy optimize``."""

from __future__ import annotations

import normdeploy

from ..options import OptimizeOptions, keywords
from .console import bars, require_reports, tell
from .options import OnnxFile, Output, Reporting


def optimize(source: OnnxFile, output: Output, options: OptimizeOptions, reporting: Reporting) -> None:
    """Fuse and fold the normalizations of an ONNX file from anywhere, and clean up the rest."""
    from ..reports.report import Report

    require_reports(reporting, (source, output, *options.calibrate))
    with bars(reporting.quiet) as progress:
        result = normdeploy.optimize(source, output, progress=progress, **keywords(options))
    files = {"source": str(source), "output": str(output)}
    account = Report(
        "optimize",
        files,
        result.summary,
        precision=result.precision,
        quantization=result.quantization,
        notes=result.notes,
        seconds=result.seconds,
    )
    tell(account, reporting)
