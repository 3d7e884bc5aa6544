"""Finds why parity fails: the first wrong tensor, its node, the cause."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, cast

from ..arguments import Loading, Onnx, prepared
from ..errors import InputError
from ..storage.folder import require_empty_dir
from ..types import PathLike, Progress
from ..verbs.bisect.bisect import Bisection
from ..verbs.bisect.bisect import bisect as search
from ..verbs.sources import original
from ..verbs.verify.cases import read
from ..verbs.verify.names import pairs_of
from ..verbs.verify.verify import Inputs
from .common import Stages

if TYPE_CHECKING:
    from ..arguments import Example
    from ..verbs.sources import Source


@prepared(onnx="onnx_path")
def bisect(
    source: Source,
    onnx_path: Onnx = "",
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    output: PathLike | None = None,
    engines: Sequence[PathLike] = (),
    seeds: int = 3,
    feeds: Inputs | None = None,
    map: Sequence[str] | Mapping[str, str] = (),
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> Bisection:
    """Find the first tensor of a file that leaves the bound of ``verify``, the node that makes it so, and why
    (``verbs.bisect.bisect``).

    Args:
        output: a new or empty folder for the smallest failing model, its inputs and a script that shows the error.
        engines: compared too, at their outputs only.
        source, args, kwargs, seeds, feeds, map, progress, loading: as for ``verify``.
        onnx_path: the file; where ``source`` is a result it need not be given.

    Raises:
        NormdeployError: one of ``normdeploy.errors``. A fault is no error but a result that is false.
    """
    stage = Stages(progress)
    if output is not None:
        require_empty_dir(output)
    own, file = None if feeds is None else read(feeds), cast("PathLike", onnx_path)
    if not file:
        raise InputError("no ONNX file was given to look into; give it behind the model")
    with stage("load"):
        model, notes = original(source, [file], args, kwargs, loading)
    with stage("bisect"):
        bisection = search(
            model, file, engines=engines, seeds=seeds, inputs=own, names=pairs_of(map), progress=progress
        )
    if output is not None:
        with stage("write"):
            if bisection.write(output) is None and not bisection:
                notes.append(f"nothing was written to {os.fspath(output)}: no nodes were found that fail by themselves")
    return replace(bisection, notes=(*notes, *bisection.notes))
