"""Optimize an ONNX file from any exporter: fuse or fold every normalization and clean up the rest."""

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
from ...graphs.image_nodes import insert_image_nodes
from ...graphs.shape_inference import ShapeContradiction, drop_contradictions
from ...inputs import input_ranges
from ...inputs.file_inputs import describe_file_inputs
from ...inputs.image_input_options import has_image_options, resolve_image_inputs
from ...model import InputSpec
from ...option_values import TENSORRT
from ...rewriting import int32_codes
from ...runtimes import ort_loadability
from ...runtimes.target_support import find_target
from ...storage import record_signing
from ...storage.export_record import raw_record, read_record, runs_code, update_record
from ...storage.image_metadata import convert_specs, read_image_inputs, record_image_inputs
from ...storage.memory_models import is_memory_model, to_model_proto
from ...storage.onnx_domains import default_domain_opset
from ...storage.onnx_files import load_onnx, normalize_model
from ...storage.weight_serialization import share_large_weights
from ...types import PathLike, Progress
from ...verb_options import CertificateOption
from ..arguments.argument_validation import Onnx, take_fields_as_arguments
from ..arguments.export_result import ExportResult, ModelOrigin
from ..conversion.conversion_stages import (
    LOWERING,
    Conversion,
    ConversionStage,
    compare_models,
    count_nodes,
    describe_source,
    fuse_norms,
    image_notes,
    require_loadable_opset,
    require_options,
    require_stated_opset,
    run_stages,
    unmeasured_forms_note,
    write_certificate,
    write_file,
)
from ..optimize.optimize_options import OptimizeOptions
from ..stage_progress import StageTimer


@dataclass(frozen=True)
class OptimizeCall(OptimizeOptions, CertificateOption):
    """Arguments of a call of ``optimize``."""

    source: Onnx
    output: PathLike | None = None
    _: KW_ONLY
    progress: Progress | None = None

    def read_model(self) -> onnx.ModelProto:
        """Read the model. Each call reads it again.

        Returns:
            The model with its weights.
        """
        if is_memory_model(self.source):
            return normalize_model(to_model_proto(self.source))
        return load_onnx(cast("PathLike", self.source))

    def error_label(self, proto: onnx.ModelProto) -> str:
        """Name the model for errors.

        Returns:
            The file's name, else the graph's name, else "the model".
        """
        if isinstance(self.source, str | os.PathLike):
            return Path(self.source).name
        return proto.graph.name or "the model"


@take_fields_as_arguments(OptimizeCall)
def optimize(call: OptimizeCall) -> ExportResult:
    """Fuse and fold the normalizations of an ONNX model from any exporter, and clean up the rest.

    Args:
        source: a file, a model in memory with its weights loaded (onnx.ModelProto, ``onnx_ir.Model``, torch's
            ``ONNXProgram``, or bytes), or a result of ``export``; it is not changed.
        output: path of the result; None returns the model in memory only: ``model`` of the result has the class of
            ``source``.
        runtime: runtime that the forms of norms are chosen for: "any", "onnxruntime", "onnxruntime-accurate",
            "openvino", "tensorrt" or "tensorrt-rtx".
        opset: 13 to 28. The file is lowered or raised to this opset. Norms whose node needs a newer opset become
            several nodes. None means the file's opset, or a newer one if the node of a norm needs it.
        target: runtime that can't run here (`normdeploy.runtimes.target_support`), such as "nnapi" or "tensorrt-10.9".
            It chooses ``runtime``. Norm ops that the target does not run become several nodes. If the target does not
            read the file's opset, the file is lowered.
        provider: provider of onnxruntime that the forms are chosen for: "cpu" or "cuda". The choice for "cuda" follows
            onnxruntime's documentation, not measurements.
        fuse: "standard", or "portable": also use this project's own ops with function bodies for norms without a
            standard op and for group norms.
        strict: raise an error if a rewrite fails its proof. If False, the rewrite is undone, and its norm is listed as
            skipped.
        strict_proof: raise an error if a proof is not exact, or if a rewrite turns a number into NaN at an infinite
            input.
        precision, calibrate, preprocess, keep_io, quantize, calibration, metric, dynamic, rotate, keep_float,
            external_data_name, compare_limit: as for ``export``. Generated inputs follow the export record of the file,
            if the file has a record.
        normalize, input_layout, input_type: as for ``export``.
        simplify: compute constants, remove duplicate and unused nodes, and resolve shapes
            (`normdeploy.graphs.simplification`). This is done only if the result can be compared with the model;
            otherwise only norms are changed.
        dims: ranges of dynamic dims, ``batch=1:8:64`` (min:opt:max). They are recorded in the result for ``run``,
            ``bench``, ``build`` and ``package``. If any dim is given, every other dynamic dim needs a range too: from
            the export record, or from a table of position embeddings, whose size bounds the dim.
        inputs: sizes and values of inputs, ``ids:int64[batch,seq]{0:30522}``; or values only, ``sr=16000``,
            ``ids=0:30522`` or ``ids=samples.npy`` (the range of the file's values is used). Inputs are generated from
            them for the comparison of the whole model, for half precision and for quantization.
        certificate: path of a JSON file with the nodes before each rewrite, which another program can check; needs
            ``output``, and can't be combined with ``precision`` or ``quantize``.
        trust: let the module of a ``preprocess`` "MODULE:FUNCTION" run.
        progress: called with (stage, done, total); total is 0 if unknown.

    Returns:
        The model or its path, a finding for each normalization, notes and timings.

    Raises:
        GraphError: the file is broken or not ONNX; a node has no equal form in ``opset``; or onnxruntime can't load the
            result, or fails on all inputs that were tried. Failures of onnxruntime are accepted if ``runtime`` is a
            TensorRT runtime, or if only ops of another library are missing. They are also accepted if only CPU kernels
            are missing and the provider is "cuda" or ``runtime`` is "any".
        InputError: the calibration samples or the dims do not fit the model, or ``target`` can't be held.
        ExportError: the file needs a newer opset than ``opset`` because of its dtypes, or onnxruntime does not load
            ``opset``.
        CertificateError: ``strict`` is set and a certificate failed.
        NormdeployError: ``output`` is ``source``, or can't be written.
    """
    conversion = OptimizeConversion(
        call, call.source, call.output, StageTimer(call.progress), certificate=call.certificate
    )
    run_stages(conversion, STAGES)
    return conversion.make_result(ModelOrigin(call.source))


