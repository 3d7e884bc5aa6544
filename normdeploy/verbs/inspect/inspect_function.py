"""Report how the normalizations of a model would be rewritten, without changing the model."""

from __future__ import annotations

from ...findings.records import Summary
from ...log import log_norms
from ..arguments.argument_validation import take_fields_as_arguments
from ..arguments.model_source import open_onnx_source
from ..inspect.inspect_options import InspectCall
from .norm_census import take_census


@take_fields_as_arguments(InspectCall)
def inspect(call: InspectCall) -> Summary:
    """Report how ``export`` or ``optimize`` would rewrite the normalizations of a model.

    The report also says how each runtime would run the result. Nothing is changed or written.

    Args:
        source: an ONNX file, a model in memory as for ``optimize``, or a source as for ``export``.
        args, kwargs, runtime, fuse, custom_translation_table, progress, and the loading options: as for ``export``.
        explain: name of a tensor, a node or a module. The result's ``explanations`` then say why the nodes of the
            norm at this name would be fused or not.

    Returns:
        A finding for each norm, with the support of each installed runtime. With ``explain``, the result has
        explanations instead, and the runtimes are not queried.

    Raises:
        InputError: nothing in the model has the name ``explain``.
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
    # The census reads the weights through references, so the weights must not be freed earlier.
    del weights
    log_norms(summary, summary.notes)
    return summary
