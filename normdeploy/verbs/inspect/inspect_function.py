"""What would become of the normalizations of a model; nothing is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...findings.records import Summary
from ...log import log_norms
from ..arguments.argument_validation import take_fields_as_arguments
from ..arguments.model_source import open_onnx_source
from ..inspect.inspect_options import InspectCall
from .norm_census import take_census

if TYPE_CHECKING:
    pass


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
