"""``normdeploy export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import normdeploy

from ..errors import InputError
from .console import bars, check_report, of_file, say, tell
from .options import (
    EXPORTING,
    Calibrate,
    CalibrationOption,
    CompareLimit,
    DynamicOption,
    ExportOptions,
    FuseOption,
    HtmlFile,
    KeepFloat,
    KeepIO,
    MetricOption,
    ModelFile,
    Output,
    PrecisionOption,
    ProviderOption,
    QuantizeOption,
    Quiet,
    ReportFile,
    RotateOption,
    RuntimeOption,
    Strict,
    StrictProof,
)

if TYPE_CHECKING:
    from ..arguments import Loading
    from ..reports.report import Report
    from ..results import ExportResult


def export(
    source: ModelFile,
    output: Output,
    load: ExportOptions = EXPORTING,
    opset: Annotated[
        int | None, typer.Option("--opset", help="18 to 25; without it 21, raised only where a norm needs it.")
    ] = None,
    runtime: RuntimeOption = "any",
    provider: ProviderOption = "cpu",
    fuse: FuseOption = "standard",
    strict: Strict = False,
    strict_proof: StrictProof = False,
    precision: PrecisionOption = None,
    calibrate: Calibrate = None,
    keep_io: KeepIO = False,
    quantize: QuantizeOption = None,
    calibration: CalibrationOption = None,
    metric: MetricOption = None,
    dynamic: DynamicOption = False,
    rotate: RotateOption = False,
    keep_float: KeepFloat = None,
    compare_limit: CompareLimit = 2**30,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Write the file without a run beside PyTorch at two small sizes.")
    ] = False,
    report: ReportFile = None,
    html: HtmlFile = None,
    quiet: Quiet = False,
) -> None:
    """Turn a PyTorch model into ONNX, every normalization fused or folded with proof."""
    loading = load.keywords()
    options: dict[str, Any] = {
        **{
            "opset": opset,
            "runtime": runtime,
            "provider": provider,
            "fuse": fuse,
            "strict": strict,
            "strict_proof": strict_proof,
        },
        **{"precision": precision or None, "keep_io": keep_io, "compare_limit": compare_limit},
        "check": not no_check,
    }
    if load.part == "all":
        if calibrate:
            raise InputError(
                "--calibrate holds the inputs of one part, and all are exported; leave it out, or export that part"
                " alone"
            )
        if quantize is not None:
            raise InputError("parts are quantized one by one; export that part alone, with --part NAME")
        _export_parts(source, output, report, html, quiet, options, loading)
        return
    check_report(report, html, (source, output, *(calibrate or ())))
    with bars(quiet) as progress:
        result = normdeploy.export(
            source,
            output=output,
            calibrate=calibrate or (),
            quantize=quantize,
            calibration=calibration,
            metric=metric,
            dynamic=dynamic,
            rotate=rotate,
            keep_float=keep_float or (),
            progress=progress,
            **options,
            **loading,
        )
    tell(_account(source, output, result), report, quiet, html)


def _export_parts(
    source: Path,
    output: Path,
    report: Path | None,
    html: Path | None,
    quiet: bool,
    options: dict[str, Any],
    loading: Loading,
) -> None:
    """A folder of all parts; tables, report and page of each by itself."""
    from ..loading.tasks import PART_FILES
    from ..reports.shown import title

    for file in PART_FILES.values():
        check_report(of_file(report, file), of_file(html, file), (source, output))
    with bars(quiet) as progress:
        results = normdeploy.export_parts(source, output, progress=progress, **options, **loading)
    for file, result in results.items():
        if not quiet:
            say(title(file))
        tell(_account(source, output / file, result), of_file(report, file), quiet, of_file(html, file))
        if not quiet:
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
