"""Find why a comparison fails: the first wrong tensor, its node and the cause."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import cast

from ...errors import InputError
from ...storage.folder_replacement import require_empty_dir
from ...types import PathLike
from ..arguments.argument_validation import take_fields_as_arguments
from ..stage_progress import StageTimer, describe_loading
from ..verify.comparison_settings import ComparisonSettings
from ..verify.compute_budget import ComparisonBudget
from ..verify.reference_loading import load_original
from .bisect_options import BisectCall
from .file_bisection import Bisection
from .file_bisection import search_faults as search


@take_fields_as_arguments(BisectCall, onnx="onnx_path")
def bisect(call: BisectCall) -> Bisection:
    """Find the first tensor of a file that leaves the bound of ``verify``, the node that makes it wrong, and the cause
    (``verbs.bisect.file_bisection``).

    Args:
        output: a new or empty folder for the smallest failing model, its inputs and a script that shows the error.
        engines: engines that are also compared, only at their outputs.
        source: the model as for ``verify``, or a correct ONNX file, onnx.ModelProto or session.
        args, kwargs, seeds, feeds, max_elements, max_seconds, max_memory, tolerance, metric, policy, also_default,
            dataset, labels, map, runners, progress, and how the model is loaded: as for ``verify``.
        onnx_path: the file; may be left out if ``source`` is a result of ``export``.

    Returns:
        The faults with their nodes and causes, and the comparison of ``verify``; true if nothing leaves the bound.

    Raises:
        NormdeployError: one of ``normdeploy.errors``. A fault raises nothing; it makes the result false.
    """
    stage = StageTimer(call.progress)
    if call.output is not None:
        require_empty_dir(call.output)
    file = cast("PathLike", call.onnx_path)
    if not file:
        raise InputError("no ONNX file to search; pass it after the model")
    rules = ComparisonSettings.from_options(call, ComparisonBudget(call.max_seconds, call.max_memory), call.runners)
    with stage("load", describe_loading(call.source)):
        model, notes = load_original(call.source, [file], call.args, call.kwargs, call.load_keywords)
    with stage("bisect"):
        bisection = search(model, file, engines=call.engines, progress=call.progress, **rules.as_keywords(model))
    if call.output is not None:
        with stage("write"):
            if bisection.write(call.output) is None and not bisection:
                notes.append(f"nothing was written to {os.fspath(call.output)}: no nodes fail by themselves")
    return replace(bisection, notes=(*notes, *bisection.notes))