@dataclass
class OptimizeConversion(Conversion):
    """State of the optimization of an ONNX file.

    Attributes:
        contradictions: declared types and shapes of the file that its nodes contradict.
        codes: number of quantized constants that are stored as int32, which TensorRT rejects; counted for TensorRT
            only.
        signed: Python modules that the file's signature covers: path -> SHA-256. None if the file needs no signature or
            has no valid signature.
        hints: notes on the input ranges of the source file.
    """

    options: OptimizeCall
    contradictions: Sequence[ShapeContradiction] = ()
    codes: int = 0
    signed: dict[str, str] | None = None
    hints: list[str] = field(default_factory=list)
    tidied: cleaner.SimplifiedModel = field(init=False)

    @property
    def model_cleaner(self) -> Callable[[onnx.ModelProto], cleaner.SimplifiedModel]:
        """Choose the function that cleans up the model.

        Returns:
            The cleanup function. If the cleaned model can't be compared with the original, the returned function
            changes nothing.
        """
        if self.options.simplify and self.before is not None:
            return partial(cleaner.simplify, resolves=True)
        return cleaner.SimplifiedModel


# ------------------------------------------------------------------ stages, in their order


def load_file(optimization: OptimizeConversion) -> None:
    """Read the file. Determine its inputs from its export record and the user's options ``inputs`` and ``dims``.

    Raises:
        GraphError: the file or its record is broken.
        InputError: inputs or dims do not fit the file.
    """
    call = optimization.options
    proto, weights = share_large_weights(call.read_model())
    optimization.contradictions = drop_contradictions(proto)
    opset = default_domain_opset(proto)
    stated = _stated_opset(call, opset)
    optimization.set_wanted(weights, attentions=call.precision is None, opset=opset, stated=stated)
    optimization.signed = _find_vouched_modules(proto, call.source)
    inputs, optimization.hints = input_ranges.resolve_input_ranges(proto, _read_recorded_inputs(proto, call), call.dims)
    if call.inputs:
        inputs = describe_file_inputs(proto, call.inputs, call.dims, call.error_label(proto), inputs).specs
    optimization.inputs = inputs
    if call.runtime in TENSORRT:
        optimization.codes = int32_codes.count_int32_dequantizers(proto)
    optimization.proto = _prepare_images(optimization, proto)


