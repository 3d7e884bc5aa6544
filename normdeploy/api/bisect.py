"""Finds why parity fails: the first wrong tensor, its node, the cause."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, cast

import onnx

from ..arguments import Loading, Onnx, prepared
from ..errors import InputError
from ..storage.folder import require_empty_dir
from ..types import PathLike, Progress
from ..verbs.bisect.bisect import Bisection
from ..verbs.bisect.bisect import bisect as search
from ..verbs.sources import original
from ..verbs.verify.cases import Inputs
from ..verbs.verify.policy import Thresholds, Tolerances
from ..verbs.verify.spending import Budget
from .common import Stages
from .comparing import Comparing

if TYPE_CHECKING:
    from ..arguments import Example
    from ..verbs.sources import Source


@prepared(onnx="onnx_path")
def bisect(
    source: Source | onnx.ModelProto | Any,
    onnx_path: Onnx = "",
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    output: PathLike | None = None,
    engines: Sequence[PathLike] = (),
    seeds: int = 3,
    feeds: Inputs | None = None,
    max_elements: int | None = None,
    max_seconds: float = Budget.seconds,
    max_memory: int = Budget.memory,
    tolerance: Tolerances | None = None,
    metric: Thresholds | None = None,
    policy: PathLike | None = None,
    also_default: bool = False,
    dataset: PathLike | None = None,
    labels: str | None = None,
    map: Sequence[str] | Mapping[str, str] = (),
    runners: Sequence[str] = (),
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> Bisection:
    """Find the first tensor of a file that leaves the bound of ``verify``, the node that makes it so, and why
    (``verbs.bisect.bisect``).

    Args:
        output: a new or empty folder for the smallest failing model, its inputs and a script that shows the error.
        engines: compared too, at their outputs only.
        source: the model as for ``verify``, or an ONNX file, an onnx.ModelProto or a session that is right.
        args, kwargs, seeds, feeds, max_elements, max_seconds, max_memory, tolerance, metric, policy, also_default,
        dataset, labels, map, runners, progress, loading: as for ``verify``.
        onnx_path: the file; where ``source`` is a result it need not be given.

    Raises:
        NormdeployError: one of ``normdeploy.errors``. A fault is no error but a result that is false.
    """
    stage = Stages(progress)
    if output is not None:
        require_empty_dir(output)
    file = cast("PathLike", onnx_path)
    if not file:
        raise InputError("no ONNX file was given to look into; give it behind the model")
    rules = Comparing.of(
        seeds=seeds,
        feeds=feeds,
        max_elements=max_elements,
        budget=Budget(max_seconds, max_memory),
        tolerance=tolerance,
        metric=metric,
        policy=policy,
        also_default=also_default,
        dataset=dataset,
        labels=labels,
        map=map,
        runners=runners,
    )
    with stage("load"):
        model, notes = original(source, [file], args, kwargs, loading)
    with stage("bisect"):
        bisection = search(model, file, engines=engines, progress=progress, **rules.keywords(model))
    if output is not None:
        with stage("write"):
            if bisection.write(output) is None and not bisection:
                notes.append(f"nothing was written to {os.fspath(output)}: no nodes were found that fail by themselves")
    return replace(bisection, notes=(*notes, *bisection.notes))
