"""Options and arguments of ``inspect``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from ...types import Progress
from ...verb_options import ConversionOptions, LoadingOptions, option_field, repeat_option_field

if TYPE_CHECKING:
    import onnx

    from ..arguments.argument_validation import Example
    from ..arguments.model_source import Source


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of ``inspect``."""

    runtime: str = repeat_option_field(ConversionOptions, "runtime")
    fuse: str = repeat_option_field(ConversionOptions, "fuse")
    explain: str | None = option_field(
        None,
        "--explain",
        "Name of a tensor, node or module. The output explains why the norm there would be fused or not.",
        metavar="NAME",
    )


@dataclass(frozen=True)
class InspectCall(InspectOptions, LoadingOptions):
    """Arguments of a call of ``inspect``."""

    source: Source | onnx.ModelProto
    args: Example = ()
    kwargs: Mapping[str, Any] | None = None
    _: KW_ONLY
    custom_translation_table: Mapping[Any, Any] | None = None
    progress: Progress | None = None
