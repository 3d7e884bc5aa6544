"""``normdeploy optimize``."""

from __future__ import annotations

import normdeploy

from ..reports.report import Report
from ..verb_options import CertificateOption, as_keywords
from ..verbs.optimize.optimize_options import OptimizeOptions
from .console import print_report, require_reports, require_writable_report, show_progress
from .options import OnnxFile, Output, ReportingOptions


def optimize(
    source: OnnxFile,
    output: Output,
    options: OptimizeOptions,
    proofs: CertificateOption,
    reporting: ReportingOptions,
) -> None:
    """Fuse and fold the normalizations of an ONNX file from any exporter, and clean up its graph."""
    require_reports(reporting, (source, output, *options.calibrate))
    require_writable_report(
        proofs.certificate,
        used=(source, output, *filter(None, (reporting.report, reporting.html))),
        kind="certificate",
    )
    with show_progress(reporting.quiet) as progress:
        result = normdeploy.optimize(source, output, progress=progress, **as_keywords(options), **as_keywords(proofs))
    files = {"source": str(source), "output": str(output)}
    told = {"precision": result.precision, "quantization": result.quantization}
    account = Report("optimize", files, result.summary, told, result.notes, seconds=result.seconds)
    print_report(result, account, reporting)