def _prepare_images(optimization: OptimizeConversion, proto: onnx.ModelProto) -> onnx.ModelProto:
    """Insert the preparation of the images that the user requests, and describe the new inputs.

    Raises:
        GraphError: the file's metadata on images is malformed.
        InputError: an option does not fit the file.
    """
    call = optimization.options
    present = read_image_inputs(proto)
    optimization.images = present
    if not has_image_options(call):
        return proto
    label = call.error_label(proto)
    found = describe_file_inputs(proto, call.inputs, call.dims, label, optimization.inputs)
    images = resolve_image_inputs(call, found.specs, present, label)
    optimization.images = (*present, *images)
    if not optimization.inputs and not found.guessed:
        optimization.inputs = found.specs
    optimization.inputs = convert_specs(optimization.inputs, images)
    return insert_image_nodes(proto, images, present)


def _stated_opset(call: OptimizeCall, opset: int) -> int | None:
    """Return the opset that the user or the target requires, or None to keep the file's opset, ``opset``."""
    newest = None if call.target is None else find_target(call.target).opsets[1]
    if call.opset is None and newest is not None and opset > newest:
        return newest
    return call.opset


def clean_up(optimization: OptimizeConversion) -> None:
    """Compute constants, and remove unused nodes."""
    optimization.tidied = optimization.model_cleaner(optimization.proto)


def compare_rewritten(optimization: OptimizeConversion) -> None:
    """Compare the whole model before and after the rewrites.

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
        optimization.notes.append("the graph was not cleaned up, because it could not be checked for changes")
    ort_loadability.require_runnable_optimized(
        optimization.proto, call.read_model, call.runtime, call.provider, runs=is_small
    )


def add_file_notes(optimization: OptimizeConversion) -> None:
    """Put the notes on the source file before the notes on the rewrites, and count the nodes."""
    notes = [*optimization.hints]
    if optimization.codes:
        written = optimization.codes - int32_codes.count_int32_dequantizers(optimization.proto)
    else:
        written = 0
    if written:
        notes.append(
            f"{written} constants stored as int32, which TensorRT rejects, are now float32 with the same values"
        )
    notes += [f"the file declares values that contradict its nodes: {each}" for each in optimization.contradictions]
    notes += image_notes(optimization.images)
    optimization.notes = [*notes, *optimization.notes, *unmeasured_forms_note(optimization.options)]
    count_nodes(optimization)


def amend_record(optimization: OptimizeConversion) -> None:
    """Update the export record of the file with the ranges of the inputs and the precision."""
    call = optimization.options
    proto = optimization.proto
    if call.dims:
        input_ranges.name_dynamic_dims(proto)
    record_image_inputs(proto, optimization.images)
    if call.dims or has_image_options(call) or (optimization.account is not None and read_record(proto)):
        update_record(proto, optimization.inputs, {"precision": call.precision} if call.precision is not None else None)


def sign_result(optimization: OptimizeConversion) -> None:
    """Sign the result if the source file was signed."""
    if optimization.signed is not None:
        record_signing.sign_record(raw_record(optimization.proto), optimization.output, optimization.signed)


STAGES: tuple[ConversionStage[OptimizeConversion], ...] = (
    ConversionStage(require_options),
    ConversionStage(require_loadable_opset),
    ConversionStage(load_file, "load", details=describe_source),
    ConversionStage(fuse_norms, "norms"),
    ConversionStage(clean_up, "simplify"),
    ConversionStage(compare_rewritten, "compare"),
    ConversionStage(add_file_notes),
    *LOWERING,
    ConversionStage(require_stated_opset),
    ConversionStage(amend_record),
    ConversionStage(write_file, "write", Conversion.is_written),
    ConversionStage(write_certificate, "certificate", Conversion.is_certified),
    ConversionStage(sign_result),
)


def _read_recorded_inputs(proto: onnx.ModelProto, call: OptimizeCall) -> Sequence[InputSpec]:
    try:
        return read_record(proto).get("inputs", ())
    except GraphError:
        # Another tool or a newer version wrote the record. Only half precision, ranges of dims and images need the
        # record, so the error is ignored if none was requested.
        if call.precision is not None or call.dims or has_image_options(call):
            raise
        return ()


def _find_vouched_modules(proto: onnx.ModelProto, source: Onnx) -> dict[str, str] | None:
    """Find the Python modules that the file's signature covers.

    Returns:
        Path of a module -> SHA-256. None if the record runs no code and needs no signature, or if it has no valid
        signature.
    """
    try:
        if not runs_code(read_record(proto)):
            return None
    except GraphError:
        # A record that can't be read runs no code.
        return None
    return record_signing.find_signed_modules(
        raw_record(proto), source if isinstance(source, str | os.PathLike) else None
    )[0]
