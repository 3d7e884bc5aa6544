"""An ONNX file from anywhere: every normalization fused or folded, and the rest cleaned up."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import onnx

from ...errors import GraphError
from ...graphs import simplification as cleaner
from ...graphs.shape_inference import ShapeContradiction, drop_contradictions
from ...inputs import input_ranges
from ...inputs.file_inputs import describe_file_inputs
from ...model import InputSpec
from ...option_values import TENSORRT
from ...rewriting import int32_codes
from ...runtimes import ort_loadability
from ...storage import record_signing
from ...storage.export_record import raw_record, read_record, runs_code, update_record
from ...storage.onnx_files import load_onnx, normalize_model
from ...storage.weight_serialization import share_large_weights
from ...types import PathLike, Progress
from ..arguments.argument_validation import Onnx, take_fields_as_arguments
from ..arguments.export_result import ExportResult, ModelOrigin
from ..conversion.conversion_stages import (
    LOWERING,
    Conversion,
    ConversionStage,
    compare_models,
    count_nodes,
    fuse_norms,
    require_options,
    run_stages,
    unmeasured_forms_note,
    write_file,
)
from ..optimize.optimize_options import OptimizeOptions
from ..stage_progress import StageTimer


@dataclass(frozen=True)
class OptimizeCall(OptimizeOptions):
    """What ``optimize`` is called with."""

    source: Onnx
    output: PathLike | None = None
    _: KW_ONLY
    progress: Progress | None = None

    def read_model(self) -> onnx.ModelProto:
        """The model that is given, read anew at each call."""
        if isinstance(self.source, onnx.ModelProto):
            return normalize_model(self.source)
        return load_onnx(cast("PathLike", self.source))

    def error_label(self, proto: onnx.ModelProto) -> str:
        """Its name in errors."""
        if isinstance(self.source, str | os.PathLike):
            return Path(self.source).name
        return proto.graph.name or "the model"


@take_fields_as_arguments(OptimizeCall)
def optimize(call: OptimizeCall) -> ExportResult:
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
            (`normdeploy.graphs.simplification`), where the result can be compared with the model; else norms alone are
            touched.
        dims: ranges of dynamic dims, ``batch=1:8:64`` (min:opt:max), which the result records for ``run``, ``bench``,
            ``build`` and ``package``; those of the others must be recorded already, or follow from a table that
            positions along them index.
        inputs: sizes and values of inputs, ``ids:int64[batch,seq]{0:30522}``; or values alone, ``sr=16000``,
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
    conversion = OptimizeConversion(call, call.source, call.output, StageTimer(call.progress))
    run_stages(conversion, STAGES)
    return conversion.make_result(ModelOrigin(call.source))


@dataclass
class OptimizeConversion(Conversion):
    """An ONNX file on its way to a better one."""

    options: OptimizeCall
    # What the file states that its nodes contradict, and its constants in int32.
    contradictions: Sequence[ShapeContradiction] = ()
    codes: int = 0
    # The modules that a signature of the file vouches for, where its record needs one.
    signed: dict[str, str] | None = None
    # Notes on the file given.
    hints: list[str] = field(default_factory=list)
    tidied: cleaner.SimplifiedModel = field(init=False)

    @property
    def model_cleaner(self) -> Callable[[onnx.ModelProto], cleaner.SimplifiedModel]:
        """What cleans a model up: nothing where the result can't be compared with the model."""
        if self.options.simplify and self.before is not None:
            return partial(cleaner.simplify, resolves=True)
        return cleaner.SimplifiedModel


# ------------------------------------------------------------------ the stages, in the order in which they are run


def load_file(optimization: OptimizeConversion) -> None:
    """Read the file, and what it and the user say of its inputs.

    Raises:
        GraphError: the file is broken, or its record is.
        InputError: inputs or dims do not fit.
    """
    call = optimization.options
    proto, weights = share_large_weights(call.read_model())
    optimization.contradictions = drop_contradictions(proto)
    optimization.set_wanted(weights, attentions=call.precision is None)
    optimization.signed = _find_vouched_modules(proto, call.source)
    inputs, optimization.hints = input_ranges.resolve_input_ranges(proto, _read_recorded_inputs(proto, call), call.dims)
    if call.inputs:
        inputs = describe_file_inputs(proto, call.inputs, call.dims, call.error_label(proto), inputs).specs
    optimization.inputs = inputs
    if call.runtime in TENSORRT:
        optimization.codes = int32_codes.count_int32_dequantizers(proto)
    optimization.proto = proto


