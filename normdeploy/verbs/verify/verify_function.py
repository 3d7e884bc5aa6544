"""Compare files with a PyTorch or ONNX model in float64."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import onnx

from ...model import LoadedModel
from ...types import PathLike
from ..arguments.argument_validation import take_fields_as_arguments
from ..arguments.model_source import is_live_module
from ..stage_progress import StageTimer, describe_loading
from . import file_comparison as compare
from .comparison_result import Comparison
from .comparison_settings import ComparisonSettings
from .compute_budget import ComparisonBudget, processor_time
from .folder_generation import generate_from_folder
from .function_proof import FunctionProof, prove_against_reference
from .io_matching import parse_map
from .reference_loading import load_original
from .reference_models import FileModel
from .trace_check import compare_with_trace
from .verify_options import VerifyCall


@take_fields_as_arguments(VerifyCall, onnx="files")
def verify(call: VerifyCall) -> Comparison:
    """Compare the outputs of files in each runtime with a PyTorch or ONNX model in float64.

    ``normdeploy.verbs.verify.file_comparison`` documents the rule. Loading options that ``export`` recorded need not be
    given again. Recorded options that may run code are followed only if this user or a team signed them for exactly
    this model file (docs/reference/teams.md).

    Args:
        source: the model file or folder, a live module, or an exported program. For a result of ``export``, the file of
            the result is the first of the compared files, and the exported model is the reference, with its arguments
            and options. An ONNX file, a model in memory as for ``optimize``, or an onnxruntime.InferenceSession can
            also be the reference; it is evaluated in float64 (``inputs`` and ``dims`` give its sizes).
        files: outputs of ``export``, ``optimize`` and ``build``, distinguished by content, and models in memory.
            Engines run only on a machine with a GPU.
        args, kwargs: example arguments of a live module.
        engines: more files, compared like ``files``.
        seeds: number of random inputs at the usual sizes, in addition to inputs of other sizes, of small numbers and of
            zeros.
        feeds: one or several inputs, each name -> array or an .npz file. They replace the generated inputs.
        drift: also compare the inner tensors of each ONNX file with the model's, on one input case. The comparison then
            takes two to three times as long.
        max_elements: limit on the elements of the largest generated input; None: 8 times the elements at the usual
            sizes. If the model accepts larger inputs, ``up_to`` of the result is this limit; otherwise it is None.
        max_seconds: limit on processor time; half is for the model in float64. One input always runs, even beyond the
            limit.
        max_memory: limit in bytes on the tensors inside the model; sizes that take more are left out.
        tolerance: "ABS:REL" for every output, {"logits": "1e-3:1e-2"} or ["logits=1e-3:1e-2"] for one output. Each
            element must satisfy |value − reference| ≤ ABS + REL · |reference|. This replaces the default rule.
            ``standard`` of the result says whether the default rule holds too.
        atol, rtol: the same rule for every output, as for numpy.allclose. If only one is given, the other is 0.
        metric: "cosine>=0.995" for every output, {"logits": "top1>=0.99"} or ["logits=top1>=0.99"] for one output
            (``normdeploy.compare.metrics``). "package.module:function>=0.9" calls a function of your own with
            the outputs and the reference of all inputs, joined along their first axis; it needs ``trust``.
        generate: number of tokens that each file generates after prompts, greedily and with its cache, in addition to
            the comparison of its outputs. Each step is compared with eager mode (``generation_check``). The model must
            be a Hugging Face folder of a decoder. ``feeds`` gives the prompts (``input_ids``, ``attention_mask``).
        prove: also try to prove that each ONNX file is the same function as an ONNX reference. A proof takes at most a
            quarter of ``max_seconds``, in addition. It changes the words of the verdict, but not the verdict.
        policy: a file of such rules (``normdeploy.verbs.verify.policy_file``). Arguments override it.
        also_default: the default rule must hold in addition to the given rules.
        dataset: samples on which metrics are measured: an .npz file, a folder of .npz files, or a Hugging Face dataset
            on disk.
        preprocess: config of a preprocessing, "MODULE:FUNCTION" or a function. ``dataset`` is then a folder of files,
            each of which becomes one sample (``normdeploy.inputs.image_preprocessing``).
        labels: the dataset's array or column of right classes, whole numbers [samples], for "accuracy_drop<=0.01" and
            "accuracy5_drop".
        normalize, input_layout, input_type: images that the files take, as for ``export``. The model prepares them in
            the same way. None are needed if the files state their images, but then the verdict depends on this claim.
        map: the file's name of an input or output -> the model's name. It is needed if names differ and can't be
            matched by order.
        runners: names of runtimes that also run ONNX files: "openvino", "openvino-bf16", "openvino-fp16",
            "onnxruntime-web", or the runtime of an installed package (`normdeploy.runtimes.third_party_runner`).
        progress: called with (stage, done, total); total is 0 if it is unknown.
        model, model_args, key, trust, imports, inputs, dims, eval, task, part, dynamic_shapes, code: as for ``export``.

    Returns:
        the comparison. It is true if each ONNX file ran in some runtime and every output and weight passes
        (``Comparison.ok``).

    Raises:
        NormdeployError: an error of ``normdeploy.errors``. A wrong file gives a false result, not an error.
    """
    # The time is counted from here, because loading and tracing a module can take as long as the comparison.
    begun = processor_time()
    stage = StageTimer(call.progress)
    budget = ComparisonBudget(call.max_seconds, call.max_memory, begun=begun)
    # ``take_fields_as_arguments`` has written models in memory to files.
    every = [*cast("Sequence[PathLike]", call.files), *call.engines]
    rules = ComparisonSettings.from_options(call, budget, call.runners)
    generation = None
    if call.generate is not None:
        # Tokens are compared first, because most wrong arguments show in this step.
        start = processor_time()
        with stage("generate"):
            generation = generate_from_folder(call, rules.inputs, every)
        # The tokens have a budget of their own, so their time does not shorten the comparison.
        begun += processor_time() - start
        budget = replace(budget, begun=begun)
        rules = replace(rules, budget=budget)
    with stage("load", describe_loading(call.source)):
        model, notes = load_original(
            call.source, every, call.args, call.kwargs, call.load_keywords, own_code=rules.runs_own_code, images=call
        )
    proofs: tuple[FunctionProof, ...] = ()
    is_onnx = isinstance(call.source, str | os.PathLike | onnx.ModelProto) and not isinstance(model, LoadedModel)
    if call.prove and is_onnx:
        start = processor_time()
        with stage("prove"):
            names = parse_map(rules.names, model) if rules.names else {}
            reference = model.proto if isinstance(model, FileModel) and model.images else call.source
            proofs = prove_against_reference(reference, every, names, call.max_seconds, call.max_memory)
        # The proofs have a time limit of their own too.
        begun += processor_time() - start
        budget = replace(budget, begun=begun)
        rules = replace(rules, budget=budget)
    with stage("verify"):
        comparison = compare.compare_files(
            model, every, drift=call.drift, progress=call.progress, **rules.as_keywords(model)
        )
    if is_live_module(call.source) and isinstance(model, LoadedModel):
        clock = budget.start_clock()
        with stage("trace"):
            beside = compare_with_trace(cast("Any", call.source), model.unprepared or model, clock)
        notes += [*filter(None, [beside.note]), *clock.describe_left_out()]
        limits = dict.fromkeys((*comparison.limits, *clock.describe_limits()))
        comparison = replace(comparison, trace=beside.difference or "", limits=tuple(limits))
    merged = tuple(dict.fromkeys((*notes, *comparison.notes)))
    return replace(comparison, notes=merged, generation=generation, proofs=proofs)
