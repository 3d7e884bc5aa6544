"""Options of ``optimize``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...verb_options import (
    ConversionOptions,
    ImageInputOptions,
    LoadingOptions,
    option_field,
    repeat_option_field,
)
from ..run.run_options import RunOptions


@dataclass(frozen=True, kw_only=True)
class OptimizeOptions(ConversionOptions, ImageInputOptions):
    """Options for the file that ``optimize`` writes."""

    simplify: bool = option_field(
        True, "--no-simplify", "Rewrite only norms. Leave all other nodes unchanged.", negated=True
    )
    opset: int | None = option_field(
        None,
        "--opset",
        "Opset of the result, 13 to 28. The file is lowered or raised to it. Default: the file's opset, or higher if a"
        " norm needs it.",
    )
    trust: bool = option_field(False, "--trust-remote-code", "Run the code of the function that --preprocess names.")
    inputs: Sequence[str] = repeat_option_field(RunOptions, "stated_inputs")
    dims: Sequence[str] = repeat_option_field(LoadingOptions, "dims")
