"""What would become of the normalizations of a model; nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import onnx

from ..arguments import Loading, prepared
from ..log import norms
from ..records import Summary
from ..types import Progress
from ..verbs.inspect import census
from ..verbs.sources import opened

if TYPE_CHECKING:
    from ..arguments import Example
    from ..verbs.sources import Source


@prepared()
def inspect(
    source: Source | onnx.ModelProto,
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    runtime: str = "any",
    fuse: str = "standard",
    explain: str | None = None,
    custom_translation_table: Mapping[Any, Any] | None = None,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> Summary:
    """What ``export`` or ``optimize`` would make of the normalizations of a model, and the runtimes of that; nothing is
    changed or written.

    Args:
        source: an ONNX file or model, or what ``export`` takes.
        args, kwargs, runtime, fuse, custom_translation_table, progress, loading: as for ``export``.
        explain: a tensor, a node or a module path: why it was fused or not is in the result's ``explanations``.

    Raises:
        InputError: nothing in the model is called as ``explain`` says.
        NormdeployError: the model can't be read.
    """
    table = custom_translation_table
    proto, weights, chains = opened(
        source, args, kwargs, loading=loading, custom_translation_table=table, progress=progress
    )
    summary = census(proto, runtime=runtime, fuse=fuse, explain=explain, progress=progress, chains=chains)
    del weights  # which had to live until here
    norms(summary, summary.notes)
    return summary
