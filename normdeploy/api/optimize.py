"""An ONNX file from anywhere: every normalization fused or folded, and the rest cleaned up."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import onnx

from .. import ranges, runnable
from ..arguments import Onnx, check_output, prepared
from ..choices import TENSORRT
from ..errors import GraphError
from ..file_inputs import file_inputs
from ..graphs import simplify as cleaner
from ..graphs.inference import drop_contradictions
from ..log import norms
from ..precision import precision as half
from ..proof.reshapes import resolve_reshapes
from ..results import ExportResult, Origin
from ..rewriting import int32_codes, rewrite, whole
from ..rewriting.ledger import Wanted
from ..storage import signing
from ..storage.files import filled, load_onnx, opened_model, save_onnx
from ..storage.record import amend, content_of, recorded, runs_code
from ..storage.weights import lifted
from ..types import PathLike, Progress
from ..verbs.verify.policy import Thresholds
from .common import NOT_MEASURED, Calibration, Stages, compared, samples_of, target_of
from .quantizing import calibrating, joined, judged_in_half, quantized_file, wish_of


@prepared()
def optimize(
    source: Onnx,
    output: PathLike | None = None,
    *,
    runtime: str = "any",
    provider: str = "cpu",
    fuse: str = "standard",
    strict: bool = False,
    strict_proof: bool = False,
    precision: str | None = None,
    calibrate: Calibration = (),
    keep_io: bool = False,
    quantize: str | None = None,
    calibration: str | None = None,
    metric: Thresholds | None = None,
    dynamic: bool = False,
    rotate: bool = False,
    keep_float: Sequence[str] = (),
    compare_limit: int = whole.LIMIT,
    simplify: bool = True,
    dims: Sequence[str] = (),
    stated_inputs: Sequence[str] = (),
    progress: Progress | None = None,
) -> ExportResult:
    """Fuse and fold the normalizations of an ONNX model from anywhere, and clean up the rest.

    Args:
        source: a file, a model with its weights loaded, or what ``export`` gave; none is changed.
        output: where to write the result.
        runtime: which of equal standard forms to write: "any", "onnxruntime", "onnxruntime-accurate", "tensorrt" or
        "tensorrt-rtx".
        provider: of onnxruntime, "cpu" or "cuda": what runs best there (of cuda by its documents, not measured).
        fuse: "standard", or "portable": this project's own ops with function bodies where no standard one says a norm.
        strict: a failed certificate is an error; otherwise its rewrite is undone and reported.
        strict_proof: a rewrite is an error whose certificate is not exact, or that makes NaN of a number at an infinite
        input.
        precision, calibrate, keep_io, quantize, calibration, metric, dynamic, rotate, keep_float, compare_limit: as
            for ``export``. Inputs are generated from what ``export`` recorded in the file, if it did.
        simplify: constants are computed, duplicates and dead ends removed, shapes resolved
            (`normdeploy.graphs.simplify`), where the result can be compared with the model; else norms alone are
            touched.
        dims: ranges of dynamic dims, ``batch=1:8:64`` (min:opt:max), which the result records for ``run``, ``bench``,
            ``build`` and ``package``; those of the others must be recorded already, or follow from a table that
            positions along them index.
        stated_inputs: sizes and values of inputs, ``ids:int64[batch,seq]{0:30522}``; or values alone, ``sr=16000``,
            ``ids=0:30522`` or ``ids=samples.npy``, whose range is taken. The whole model is compared on them, and
            half precision and quantization generate them.
        progress: called with (stage, done, total); total is 0 where it is not known.

    Raises:
        GraphError: the file is broken or no ONNX; or onnxruntime can't load it, ``runtime`` names no TensorRT, and more
            is missing than another library's ops or, without a stated runtime, kernels of the CPU; or it loads the file
            and runs it on no values of its inputs.
        InputError: the inputs for calibration or the dims do not fit.
        CertificateError: with ``strict``, where a certificate failed.
        NormdeployError: ``output`` is ``source``, or can't be written.
    """
    stage = Stages(progress)
    if output is not None:
        check_output(output, source)
    signing.check(output)
    target = target_of(runtime, provider)
    wish = wish_of(quantize, target, calibration, metric, calibrate, precision, dynamic, rotate, keep_float)
    samples = samples_of(calibrate if wish is None else (), precision, keep_io)
    with stage("load"):
        read = (
            partial(opened_model, source)
            if isinstance(source, onnx.ModelProto)
            else partial(load_onnx, cast("PathLike", source))
        )
        proto, weights = lifted(read())
        contradictions = drop_contradictions(proto)
        first = fuse if wish is None else "standard"  # of a quantized file `joined` writes the ops that are joined
        wanted = Wanted(
            target,
            first,
            attentions=precision is None,
            rows=not dynamic,
            partial=wish is None or wish.activation is None,
            progress=progress,
            weights=weights,
        )
        signed = _signed(proto, source)
        try:
            inputs = recorded(proto).get("inputs", ())
        except GraphError:  # a stranger's, or a newer version's: it matters to half precision and to ranges alone
            if precision is not None or dims:
                raise
            inputs = ()
        inputs, hints = ranges.described(proto, inputs, dims)
        if stated_inputs:
            label = Path(source).name if isinstance(source, str | os.PathLike) else proto.graph.name or "the model"
            inputs = file_inputs(proto, stated_inputs, dims, label, inputs).specs
    codes = int32_codes.count(proto) if runtime in TENSORRT else 0
    with stage("norms"):
        before = proto if whole.weight(proto) <= compare_limit else None
        proto, summary, taken = rewrite.optimized(proto, wanted, strict)
    with stage("simplify"):
        tidy = (
            partial(cleaner.simplify, first=resolve_reshapes) if simplify and before is not None else cleaner.Simplified
        )
        tidied = tidy(proto)
    with stage("compare"):
        made = (tidied.proto, summary, taken)
        (tidy_proto, summary, _), notes, ran = compared(
            before, inputs, wanted, made, strict, lambda plain: tidy(plain).proto
        )
        if ran:
            proto = tidy_proto
            notes += [tidied.note] if tidied.note else []
        else:
            notes += ["the graph was not cleaned up: nothing says that it would stay the same"] if simplify else []
            runnable.require_optimized(proto, read, runtime, provider, runs=before is not None)
    summary = replace(summary, nodes_after=len(proto.graph.node), ops_after=rewrite.op_counts(proto))
    if codes and (written := codes - int32_codes.count(proto)):
        hints.append(f"{written} constants stored as int32, which TensorRT refuses, are float32 now: the same numbers")
    hints += [f"the file states what its nodes contradict: {each}" for each in contradictions]
    notes = [*hints, *notes, *([NOT_MEASURED] if provider == "cuda" else [])]
    if strict_proof:
        rewrite.require_exact(summary.findings)
    plain, quantization, floats = proto, None, inputs
    if wish is not None:
        with stage("quantize"):
            proto, quantization = quantized_file(filled(proto), wish, calibrate, inputs, progress)
        if fuse == "portable":
            with stage("join"):
                own = Wanted(target, fuse, attentions=False, rows=False, progress=progress)
                proto, summary, more = joined(proto, summary, inputs, own, strict)
                notes += more
        ops = rewrite.op_counts(proto)
        summary = replace(summary, opset=half.opset_of(proto), nodes_after=len(proto.graph.node), ops_after=ops)
    account = None
    if precision is not None:
        if wish is not None and calibrate:
            samples = calibrating(calibrate, plain, floats)
        with stage("precision"):
            proto, account = half.converted(
                filled(proto), precision, samples, inputs=inputs, keep_io=keep_io, progress=progress
            )
            if ran and runtime not in TENSORRT:
                runnable.require_half(proto, [], precision)
        inputs = half.recast(inputs, account)
        ops = rewrite.op_counts(proto)
        summary = replace(summary, opset=half.opset_of(proto), nodes_after=len(proto.graph.node), ops_after=ops)
        if wish is not None and quantization is not None:
            with stage("judge"):
                quantization = judged_in_half(proto, filled(plain), quantization, wish, calibrate, floats, progress)
    if dims:
        ranges.name_dims(proto)
    if dims or (account is not None and recorded(proto)):
        amend(proto, inputs, {"precision": precision} if precision is not None else None)
    if output is not None:
        with stage("write"):
            save_onnx(proto, output)
    if signed is not None:
        signing.sign(content_of(proto), output, signed)
    norms(summary, notes)
    origin = Origin(source)
    kept, path = (filled(proto), None) if output is None else (None, Path(output))
    return ExportResult(kept, path, summary, tuple(notes), stage.seconds, account, origin, quantization)


def _signed(proto: onnx.ModelProto, source: PathLike | onnx.ModelProto) -> dict[str, str] | None:
    """The modules that a signature of the file vouches for, where its record needs one and this user or team has signed
    it."""
    try:
        if not runs_code(recorded(proto)):
            return None
    except GraphError:  # it has no record, or one that can't be read
        return None
    return signing.vouched(content_of(proto), None if isinstance(source, onnx.ModelProto) else source)[0]
