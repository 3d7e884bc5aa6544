"""Options and arguments of ``package``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...types import PathLike, Progress
from ...verb_options import LoadingOptions, option_field

if TYPE_CHECKING:
    from ..arguments.argument_validation import Onnx


@dataclass(frozen=True)
class FoundReport:
    """JSON report whose recorded SHA-256 is that of the packaged file.

    Attributes:
        data: bytes of the report.
        origin: where it was found, for people: the name of a file, or "the store".
    """

    data: bytes
    origin: str


@dataclass(frozen=True, kw_only=True)
class PackageOptions:
    """Options for the content of a bundle, and for serving it with Triton."""

    # Options for the content of the bundle.
    source: PathLike | None = option_field(
        None,
        "--source",
        "PyTorch model that computes the expected outputs, in float64. Without --source, onnxruntime computes them.",
        metavar="MODEL",
        type=Path | None,
    )
    engines: Sequence[PathLike] = option_field(
        (),
        "--engine",
        "Engine that was built from the ONNX file. For several TensorRT engines, write the compute capability of the"
        " GPU before each engine, such as 8.6=a.plan. Repeatable.",
        metavar="[CC=]FILE",
        type=list[str] | None,
    )
    feeds: PathLike | Mapping[str, Any] | Sequence[PathLike | Mapping[str, Any]] = option_field(
        (),
        "--inputs",
        "File of samples: input arrays by name. Samples are generated if omitted. Repeatable.",
        metavar="IN.npz",
        type=list[Path] | None,
    )

    # Options for serving with Triton.
    name: str | None = option_field(
        None, "--name", "Name of the models in the Triton repository. Default: the file's name."
    )
    max_batch: int | None = option_field(
        None,
        "--max-batch",
        "Largest batch size for Triton. 0 turns batching off. Default: the largest batch size that export recorded.",
        minimum=0,
    )
    instances: int = option_field(
        1,
        "--instances",
        "Number of instances of each model in Triton. For engines, this is the number on each GPU.",
        minimum=1,
    )
    provider: str = option_field("cpu", "--provider", "Device on which Triton runs the ONNX file: cpu or cuda.")

    # Options for the evidence.
    report_from: PathLike | None = option_field(
        None,
        "--report-from",
        "Report with the certificates, which export or optimize wrote with --report. Default: a report in the"
        " ONNX file's folder that records the hash of the ONNX file.",
        metavar="FILE.json",
        type=Path | None,
    )
    replace: bool = option_field(False, "--replace", "Replace an existing bundle.")
    sign: PathLike | None = option_field(
        None,
        "--sign",
        "Private key that signs the bundle and its provenance.",
        metavar="KEY.pem",
        type=Path | None,
    )


@dataclass(frozen=True)
class PackageCall(PackageOptions, LoadingOptions):
    """Arguments of a call of ``package``."""

    onnx_path: Onnx
    output: PathLike
    _: KW_ONLY
    find_report: Callable[[str], FoundReport | None] | None = None
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
