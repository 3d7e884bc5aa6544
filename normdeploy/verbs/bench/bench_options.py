"""Options and arguments of ``bench``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...types import PathLike, Progress
from ...verb_options import LoadingOptions, RunnersOption, option_field

if TYPE_CHECKING:
    from ..arguments.argument_validation import Example, Onnx
    from ..arguments.model_source import Source


def _split_commas(text: str) -> list[str]:
    return text.split(",")


@dataclass(frozen=True, kw_only=True)
class RaceOptions:
    """Options of a benchmark: its contestants, its inputs and the number of rounds."""

    # Options for the inputs.
    sizes: Sequence[str] | Mapping[str, int] = option_field(
        (),
        "--size",
        "Size of a dynamic dim, such as batch=8. Repeatable.",
        metavar="NAME=SIZE",
        type=list[str] | None,
    )
    feeds: PathLike | Mapping[str, Any] | None = option_field(
        None,
        "--inputs",
        "File of input arrays by name. Inputs are generated if omitted.",
        metavar="IN.npz",
        type=Path | None,
    )

    # Options for the rounds.
    threads: int = option_field(1, "--threads", "CPU threads for torch and onnxruntime.", minimum=1)
    rounds: int = option_field(
        100, "--rounds", "Number of rounds. In each round, every file and runtime is timed once.", minimum=1
    )
    seed: int = option_field(0, "--seed", "Seed of the generated inputs and of the order within each round.", minimum=0)

    # Options that choose the contestants.
    norm_impl: str | Sequence[str] = option_field(
        (),
        "--norm-impl",
        "Benchmark each norm of one ONNX file by itself, in these forms, separated by commas: standard, decomposed,"
        " instance, layer, narrow, sum, plugin; or all. docs/reference/bench.md defines the forms.",
        metavar="FORMS",
        type=str | None,
        read=_split_commas,
    )
    norms: str | None = option_field(
        None,
        "--norms",
        "Benchmark common norms of this kind, such as GroupNorm, in all forms. Use all for every kind.",
        metavar="KIND",
    )
    against: str | Sequence[str] = option_field(
        (),
        "--against",
        "Also benchmark the files that these tools write for the same model, separated by commas: plain (torch's own"
        " export), onnxslim, onnxsim, ort-transformers.",
        metavar="NAMES",
        type=str | None,
        read=_split_commas,
    )


@dataclass(frozen=True, kw_only=True)
class BenchOptions(RunnersOption, RaceOptions):
    """Options of ``bench``."""


@dataclass(frozen=True)
class BenchCall(BenchOptions, LoadingOptions):
    """Arguments of a call of ``bench``."""

    sources: Source | Onnx | Sequence[Source | Onnx]
    args: Example = ()
    kwargs: Mapping[str, Any] | None = None
    _: KW_ONLY
    progress: Progress | None = None
