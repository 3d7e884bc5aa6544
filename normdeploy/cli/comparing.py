"""The options of ``verify`` and ``bisect`` that say what is compared, on which inputs and by which rules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Original = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="A model file, a Hugging Face folder, or an ONNX file to compare the others with."
    ),
]
Seeds = Annotated[
    int, typer.Option("--seeds", min=1, help="Random inputs at the usual sizes, besides those at other sizes.")
]
GivenInputs = Annotated[
    list[Path] | None,
    typer.Option(
        "--inputs",
        metavar="IN.npz",
        help="Arrays by name; only these are run instead of generated ones. Repeatable.",
    ),
]
MaxElements = Annotated[
    int | None,
    typer.Option(
        "--max-elements",
        min=1,
        metavar="N",
        help="Of the largest generated input; by default 8 times the elements at the usual sizes.",
    ),
]
MaxSeconds = Annotated[
    float,
    typer.Option("--max-seconds", min=1, metavar="S", help="Processor time to spend; the verdict tells the rest."),
]
MaxMemory = Annotated[
    int,
    typer.Option(
        "--max-memory", min=2**20, metavar="BYTES", help="For tensors inside the model; larger sizes are out."
    ),
]
ToleranceOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--tolerance",
        metavar=r"\[OUT=]ABS:REL",
        help="|error| ≤ ABS + REL·|reference| decides on an output, or on all. Repeatable.",
    ),
]
MetricOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--metric",
        metavar=r"'\[OUT=]NAME>=X'",
        help=(
            "cosine, psnr, snr, top1, top5, nearest or (<=X) accuracy_drop decides; in quotes, or NAME:X. Repeatable."
        ),
    ),
]
PolicyFileOption = Annotated[
    Path | None, typer.Option("--policy", metavar="VERIFY.toml", help="A file of tolerances, metrics and names.")
]
AlsoDefault = Annotated[
    bool, typer.Option("--also-default", help="The default rule must hold beside the tolerances and metrics given.")
]
DatasetOption = Annotated[
    Path | None,
    typer.Option(
        "--dataset",
        metavar="PATH",
        help="Samples that metrics are measured on: an .npz, a folder of these, or a Hugging Face dataset on disk.",
    ),
]
LabelsOption = Annotated[
    str | None,
    typer.Option("--labels", metavar="NAME", help="The dataset's array or column of right classes, for accuracy_drop."),
]
MapOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="THEIRS=OURS",
        help="An input or output of a file is the model's of another name. Repeatable.",
    ),
]
