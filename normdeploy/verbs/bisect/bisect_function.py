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
    """Find the first tensor of a file that exceeds the allowed error of ``verify``, the node at fault, and the cause.

    ``verbs.bisect.file_bisection`` describes the search.

    Args:
        output: a new or empty folder for the smallest failing model, its inputs and a script that shows the error.
        engines: engines that are also compared. Only their outputs are compared.
        source: the reference: a model as for ``verify``, or a correct ONNX file, model in memory or session.
        args, kwargs, seeds, feeds, max_elements, max_seconds, max_memory, tolerance, metric, policy, also_default,
            dataset, labels, normalize, input_layout, input_type, map, runners, progress, and the loading options: as
            for ``verify``.
        onnx_path: the file. It can be omitted if ``source`` is a result of ``export``.

    Returns:
        The faults with their nodes and causes, and the comparison of ``verify``. The result is true if nothing exceeds
        the allowed error.

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
        model, notes = load_original(
            call.source, [file], call.args, call.kwargs, call.load_keywords, own_code=rules.runs_own_code, images=call
        )
    with stage("bisect"):
        bisection = search(model, file, engines=call.engines, progress=call.progress, **rules.as_keywords(model))
    if call.output is not None:
        with stage("write"):
            if bisection.write(call.output) is None and not bisection:
                notes.append(f"nothing was written to {os.fspath(call.output)}: no nodes fail by themselves")
    return replace(bisection, notes=(*notes, *bisection.notes))
