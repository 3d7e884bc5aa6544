"""``normdeploy optimize``."""

from __future__ import annotations

from typing import Annotated

import typer

import normdeploy

from .console import bars, check_report, tell
from .options import (
    Calibrate,
    CalibrationOption,
    CompareLimit,
    Dims,
    DynamicOption,
    FuseOption,
    HtmlFile,
    InputValues,
    KeepFloat,
    KeepIO,
    MetricOption,
    OnnxFile,
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


def optimize(
    source: OnnxFile,
    output: Output,
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
    no_simplify: Annotated[bool, typer.Option("--no-simplify", help="Leave all but the norms as it is.")] = False,
    input_: InputValues = None,
    dim: Dims = None,
    report: ReportFile = None,
    html: HtmlFile = None,
    quiet: Quiet = False,
) -> None:
    """Fuse and fold the normalizations of an ONNX file from anywhere, and clean up the rest."""
    from ..reports.report import Report

    check_report(report, html, (source, output, *(calibrate or ())))
    with bars(quiet) as progress:
        result = normdeploy.optimize(
            source,
            output,
            runtime=runtime,
            provider=provider,
            fuse=fuse,
            strict=strict,
            strict_proof=strict_proof,
            precision=precision or None,
            calibrate=calibrate or (),
            keep_io=keep_io,
            quantize=quantize,
            calibration=calibration,
            metric=metric,
            dynamic=dynamic,
            rotate=rotate,
            keep_float=keep_float or (),
            compare_limit=compare_limit,
            simplify=not no_simplify,
            dims=dim or (),
            stated_inputs=input_ or (),
            progress=progress,
        )
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
    tell(account, report, quiet, html)
