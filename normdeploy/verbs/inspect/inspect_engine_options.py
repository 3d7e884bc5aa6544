"""Options and arguments of ``inspect_engine``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from ...types import PathLike, Progress
from ...verb_options import option_field


@dataclass(frozen=True, kw_only=True)
class InspectEngineOptions:
    """Options of ``inspect`` for the layers of an engine."""

    onnx_files: PathLike | Sequence[PathLike] = option_field(
        (),
        "--onnx",
        "For the layers of an engine: ONNX file that the engine was built from. Without it, norms are guessed from"
        " names. For two engines, repeat the option if they were built from two files.",
        metavar="MODEL.onnx",
        type=list[Path] | None,
    )
    profile_json: PathLike | Sequence[PathLike] = option_field(
        (),
        "--profile-json",
        "For the layers of an engine: times of the layers, as trtexec writes them with --exportProfile. For two"
        " engines, repeat the option.",
        metavar="PROFILE.json",
        type=list[Path] | None,
    )
    node_data: PathLike | None = option_field(
        None,
        "--node-data",
        "For the layers of an engine: also write the time of each ONNX node's layer as node data of Model Explorer.",
        metavar="FILE.json",
        type=Path | None,
    )


@dataclass(frozen=True)
class InspectEngineCall(InspectEngineOptions):
    """Arguments of a call of ``inspect_engine``."""

    layer_info: PathLike
    other: PathLike | None = None
    _: KW_ONLY
    progress: Progress | None = None
