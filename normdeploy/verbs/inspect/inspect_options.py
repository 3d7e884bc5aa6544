"""Options and arguments of ``inspect``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from ...option_values import Fuse, Runtime
from ...types import Progress
from ...verb_options import LoadingOptions, option_field

if TYPE_CHECKING:
    from ..arguments.argument_validation import Example, Onnx
    from ..arguments.model_source import Source


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of ``inspect``."""

    runtime: str = option_field(
        "any",
        "--runtime",
        "Show the rewrites that export and optimize make for this runtime: any, onnxruntime, onnxruntime-accurate,"
        " openvino, tensorrt or tensorrt-rtx.",
        metavar="RUNTIME",
        type=Runtime,
    )
    fuse: str = option_field(
        "standard",
        "--fuse",
        "Show the rewrites that export and optimize make with this --fuse. portable: norms that have no standard op,"
        " and group norms, become normdeploy's own ops. standard: only ONNX's standard ops are written.",
        type=Fuse,
    )
    explain: str | None = option_field(
        None,
        "--explain",
        "Name of a tensor, node or module. The output explains why the norm at this tensor, node or module would be"
        " fused or not.",
        metavar="NAME",
    )


@dataclass(frozen=True)
class InspectCall(InspectOptions, LoadingOptions):
    """Arguments of a call of ``inspect``."""

    source: Source | Onnx
    args: Example = ()
    kwargs: Mapping[str, Any] | None = None
    _: KW_ONLY
    custom_translation_table: Mapping[Any, Any] | None = None
    progress: Progress | None = None
