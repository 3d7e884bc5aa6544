"""What would become of the normalizations of a model; nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import onnx

from ...findings.records import Summary
from ...log import log_norms
from ...types import Progress
from ...verb_options import InspectOptions, LoadingOptions
from ..arguments.argument_validation import take_fields_as_arguments
from ..arguments.model_source import open_onnx_source
from .norm_census import take_census

if TYPE_CHECKING:
    from ..arguments.argument_validation import Example
    from ..arguments.model_source import Source


@dataclass(frozen=True)
class InspectCall(InspectOptions, LoadingOptions):
    """What ``inspect`` is called with."""

    source: Source | onnx.ModelProto
    args: Example = ()
    kwargs: Mapping[str, Any] | None = None
    _: KW_ONLY
    custom_translation_table: Mapping[Any, Any] | None = None
    progress: Progress | None = None


@take_fields_as_arguments(InspectCall)
def inspect(call: InspectCall) -> Summary:
    """What ``export`` or ``optimize`` would make of the normalizations of a model, and the runtimes of that; nothing is
    changed or written.

    Args:
        source: an ONNX file or model, or what ``export`` takes.
        args, kwargs, runtime, fuse, custom_translation_table, progress, and how the model is loaded: as for ``export``.
        explain: a tensor, a node or a module path: why it was fused or not is in the result's ``explanations``.

    Raises:
        InputError: nothing in the model is called as ``explain`` says.
        NormdeployError: the model can't be read.
    """
    proto, weights, chains = open_onnx_source(
        call.source,
        call.args,
        call.kwargs,
        loading=call.load_keywords,
        custom_translation_table=call.custom_translation_table,
        progress=call.progress,
    )
    summary = take_census(
        proto, runtime=call.runtime, fuse=call.fuse, explain=call.explain, progress=call.progress, chains=chains
    )
    # They had to live until here.
    del weights
    log_norms(summary, summary.notes)
    return summary
