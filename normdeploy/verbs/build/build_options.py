"""Options and arguments of ``build``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...option_values import EngineRuntime, NormImpl
from ...types import PathLike, ProfileRanges, Progress
from ...verb_options import option_field

if TYPE_CHECKING:
    from ..arguments.argument_validation import Onnx


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options for the build of an engine."""

    # Target.
    runtime: str = option_field(
        "tensorrt-rtx",
        "--runtime",
        "The library that builds and will run the engine: tensorrt-rtx or tensorrt.",
        metavar="RUNTIME",
        type=EngineRuntime,
    )
    compute_capabilities: Sequence[str] = option_field(
        (),
        "--compute-capability",
        "The GPUs to build for (TensorRT-RTX), such as 8.6 8.9 12.0; all where not given.",
        metavar="X.Y ...",
        type=list[str] | None,
    )
    profiles: ProfileRanges = option_field(
        (),
        "--profile",
        "Sizes of a dynamic dim (batch=1:8:64) or input (ids=1x8:4x64:64x512). Repeatable.",
        metavar="NAME=MIN:OPT:MAX",
        type=list[str] | None,
    )
    norm_impl: str = option_field(
        "native",
        "--norm-impl",
        "native; plugin: norms in our kernels, held by the engine (tensorrt only); auto: where that helps.",
        metavar="FORM",
        type=NormImpl,
    )
    more_profiles: Sequence[ProfileRanges] = option_field(
        (),
        "--add-profile",
        "A further optimization profile, as --profile; several ranges joined by commas. Repeatable.",
        metavar="RANGE[,RANGE]",
        type=list[str] | None,
    )

    # The build.
    timing_cache: PathLike | None = option_field(
        None,
        "--timing-cache",
        "What earlier builds have timed: read, added to, shared by builds side by side (tensorrt only).",
        metavar="FILE",
        type=Path | None,
    )
    workspace: int | str | None = option_field(
        None,
        "--workspace",
        "The most memory that a layer may use: bytes, 512M, 2G.",
        metavar="SIZE",
        type=str | None,
    )
    optimization_level: int | None = option_field(
        None, "--optimization-level", "How long the builder looks for faster kernels, 0 to 5.", metavar="N"
    )

    # Abilities of the engine.
    hardware_compatibility: str | None = option_field(
        None,
        "--hardware-compat",
        "Other GPUs that the engine is to run on: ampere-plus or same-compute-capability (tensorrt only).",
        metavar="LEVEL",
    )
    version_compatible: bool = option_field(
        False, "--version-compatible", "Let newer versions of the library load the engine (tensorrt only)."
    )
    refit: bool = option_field(False, "--refit", "Let the engine's weights be replaced; needs a GPU to build.")
    weight_streaming: bool = option_field(
        False, "--weight-streaming", "Let weights stay in host memory while the engine runs."
    )
    ep_context: str | None = option_field(
        None,
        "--ep-context",
        "Write an ONNX file for onnxruntime's TensorRT-RTX provider: embed holds the engine, file has it beside.",
        metavar="MODE",
    )


@dataclass(frozen=True)
class BuildCall(EngineOptions):
    """Arguments of a call of ``build``."""

    onnx_path: Onnx
    engine_path: PathLike
    _: KW_ONLY
    progress: Progress | None = None
    timeout: float | None = None
