"""Options and arguments of ``bisect``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...types import PathLike, Progress
from ...verb_options import ImageInputOptions, LoadingOptions, RunnersOption, option_field
from ..verify.verify_options import ComparisonOptions

if TYPE_CHECKING:
    from ..arguments.argument_validation import Example, Onnx
    from ..arguments.model_source import Source


@dataclass(frozen=True, kw_only=True)
class FilesOptions:
    """Options for the files that ``bisect`` writes, and for the engines that it also compares."""

    output: PathLike | None = option_field(
        None,
        "--output",
        "New folder for the smallest model that fails, with its inputs and a script that shows the failure.",
        short="-o",
        metavar="FOLDER",
        type=Path | None,
    )
    engines: Sequence[PathLike] = option_field(
        (),
        "--engine",
        "Also compare the outputs of this engine. Its inner tensors can't be read. Repeatable.",
        type=list[Path] | None,
    )


@dataclass(frozen=True, kw_only=True)
class BisectOptions(RunnersOption, ComparisonOptions, ImageInputOptions, FilesOptions):
    """Options of ``bisect``."""


@dataclass(frozen=True)
class BisectCall(BisectOptions, LoadingOptions):
    """Arguments of a call of ``bisect``."""

    source: Source | Onnx | Any
    onnx_path: Onnx = ""
    args: Example = ()
    kwargs: Mapping[str, Any] | None = None
    _: KW_ONLY
    progress: Progress | None = None
