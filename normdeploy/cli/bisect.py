"""``normdeploy bisect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from ..options import LoadingOptions
from .comparing import (
    AlsoDefault,
    DatasetOption,
    GivenInputs,
    LabelsOption,
    MapOptions,
    MaxElements,
    MaxMemory,
    MaxSeconds,
    MetricOptions,
    Original,
    PolicyFileOption,
    Seeds,
    ToleranceOptions,
)
from .console import bars, require_reports, require_run, tell
from .options import (
    LOADING,
    REPORTING,
    OnnxFile,
    Reporting,
    Runners,
)


def bisect(
    source: Original,
    onnx: OnnxFile,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Write the smallest failing model, its inputs and a script; a new folder.",
        ),
    ] = None,
    engine: Annotated[
        list[Path] | None, typer.Option("--engine", help="Compare an engine too, at its outputs only. Repeatable.")
    ] = None,
    seeds: Seeds = 3,
    given: GivenInputs = None,
    max_elements: MaxElements = None,
    max_seconds: MaxSeconds = 60.0,
    max_memory: MaxMemory = 4 * 2**30,
    tolerance: ToleranceOptions = None,
    metric: MetricOptions = None,
    policy: PolicyFileOption = None,
    also_default: AlsoDefault = False,
    dataset: DatasetOption = None,
    labels: LabelsOption = None,
    map_: MapOptions = None,
    runner: Runners = None,
    load: LoadingOptions = LOADING,
    reporting: Reporting = REPORTING,
) -> None:
    """Find the first tensor that leaves the bound of verify, the node that makes it so, and why; exit code 1 where
    there is one, 3 where there is none and an engine was not run.

    Options that were given to export need not be given again; those that run code only where you or your team signed
    them (docs/teams.md).
    """
    from ..reports.report import Report

    loading = load.loading
    used = [path for path in (policy, dataset, output) if path is not None]
    require_reports(reporting, (source, onnx, *(engine or ()), *(given or ()), *used))
    with bars(reporting.quiet) as progress:
        bisection = normdeploy.bisect(
            source,
            onnx,
            output=output,
            engines=engine or (),
            seeds=seeds,
            feeds=given or None,
            max_elements=max_elements,
            max_seconds=max_seconds,
            max_memory=max_memory,
            tolerance=tolerance,
            metric=metric,
            policy=policy,
            also_default=also_default,
            dataset=dataset,
            labels=labels,
            map=map_ or (),
            runners=runner or (),
            progress=progress,
            **loading,
        )
    files = {"model": str(source), "onnx": str(onnx)} | ({"engines": ", ".join(map(str, engine))} if engine else {})
    if bisection.reproduction is not None and output is not None:
        files["reproduction"] = str(output)
    account = Report(
        "bisect", files, parity=bisection.parity, bisection=bisection, seconds={"bisect": bisection.seconds}
    )
    tell(account, reporting)
    if bisection.parity.outcome == "failed":
        raise typer.Exit(1)
    require_run(bisection.parity.unrun)
