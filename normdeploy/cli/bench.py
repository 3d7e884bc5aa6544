"""``normdeploy bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import normdeploy

from ..options import LoadingOptions
from .console import bars, require_reports, require_run, tell
from .options import (
    LOADING,
    REPORTING,
    Reporting,
    Runners,
)


def bench(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="A model, ONNX files and engines, told apart by their content."),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option("--size", metavar="NAME=SIZE", help="Of a dynamic dim in the race, such as batch=8. Repeatable."),
    ] = None,
    feeds: Annotated[
        Path | None, typer.Option("--inputs", metavar="IN.npz", help="Arrays by name; without it some are generated.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Of torch and of onnxruntime on the CPU.")] = 1,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="In each of them every contestant has its turn.")
    ] = 100,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Of generated inputs, and of the order in each round.")
    ] = 0,
    norm_impl: Annotated[
        str | None,
        typer.Option(
            "--norm-impl",
            metavar="FORMS",
            help=(
                "Race each norm of one ONNX file by itself in these forms, by comma: standard, decomposed, instance,"
                " layer, narrow, "
                "plugin; or all."
            ),
        ),
    ] = None,
    norms: Annotated[
        str | None,
        typer.Option(
            "--norms", metavar="KIND", help="Race usual norms of this kind, such as GroupNorm, in all forms; or all."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="NAMES",
            help="Race others' files too, by comma: plain, onnxslim, onnxsim, ort-transformers.",
        ),
    ] = None,
    runner: Runners = None,
    load: LoadingOptions = LOADING,
    reporting: Reporting = REPORTING,
) -> None:
    """Race a model in eager and torch.compile, ONNX files and engines, in turns; exit code 1 where one gives a wrong
    answer, 3 where none does and a file was not run.

    Options that were given to export need not be given again; those that run code only where you or your team signed
    them (docs/teams.md).
    """
    from ..reports.report import Report

    loading = load.loading
    require_reports(reporting, (*(sources or ()), *([feeds] if feeds else ())))
    with bars(reporting.quiet) as progress:
        race = normdeploy.bench(
            sources or (),
            feeds=feeds,
            sizes=size or (),
            threads=threads,
            rounds=rounds,
            seed=seed,
            norm_impl=() if norm_impl is None else norm_impl.split(","),
            norms=norms,
            against=() if against is None else against.split(","),
            runners=runner or (),
            progress=progress,
            **loading,
        )
    files = {f"source {i}" if i > 1 else "source": str(path) for i, path in enumerate(sources or (), 1)}
    files |= {"inputs": str(feeds)} if feeds is not None else {}
    tell(Report("bench", files, race=race), reporting)
    if not race:
        raise typer.Exit(1)
    require_run(race.unrun)