def clean_up(optimization: OptimizeConversion) -> None:
    """Compute constants, and remove what nothing reads."""
    optimization.tidied = optimization.model_cleaner(optimization.proto)


def compare_rewritten(optimization: OptimizeConversion) -> None:
    """Compare the whole model before and after.

    Raises:
        GraphError: onnxruntime does not load or run the result.
    """
    call = optimization.options
    tidy = optimization.model_cleaner
    is_small = optimization.before is not None
    proto = compare_models(optimization, lambda plain: tidy(plain).proto, optimization.tidied.proto)
    optimization.before = None
    if optimization.ran:
        optimization.proto = proto
        if optimization.tidied.note:
            optimization.notes += [optimization.tidied.note]
        return
    if call.simplify:
        optimization.notes.append("the graph was not cleaned up: nothing says that it would stay the same")
    ort_loadability.require_runnable_optimized(
        optimization.proto, call.read_model, call.runtime, call.provider, runs=is_small
    )


def add_file_notes(optimization: OptimizeConversion) -> None:
    """Put the notes on the file given before those on the rewrites, and count the nodes."""
    notes = [*optimization.hints]
    if optimization.codes:
        written = optimization.codes - int32_codes.count_int32_dequantizers(optimization.proto)
    else:
        written = 0
    if written:
        notes.append(f"{written} constants stored as int32, which TensorRT refuses, are float32 now: the same numbers")
    notes += [f"the file states what its nodes contradict: {each}" for each in optimization.contradictions]
    optimization.notes = [*notes, *optimization.notes, *unmeasured_forms_note(optimization.options)]
    count_nodes(optimization)


def amend_record(optimization: OptimizeConversion) -> None:
    """Write what is known now of its inputs and its precision into the file's record."""
    call = optimization.options
    proto = optimization.proto
    if call.dims:
        input_ranges.name_dynamic_dims(proto)
    if call.dims or (optimization.account is not None and read_record(proto)):
        update_record(proto, optimization.inputs, {"precision": call.precision} if call.precision is not None else None)


def sign_result(optimization: OptimizeConversion) -> None:
    """Sign the result where the file given was."""
    if optimization.signed is not None:
        record_signing.sign_record(raw_record(optimization.proto), optimization.output, optimization.signed)


STAGES: tuple[ConversionStage[OptimizeConversion], ...] = (
    ConversionStage(require_options),
    ConversionStage(load_file, "load"),
    ConversionStage(fuse_norms, "norms"),
    ConversionStage(clean_up, "simplify"),
    ConversionStage(compare_rewritten, "compare"),
    ConversionStage(add_file_notes),
    *LOWERING,
    ConversionStage(amend_record),
    ConversionStage(write_file, "write", Conversion.is_written),
    ConversionStage(sign_result),
)


def _read_recorded_inputs(proto: onnx.ModelProto, call: OptimizeCall) -> Sequence[InputSpec]:
    try:
        return read_record(proto).get("inputs", ())
    except GraphError:
        # A stranger's record, or a newer version's, matters to half precision and to ranges alone.
        if call.precision is not None or call.dims:
            raise
        return ()


def _find_vouched_modules(proto: onnx.ModelProto, source: PathLike | onnx.ModelProto) -> dict[str, str] | None:
    """The modules that a signature of the file vouches for, where its record needs one and this user or team has signed
    it."""
    try:
        if not runs_code(read_record(proto)):
            return None
    except GraphError:
        # it has no record, or one that can't be read
        return None
    return record_signing.find_signed_modules(
        raw_record(proto), None if isinstance(source, onnx.ModelProto) else source
    )[0]
