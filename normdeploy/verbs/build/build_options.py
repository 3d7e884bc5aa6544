"""Options and arguments of ``build``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InputError
from ...option_values import EngineLibrary, NormImpl
from ...types import PathLike, ProfileRanges, Progress
from ...verb_options import option_field
from .shape_texts import profile_from_shapes

if TYPE_CHECKING:
    from ..arguments.argument_validation import Onnx


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options for the build of an engine."""

    # Options for the target.
    library: str = option_field(
        "tensorrt-rtx",
        "--library",
        "Library that builds the engine and will run it: tensorrt-rtx or tensorrt.",
        metavar="LIBRARY",
        type=EngineLibrary,
    )
    compute_capabilities: Sequence[str] = option_field(
        (),
        "--compute-capability",
        "Compute capabilities of the GPUs to build for, separated by spaces, such as --compute-capability 8.6 8.9 12.0"
        " (tensorrt-rtx only). Default: all.",
        metavar="X.Y ...",
        type=list[str] | None,
    )
    profiles: ProfileRanges = option_field(
        (),
        "--profile",
        "Smallest, usual and largest size of a dynamic dim (batch=1:8:64) or shape of an input (ids=1x8:4x64:64x512)."
        " Repeatable.",
        metavar="NAME=MIN:OPT:MAX",
        type=list[str] | None,
    )
    min_shapes: str | Sequence[str] = option_field(
        (),
        "--minShapes",
        "Smallest shapes of inputs, in trtexec's spelling: a profile for those who know trtexec. Pass it together with"
        " --optShapes and --maxShapes. Separate several inputs by commas.",
        metavar="NAME:1x3x224x224",
        type=list[str] | None,
    )
    opt_shapes: str | Sequence[str] = option_field(
        (),
        "--optShapes",
        "Usual shapes of inputs. Alone, also the smallest and largest shapes, as in trtexec.",
        metavar="NAME:8x3x224x224",
        type=list[str] | None,
    )
    max_shapes: str | Sequence[str] = option_field(
        (),
        "--maxShapes",
        "Largest shapes of inputs.",
        metavar="NAME:32x3x224x224",
        type=list[str] | None,
    )
    norm_impl: str = option_field(
        "native",
        "--norm-impl",
        "native: norms run in TensorRT's own layers. plugin: norms run in normdeploy's kernels, which are embedded in"
        " the engine (tensorrt only). auto: normdeploy's kernels run only the norms for which TensorRT has no layer.",
        metavar="FORM",
        type=NormImpl,
    )
    more_profiles: Sequence[ProfileRanges] = option_field(
        (),
        "--add-profile",
        "Additional optimization profile: ranges as for --profile, separated by commas. Repeatable.",
        metavar="RANGE[,RANGE]",
        type=list[str] | None,
    )

    # Options for the duration and the memory of the build.
    timing_cache: PathLike | None = option_field(
        None,
        "--timing-cache",
        "File of kernel timings to read and update. Parallel builds can share the file (tensorrt only).",
        metavar="FILE",
        type=Path | None,
    )
    workspace: int | str | None = option_field(
        None,
        "--workspace",
        "Memory limit for the work space of each layer, in bytes or as 512M or 2G.",
        metavar="SIZE",
        type=str | None,
    )
    optimization_level: int | None = option_field(
        None,
        "--optimization-level",
        "How long the builder searches for faster kernels, from 0 (shortest) to 5 (longest).",
        metavar="N",
    )

    # Options that give the engine abilities.
    hardware_compatibility: str | None = option_field(
        None,
        "--hardware-compat",
        "Other kinds of GPUs that can run the engine: ampere-plus or same-compute-capability (tensorrt only). Default:"
        " none.",
        metavar="LEVEL",
    )
    version_compatible: bool = option_field(
        False, "--version-compatible", "Allow newer versions of the runtime to load the engine (tensorrt only)."
    )
    refit: bool = option_field(
        False, "--refit", "Allow the weights in the engine to be replaced later. A build with --refit needs a GPU."
    )
    weight_streaming: bool = option_field(
        False, "--weight-streaming", "Allow weights to stay in host memory while the engine runs."
    )
    ep_context: str | None = option_field(
        None,
        "--ep-context",
        "Write an ONNX file for onnxruntime's TensorRT-RTX provider. embed: the ONNX file contains the engine. file:"
        " the engine is a separate file in the same folder.",
        metavar="MODE",
    )


@dataclass(frozen=True, kw_only=True)
class TrtexecOption:
    """Option of the command line that prints another command instead of building."""

    print_trtexec: bool = option_field(
        False,
        "--print-trtexec",
        "Build nothing. Print the lines of trtexec that build the same engine with TensorRT 10, with TensorRT 11 and in"
        " Triton's container.",
    )


@dataclass(frozen=True)
class BuildCall(EngineOptions):
    """Arguments of a call of ``build``."""

    onnx_path: Onnx
    engine_path: PathLike
    _: KW_ONLY
    progress: Progress | None = None
    timeout: float | None = None

    @property
    def first_profile(self) -> ProfileRanges:
        """Return the ranges of the first profile.

        Returns:
            ``profiles``, or the ranges that ``min_shapes``, ``opt_shapes`` and ``max_shapes`` state.

        Raises:
            InputError: both are given, or the shapes can't be read.
        """
        ranges = profile_from_shapes(*map(_as_texts, (self.min_shapes, self.opt_shapes, self.max_shapes)))
        if ranges and self.profiles:
            raise InputError(
                "--minShapes, --optShapes and --maxShapes state the same profile as --profile (in Python profiles);"
                " pass one of them"
            )
        return ranges or self.profiles


def _as_texts(value: str | Sequence[str]) -> Sequence[str]:
    if isinstance(value, str):
        return (value,)
    return value
