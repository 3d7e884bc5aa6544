"""``normdeploy export``."""

from __future__ import annotations

from typing import Annotated

import typer

from .console import bars, check_report, tell
from .options import (
    Calibrate,
    CompareLimit,
    Dims,
    Eval,
    Factory,
    FactoryArgs,
    Fuse,
    FuseOption,
    HtmlFile,
    Imports,
    Inputs,
    KeepIO,
    Key,
    ModelFile,
    Output,
    PartOption,
    PrecisionOption,
    ProviderOption,
    Quiet,
    ReportFile,
    Runtime,
    RuntimeOption,
    Strict,
    StrictProof,
    TaskOption,
    Trust,
    loading_of,
)


def export(
    source: ModelFile,
    output: Output,
    model: Factory = None,
    model_arg: FactoryArgs = None,
    key: Key = None,
    trust: Trust = False,
    import_: Imports = None,
    input_: Inputs = None,
    dim: Dims = None,
    eval_mode: Eval = False,
    task: TaskOption = None,
    part: PartOption = None,
    opset: Annotated[int | None, typer.Option("--opset", help="18 to 25; without it 21, raised only where a norm needs it.")] = None,
    runtime: RuntimeOption = Runtime.any,
    provider: ProviderOption = "cpu",
    fuse: FuseOption = Fuse.standard,
    strict: Strict = False,
    strict_proof: StrictProof = False,
    precision: PrecisionOption = None,
    calibrate: Calibrate = None,
    keep_io: KeepIO = False,
    compare_limit: CompareLimit = 2**30,
    report: ReportFile = None,
    html: HtmlFile = None,
    quiet: Quiet = False,
) -> None:
    """Turn a PyTorch model into ONNX, every normalization fused or folded with proof."""
    from .. import deploy
    from ..reports.report import Report

    loading = loading_of(model, model_arg, key, trust, import_, input_, dim, eval_mode, task, part)
    check_report(report, html, (source, output, *(calibrate or ())))
    with bars(quiet) as progress:
        result = deploy.export(
            source,
            output=output,
            opset=opset,
            runtime=runtime,
            provider=provider,
            fuse=fuse,
            strict=strict,
            strict_proof=strict_proof,
            precision=precision or None,
            calibrate=calibrate or (),
            keep_io=keep_io,
            compare_limit=compare_limit,
            progress=progress,
            **loading,
        )
    files = {"source": str(source), "output": str(output)}
    account = Report("export", files, result.summary, precision=result.precision, notes=result.notes, seconds=result.seconds)
    tell(account, report, quiet, html)
