"""Options and arguments of ``package``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...types import PathLike, Progress
from ...verb_options import LoadingOptions, option_field

if TYPE_CHECKING:
    from ..arguments.argument_validation import Onnx


@dataclass(frozen=True, kw_only=True)
class PackageOptions:
    """Options for the content of a bundle, and for serving it with Triton."""

    # Content of the bundle.
    source: PathLike | None = option_field(
        None,
        "--source",
        "The PyTorch model, whose float64 answers are then expected.",
        metavar="MODEL",
        type=Path | None,
    )
    engines: Sequence[PathLike] = option_field(
        (),
        "--engine",
        "An engine made of the ONNX file, and its compute capability. Repeatable.",
        metavar="[CC=]FILE",
        type=list[str] | None,
    )
    feeds: PathLike | Mapping[str, Any] | Sequence[PathLike | Mapping[str, Any]] = option_field(
        (),
        "--inputs",
        "The samples; without it some are generated. Repeatable.",
        metavar="IN.npz",
        type=list[Path] | None,
    )

    # Serving.
    name: str | None = option_field(None, "--name", "Of the models in the repository; the file's name without it.")
    max_batch: int | None = option_field(
        None, "--max-batch", "For Triton; 0: no batching. Without it what the export recorded.", minimum=0
    )
    instances: int = option_field(1, "--instances", "Of each model; for engines on each GPU.", minimum=1)
    provider: str = option_field("cpu", "--provider", "Where Triton runs the ONNX file: cpu or cuda.")

    # Evidence.
    report_from: PathLike | None = option_field(
        None,
        "--report-from",
        "What export --report wrote: it holds the certificates.",
        metavar="FILE.json",
        type=Path | None,
    )
    replace: bool = option_field(False, "--replace", "An older bundle may be replaced.")
    sign: PathLike | None = option_field(
        None,
        "--sign",
        "Sign with this private key, and say what it was made of.",
        metavar="KEY.pem",
        type=Path | None,
    )


@dataclass(frozen=True)
class PackageCall(PackageOptions, LoadingOptions):
    """Arguments of a call of ``package``."""

    onnx_path: Onnx
    output: PathLike
    _: KW_ONLY
    progress: Progress | None = None

    @property
    def model_path(self) -> PathLike:
        """Return the path of the ONNX file, also for a model that was given in memory."""
        return cast("PathLike", self.onnx_path)

    @property
    def sample_sources(self) -> tuple[PathLike | Mapping[str, Any], ...]:
        """Return the given samples as a tuple."""
        if isinstance(self.feeds, Mapping | str | os.PathLike):
            return (self.feeds,)
        return tuple(self.feeds)
