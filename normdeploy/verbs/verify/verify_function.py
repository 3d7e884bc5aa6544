"""Compares files with a PyTorch model, or with an ONNX one, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from ...model import LoadedModel
from ...types import PathLike
from ..arguments.argument_validation import take_fields_as_arguments
from ..arguments.model_source import is_live_module
from ..stage_progress import StageTimer
from . import file_comparison as compare
from .comparison_result import Comparison
from .comparison_settings import ComparisonSettings
from .compute_budget import ComparisonBudget, processor_time
from .reference_loading import load_original
from .trace_check import compare_with_trace
from .verify_options import VerifyCall


@take_fields_as_arguments(VerifyCall, onnx="files")
def verify(call: VerifyCall) -> Comparison:
    """Compare what the runtimes make of files with a PyTorch model in float64, or an ONNX one (the rule:
    ``normdeploy.verbs.verify.file_comparison``).

    How the model is to be loaded need not be said again where ``export`` recorded it; what may run code, only where
    this user or a team signed it for this very model file (docs/teams.md).

    Args:
        source: the model file or folder, the live module or program; or the result of ``export``, which stands for what
            it was made from, with its arguments and options, and is itself the first of the files; or an ONNX file, an
            onnx.ModelProto with its weights, or an onnxruntime.InferenceSession, whose nodes in float64 are the
            reference then (inputs and dims say its sizes).
        files: what ``export``, ``optimize`` and ``build`` made of it, told apart by content, and models
            in memory; engines are run where a GPU is.
        args, kwargs: example arguments of a live module.
        engines: more files.
        seeds: random inputs at the usual sizes, besides those at other sizes, small ones and zeros.
        feeds: own inputs, name -> array or an .npz file, one or several; only these are run then.
        drift: also compare the inner tensors of ONNX files, one case each, with the model's; it takes two to three
        times as long.
        max_elements: of the largest generated input; None: 8 times those at the usual sizes. Where the model takes
            larger sizes, the result's ``up_to`` says how far it goes.
        max_seconds: of processor time; half is for the model in float64. One input is run whatever it takes.
        max_memory: bytes for the tensors inside the model; sizes that take more are left out.
        tolerance: "ABS:REL" for every output, {"logits": "1e-3:1e-2"} or ["logits=1e-3:1e-2"] for one: |value −
            reference| ≤ ABS + REL · |reference| for each element decides in the place of the default rule, which the
            result's ``standard`` says.
        metric: "cosine>=0.995" for every output, {"logits": "top1>=0.99"} or ["logits=top1>=0.99"] for one
        (``normdeploy.compare.metrics``).
        policy: a file of such rules (``normdeploy.verbs.verify.policy_file``); what is given here goes before what it
        says.
        also_default: the default rule must hold beside the rules given.
        dataset: samples that metrics are measured on: an .npz file, a folder of these, or a Hugging Face dataset on
        disk.
        labels: the dataset's array or column of right classes, whole numbers [samples], for "accuracy_drop<=0.01" and
        "accuracy5_drop".
        map: an input or output of a file -> the model's, where names differ and their order does not tell.
        runners: runtimes that installed packages bring (`normdeploy.runtimes.third_party_runner`), by name, in which
        ONNX files are
            run too.
        progress: called with (stage, done, total); total is 0 where it is not known.
        model, model_args, key, trust, imports, inputs, dims, eval, task, part, dynamic_shapes, code: as for ``export``.

    Raises:
        NormdeployError: one of ``normdeploy.errors``. A candidate that is wrong is no error but a result that is false.
    """
    # Loading and tracing a module can take as long as the comparison.
    begun = processor_time()
    stage = StageTimer(call.progress)
    budget = ComparisonBudget(call.max_seconds, call.max_memory, begun=begun)
    # Models in memory have become files.
    every = [*cast("Sequence[PathLike]", call.files), *call.engines]
    rules = ComparisonSettings.from_options(call, budget, call.runners)
    with stage("load"):
        model, notes = load_original(call.source, every, call.args, call.kwargs, call.load_keywords)
    with stage("verify"):
        comparison = compare.compare_files(
            model, every, drift=call.drift, progress=call.progress, **rules.as_keywords(model)
        )
    if is_live_module(call.source) and isinstance(model, LoadedModel):
        clock = budget.start_clock()
        with stage("trace"):
            beside = compare_with_trace(cast("Any", call.source), model, clock)
        notes += [*filter(None, [beside.note]), *clock.describe_left_out()]
        limits = dict.fromkeys((*comparison.limits, *clock.describe_limits()))
        comparison = replace(comparison, trace=beside.difference or "", limits=tuple(limits))
    return replace(comparison, notes=tuple(dict.fromkeys((*notes, *comparison.notes))))
