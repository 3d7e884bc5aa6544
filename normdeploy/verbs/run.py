"""``normdeploy run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import printable
from .options import Output, Quiet


def run(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="An ONNX file or an engine, told apart by their content.")],
    output: Output,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="IN.npz", help="Arrays by name; without it some are generated.")
    ] = None,
    provider: Annotated[str | None, typer.Option("--provider", help="cpu or cuda, for an ONNX file; an engine runs on a GPU.")] = None,
    device: Annotated[int, typer.Option("--device", min=0, help="Which GPU.")] = 0,
    profile: Annotated[
        int | None, typer.Option("--profile", min=0, help="Which profile of an engine; the first that holds the shapes without it.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the generated inputs.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Run an ONNX file or an engine once; outputs, and inputs that were generated, go to .npz files."""
    from .. import deploy

    done = deploy.run(source, inputs, output, provider=provider, device=device, profile=profile, seed=seed)
    if not quiet:
        lines = [f"{done.runner}: loaded in {done.seconds['load']:.2f} s, ran in {done.seconds['run']:.3f} s"]
        lines += [f"  in   {name}  {said}" for name, said in done.inputs.items()]
        lines += [f"  out  {name}  {said}" for name, said in done.outputs.items()]
        print(printable("\n".join([*lines, *(f"note: {note}" for note in done.notes)])))
