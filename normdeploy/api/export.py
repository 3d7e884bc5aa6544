"""A PyTorch model to ONNX, every normalization fused, folded or named with the reason why not."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from .. import runnable
from ..arguments import Loading, check_output, prepared
from ..choices import TENSORRT
from ..drawn import draws_of_program
from ..exporter import record, to_light
from ..graphs import simplify
from ..loading.written import input_notes, state_notes
from ..log import norms
from ..precision import precision as half
from ..proof.reshapes import resolve_reshapes
from ..results import ExportResult, Origin
from ..rewriting import attention, rewrite, whole
from ..rewriting.ledger import Wanted
from ..runtimes.eager import EagerRunner
from ..storage import signing
from ..storage.files import filled, save_onnx
from ..storage.record import content_of, recorded, runs_code
from ..types import PathLike, Progress
from ..verbs.sources import loaded
from ..verbs.verify import exported
from ..verbs.verify.policy import Thresholds
from .common import NOT_MEASURED, Calibration, Stages, compared, samples_of, target_of
from .quantizing import calibrating, joined, judged_in_half, quantized_file, wish_of

if TYPE_CHECKING:
    from ..arguments import Example
    from ..model import Model, Signature
    from ..verbs.sources import Source

_HEAVY = 2**26  # bytes of weights; to look for cycles takes up to half a second, a tenth of the export of a small model
# the first with a usable GroupNormalization; from 23 on the exporter writes Attention, which TensorRT can't build
OPSET = 21


@prepared()
def export(
    source: Source,
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    output: PathLike | None = None,
    opset: int | None = None,
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
    check: bool = True,
    custom_translation_table: Mapping[Any, Any] | None = None,
    progress: Progress | None = None,
    **loading: Unpack[Loading],
) -> ExportResult:
    """Turn a PyTorch model into ONNX with every normalization fused, folded or named with the reason why not.

    Args:
        source: a model file or folder, a live module or an exported program, which are left untouched.
        args: example arguments of a live module: a tuple of them, one tensor, or a mapping of them by forward's
        parameters.
        kwargs: example keyword arguments.
        output: where to write the ONNX file.
        opset: 18 to 25; None is 21. The file is raised above it only where a norm's node needs that, which a note
        tells.
        runtime: which of equal standard forms to write: "any", "onnxruntime", "onnxruntime-accurate", "tensorrt" or
        "tensorrt-rtx".
        provider: of onnxruntime, "cpu" or "cuda": what runs best there (of cuda by its documents, not measured).
        fuse: "standard", or "portable": this project's own ops with function bodies where no standard one says a norm.
        strict: a failed certificate is an error; otherwise its rewrite is undone and reported.
        strict_proof: a rewrite is an error whose certificate is not exact, or that makes NaN of a number at an infinite
        input.
        precision: "fp16" or "bf16": the file computes in it, but for what it can't hold
        (``normdeploy.precision.precision``).
        calibrate: inputs to see that on: .npz files, or mappings name -> array; empty: some are generated. For
            ``quantize`` samples, along the first axis of each array; every second batch of them calibrates, the others
            judge.
        keep_io: inputs and outputs of a half-precision file stay float32.
        quantize: "int8", "fp8" or "int4": linear layers and convolutions compute in it, or hold their weights in it
            (``normdeploy.quantization.quantize``).
        calibration: how ranges are taken of the samples: "minmax", "entropy" or "percentile".
        metric: what the quantized file has to reach on samples that do not calibrate, such as "cosine>=0.995", or
            output -> such texts; layers are left in float until it does.
        dynamic: the ranges of activations are taken while the model runs, for int8 in onnxruntime; no samples needed.
        rotate: with ``quantize``, the residual stream and the values of attentions are rotated by Hadamard matrices
            first, where that is proved to change nothing (``normdeploy.quantization.rotate``).
        keep_float: with ``quantize``, layers that stay float, by their modules or results, such as "head" or
            "layers.0.*".
        compare_limit: bytes of weights up to which the whole model before and after the rewrites is compared
        (`rewriting.whole`).
        check: the file is run beside PyTorch at two small sizes, and an output that differs by more than rounding is an
        error (`verbs.verify.exported`).
        custom_translation_table: operator of torch -> onnxscript function, as ``torch.onnx.export`` takes it
        (`normdeploy.translations`).
        progress: called with (stage, done, total); total is 0 where it is not known.
        loading: see ``normdeploy.loading.load`` (files) and ``from_module`` (live modules).

    Raises:
        NormdeployError: one of ``normdeploy.errors``; the message says what to do.
    """
    stage, tidy = Stages(progress), partial(simplify.simplify, first=resolve_reshapes)
    if output is not None:
        check_output(output, source)
    signing.check(output)
    target = target_of(runtime, provider)
    wish = wish_of(quantize, target, calibration, metric, calibrate, precision, dynamic, rotate, keep_float)
    samples = samples_of(calibrate if wish is None else (), precision, keep_io)
    with stage("load"):
        model = loaded(source, args, kwargs, loading, shared=True)
    with stage("export"):
        proto, weights = to_light(
            model, opset=opset or OPSET, custom_translation_table=custom_translation_table, progress=progress
        )
    signature = model.signature
    with stage("reference"):
        right = exported.expected(model) if check else exported.Expected(())
    attentions = precision is None and (opset is None or opset >= attention.OPSET)
    first = fuse if wish is None else "standard"  # of a quantized file `joined` writes the ops that are joined
    wanted = Wanted(
        target,
        first,
        attentions=attentions,
        rows=not dynamic,
        partial=wish is None or wish.activation is None,
        progress=progress,
        weights=weights,
    )
    weight = whole.weight(proto)
    before = proto if weight <= compare_limit else None
    draws = draws_of_program(model.program)
    of_loading = [*model.notes, *state_notes(model.written), *input_notes(model.program)]
    del model  # in cycles, as torch's graphs are
    if weight >= _HEAVY and isinstance(source, str | os.PathLike):
        gc.collect()
    with stage("norms"):
        proto, summary, taken = rewrite.optimized(proto, wanted, strict)
    with stage("simplify"):
        simplified = tidy(proto, _samples(signature) if before is None else (), progress=progress)
    with stage("compare"):
        made = simplified.proto, summary, taken
        (proto, summary, _), notes, ran = compared(
            before, signature.inputs, wanted, made, strict, lambda plain: tidy(plain).proto
        )
        ran = ran or simplified.ran
        before = None
        if not ran:
            notes += runnable.require(
                proto, _samples(signature), runtime, lambda feeds: _eager(loaded(source, args, kwargs, loading), feeds)
            )
    with stage("check"):
        again = partial(loaded, source, args, kwargs, loading, shared=True)
        notes += exported.require_as_expected(right, proto, again, runtime)
    if strict_proof:
        rewrite.require_exact(summary.findings)
    plain, quantization, floats = proto, None, signature.inputs
    if wish is not None:
        with stage("quantize"):
            proto, quantization = quantized_file(filled(proto), wish, calibrate, signature.inputs, progress)
        if fuse == "portable":
            with stage("join"):
                own = Wanted(target, fuse, attentions=False, rows=False, progress=progress)
                proto, summary, more = joined(proto, summary, signature.inputs, own, strict)
                notes += more
        summary = replace(summary, opset=half.opset_of(proto))
    account = None
    if precision is not None:
        if wish is not None and calibrate:
            samples = calibrating(calibrate, plain, floats)
        with stage("precision"):
            proto, account = half.converted(
                filled(proto), precision, samples, inputs=signature.inputs, keep_io=keep_io, progress=progress
            )
            signature = replace(signature, inputs=half.recast(signature.inputs, account))
            if ran and runtime not in TENSORRT:
                runnable.require_half(proto, _samples(signature), precision)
        summary = replace(summary, opset=half.opset_of(proto))
        if wish is not None and quantization is not None:
            with stage("judge"):
                quantization = judged_in_half(proto, filled(plain), quantization, wish, calibrate, floats, progress)
    flags = {"opset": opset, "runtime": runtime, "fuse": fuse, "strict": strict, "trust": loading.get("trust", False)}
    record(
        proto,
        signature,
        flags | {n: v for n, v in (("precision", precision), ("quantize", quantize), ("rotate", rotate)) if v},
    )
    # A record that can't be read again is refused before anything is written.
    brings_code = runs_code(recorded(proto))
    if output is not None:
        with stage("write"):
            save_onnx(proto, output)
    if brings_code:
        signing.sign(content_of(proto), output)
    notes += [simplified.note] if simplified.note else []
    notes += of_loading
    if draws:
        notes.append(f"the file draws random numbers ({', '.join(draws)}), so it can't be verified")
    notes += [NOT_MEASURED] if provider == "cuda" else []
    if signature.taken:
        taken_from = [
            f"{d.name}={d.min}:{d.opt}:{d.max} ({signature.taken[n]})"
            for n, d in signature.dims.items()
            if n in signature.taken
        ]
        notes.append(f"sizes taken where none were stated: {', '.join(taken_from)}; state others with --dim")
    if opset is not None and summary.opset > opset:
        notes.append(f"the file has opset {summary.opset}, not {opset}: a node that was written, or its type, needs it")
    summary = replace(summary, nodes_after=len(proto.graph.node), ops_after=rewrite.op_counts(proto))
    norms(summary, notes)
    origin = Origin(source, args, kwargs, loading)
    kept, path = (filled(proto), None) if output is None else (None, Path(output))
    return ExportResult(kept, path, summary, tuple(notes), stage.seconds, account, origin, quantization)


def _eager(model: Model, feeds: Mapping[str, Any]) -> str:
    """Why PyTorch does not run the model on these inputs, "" where it does."""
    try:
        with EagerRunner(model) as runner:
            runner.infer(feeds)
    except Exception as error:  # whatever torch or the model raises
        return str(error) or type(error).__name__
    return ""


def _samples(model: Signature) -> list[dict[str, Any]]:
    """Random inputs at the usual and at the smallest sizes."""
    return [model.samples(0), model.samples(1, {name: dim.min for name, dim in model.dims.items()})]
