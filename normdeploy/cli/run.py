"""``normdeploy run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import normdeploy

from .console import check_report, silenced, tell
from .options import InputValues, Output, Quiet, ReportFile, Reporting

RuntimeCache = Literal["keep", "off"]


def run(
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="An ONNX file or an engine, told apart by their content.")
    ],
    output: Output,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="IN.npz", help="Arrays by name; without it some are generated.")
    ] = None,
    input_: InputValues = None,
    provider: Annotated[
        str | None, typer.Option("--provider", help="cpu or cuda, for an ONNX file; an engine runs on a GPU.")
    ] = None,
    device: Annotated[int, typer.Option("--device", min=0, help="Which GPU.")] = 0,
    profile_index: Annotated[
        int | None,
        typer.Option(
            "--profile-index",
            min=0,
            help="Which profile of an engine, from 0 on; without it the first that holds the shapes.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the generated inputs.")] = 0,
    runner: Annotated[
        str | None,
        typer.Option("--runner", metavar="NAME", help="A runtime that an installed package brings; not onnxruntime."),
    ] = None,
    runtime_cache: Annotated[
        RuntimeCache | None,
        typer.Option(
            "--runtime-cache",
            metavar="MODE",
            help=(
                "keep: what TensorRT-RTX compiles for this GPU goes beside FILE; off: nothing is read there; without"
                " it that is read."
            ),
        ),
    ] = None,
    weight_budget: Annotated[
        int | None,
        typer.Option(
            "--weight-budget",
            metavar="BYTES",
            min=0,
            help="How much of an engine's streamed weights stays on the GPU.",
        ),
    ] = None,
    report: ReportFile = None,
    quiet: Quiet = False,
) -> None:
    """Run an ONNX file or an engine once; outputs, and inputs that were generated, go to .npz files."""
    from ..reports.report import Report

    check_report(report, used=[source, output, *([inputs] if inputs else ())])
    with silenced(quiet=quiet):
        done = normdeploy.run(
            source,
            inputs,
            output,
            provider=provider,
            device=device,
            profile_index=profile_index,
            seed=seed,
            runner=runner,
            runtime_cache=None if runtime_cache is None else runtime_cache == "keep",
            weight_budget=weight_budget,
            stated_inputs=input_ or (),
        )
    files = {"source": str(source), "output": str(output)}
    account = Report("run", files, inference=done, notes=done.notes, seconds=done.seconds)
    tell(account, Reporting(report=report, quiet=quiet))
