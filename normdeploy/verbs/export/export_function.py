"""Export a PyTorch model to ONNX, with every normalization fused, folded or listed with the reason why not."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from ...errors import ExportError
from ...exporting.exporter import export_without_weights, write_record
from ...graphs import simplification
from ...graphs.opset_conversion import convert_to_opset
from ...graphs.region import RefusedError
from ...inputs.image_input_options import resolve_image_inputs
from ...loading.hub import resolve_model_path
from ...loading.huggingface_tasks import find_task
from ...loading.image_programs import with_image_inputs
from ...loading.in_place_writes import buffer_write_notes, input_write_notes
from ...model import LoadedModel, ModelSignature
from ...option_values import DEFAULT_OPSET, TORCH_OPSETS
from ...ort_sessions.opset_limits import describe_unloadable_opset
from ...rewriting import attention_fusion, rewrite_rollback
from ...runtimes import ort_loadability
from ...runtimes.torch_runners import EagerRunner
from ...storage import record_signing
from ...storage.export_record import TOKENIZER_FLAG, raw_record, read_record, runs_code
from ...storage.image_metadata import read_image_inputs, record_image_inputs
from ...storage.onnx_domains import default_domain_opset
from ...storage.tokenizer_files import hash_vocabulary
from ...types import PathLike, Progress
from ...verb_options import CertificateOption, LoadingOptions
from ..arguments.argument_validation import take_fields_as_arguments
from ..arguments.export_result import ExportResult, ModelOrigin
from ..arguments.model_source import load_source
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
from ..conversion.torch_words import EXPORT_ARGUMENTS
from ..export.export_options import ExportOptions
from ..stage_progress import StageTimer
from ..verify import export_check
from ..verify.random_draws import random_ops_of_program
from .io_names import rename_inputs, rename_outputs
from .output_folder import copy_tokenizer

if TYPE_CHECKING:
    from ..arguments.argument_validation import Example
    from ..arguments.model_source import Source

# Minimum bytes of weights (64 MiB) for which a model from a file is freed early. To free it, the garbage collector must
# run, which takes up to 0.5 s.
_HEAVY = 2**26


@dataclass(frozen=True)
class ExportCall(ExportOptions, LoadingOptions, CertificateOption):
    """Arguments of a call of ``export``."""

    source: Source
    args: Example = ()
    kwargs: Mapping[str, Any] | None = None
    _: KW_ONLY
    output: PathLike | None = None
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    custom_translation_table: Mapping[Any, Any] | None = None
    progress: Progress | None = None

    def load_source(self) -> LoadedModel:
        """Load the model.

        Returns:
            The model. Its parameters may share memory with the parameters of the live module.
        """
        return load_source(self.source, self.args, self.kwargs, self.load_keywords, shared=True)


@take_fields_as_arguments(ExportCall, words=EXPORT_ARGUMENTS)
def export(call: ExportCall) -> ExportResult:
    """Export a PyTorch model to ONNX with every normalization fused, folded or listed with the reason why not.

    Args:
        source: a model file or folder, a live module or an exported program; it is not changed.
        args: example arguments of a live module: a tuple, one tensor, or a mapping from forward's parameters.
        kwargs: example keyword arguments. A transformers model needs neither examples nor ``inputs``.
        output: path of the ONNX file; None returns the model in memory only.
        input_names, output_names: names of all inputs and of all outputs of the file, in their order, as for
            ``torch.onnx.export``. None keeps the model's names.
        opset: 13 to 28. A norm whose node needs a newer opset gets another form, or stays as it is. None means 21, or a
            newer opset if the node of a norm needs it. Opsets below 18 and above 25 are reached by converting torch's
            file.
        target: runtime that can't run here (`normdeploy.runtimes.target_support`), such as "nnapi" or "tensorrt-10.9".
            It chooses ``runtime`` and the newest opset. Norm ops that the target does not run are not written.
        runtime: runtime that the forms of norms are chosen for: "any", "onnxruntime", "onnxruntime-accurate",
            "openvino", "tensorrt" or "tensorrt-rtx".
        provider: provider of onnxruntime that the forms are chosen for: "cpu" or "cuda". The choice for "cuda" follows
            onnxruntime's documentation, not measurements.
        fuse: "standard", or "portable": also use this project's own ops with function bodies for norms without a
            standard op and for group norms.
        strict: raise an error if a rewrite fails its proof. If False, the rewrite is undone, and its norm is listed as
            skipped.
        strict_proof: raise an error if a proof is not exact, or if a rewrite turns a number into NaN at an infinite
            input.
        precision: "fp16" or "bf16": compute in this type, except for nodes whose values the type can't hold
            (``normdeploy.precision.half_conversion``).
        calibrate: samples for calibration, as .npz files or mappings name -> array. Without ``quantize``, half
            precision is calibrated on them; if there are none, inputs are generated. With ``quantize``, the first axis
            of each array is the sample axis. The samples are split into batches; every second batch is used for
            calibration, and the other batches for evaluation.
        preprocess: config of a preprocessing, "MODULE:FUNCTION" or a function, with ``quantize``. ``calibrate`` then
            names folders of files, each of which becomes one sample (``normdeploy.inputs.image_preprocessing``).
        keep_io: inputs and outputs of a half-precision file stay float32.
        quantize: "int8", "fp8" or "int4": linear layers and convolutions compute in this type, or store their weights
            in it (``normdeploy.quantization.quantizer``).
        calibration: method that finds the ranges of activations from the samples: "minmax", "entropy" or "percentile".
        metric: bound that the quantized file must reach on the evaluation samples, such as "cosine>=0.995". A mapping
            from output to bounds sets them for each output. Layers go back to float until the file reaches the metric.
        dynamic: compute the ranges of activations at run time (int8 in onnxruntime only). No samples are needed.
        rotate: with ``quantize``, first rotate the residual stream and the values of attentions by Hadamard matrices,
            if this is proved to change nothing (``normdeploy.quantization.stream_rotation``).
        keep_float: with ``quantize``, layers that stay float. They are named by their module or their output tensor,
            such as "head" or "layers.0.*".
        normalize, input_layout, input_type: images that the file takes: "0.485,0.456,0.406/0.229,0.224,0.225", "nhwc"
            and "uint8". The file prepares them itself (``normdeploy.inputs.image_input_options``).
        external_data_name: name of a file in the output's folder that gets the weights, such as "model.onnx.data". None
            writes them into the ONNX file, or above 2 GB into a file with a hash in its name.
        compare_limit: maximum bytes of weights for a comparison of the whole model before and after the rewrites
            (`rewriting.rewrite_rollback`).
        check: at the end, compare the file with PyTorch at two small sizes, and raise an error if an output differs by
            more than rounding (`verbs.verify.export_check`). False skips this comparison; rewrites are still proved.
        custom_translation_table: torch operator -> onnxscript function, as for ``torch.onnx.export``
            (`normdeploy.translations`).
        certificate: path of a JSON file with the nodes before each rewrite, which another program can check; needs
            ``output``, and can't be combined with ``precision`` or ``quantize``.
        progress: called with (stage, done, total); total is 0 if unknown.
        model, model_args, key, trust, imports, inputs, dims, eval, task, part, dynamic_shapes, code: options for
            loading the model; see ``normdeploy.loading.load`` (files) and ``from_module`` (live modules).

    Returns:
        The model or its path, a finding for each normalization, notes and timings.

    Raises:
        NormdeployError: one of ``normdeploy.errors``; the message names a fix.
    """
    conversion = ExportConversion(
        call, call.source, call.output, StageTimer(call.progress), certificate=call.certificate
    )
    run_stages(conversion, STAGES)
    return conversion.make_result(ModelOrigin(call.source, call.args, call.kwargs, call.load_keywords))


@dataclass
class ExportConversion(Conversion):
    """State of the export of a PyTorch model.

    Attributes:
        model: the loaded model. `release_model` sets it to None again.
        kept: the loaded model until the comparison with PyTorch, if it takes little memory.
        expected: PyTorch's outputs at two small sizes.
        of_loading: notes from loading the model.
        draws: names of the random ops of the model.
        brings_code: True if loading the model as recorded in the file may run code.
    """

    options: ExportCall
    model: LoadedModel | None = None
    kept: LoadedModel | None = None
    signature: ModelSignature = field(init=False)
    expected: export_check.ExpectedOutputs = field(init=False)
    simplified: simplification.SimplifiedModel = field(init=False)
    of_loading: list[str] = field(default_factory=list)
    draws: Sequence[str] = ()
    brings_code: bool = False

    def example_feeds(self) -> list[dict[str, np.ndarray]]:
        """Generate random inputs at the usual and at the smallest sizes.

        Returns:
            For each of the two sizes, input name -> array.
        """
        signature = replace(self.signature, inputs=tuple(self.inputs))
        smallest = {name: dim.min for name, dim in signature.named_dims.items()}
        return [signature.samples(0), signature.samples(1, smallest)]


# ------------------------------------------------------------------ stages, in their order


def note_unchecked_opset(export: ExportConversion) -> None:
    """Note that onnxruntime can't run the result, if it does not load the opset."""
    opset = export.options.opset or 0
    unloadable = describe_unloadable_opset(opset) if opset >= TORCH_OPSETS.stop else ""
    if unloadable:
        export.notes.append(
            f"the file was checked at opset {TORCH_OPSETS.stop - 1} and then converted: {unloadable}, so the result was"
            " not run"
        )


def load_model(export: ExportConversion) -> None:
    """Load and trace the model."""
    export.model = _load_prepared(export.options)


def trace_model(export: ExportConversion) -> None:
    """Write the model's program as ONNX."""
    call = export.options
    assert export.model is not None
    export.proto, weights = export_without_weights(
        export.model,
        opset=max(TORCH_OPSETS.start, min(call.opset or DEFAULT_OPSET, TORCH_OPSETS.stop - 1)),
        custom_translation_table=call.custom_translation_table,
        progress=call.progress,
    )
    export.signature = export.model.as_signature
    export.inputs = export.signature.inputs
    export.images = export.signature.images
    opset = call.opset or attention_fusion.OPSET
    export.set_wanted(
        weights,
        attentions=call.precision is None and opset >= attention_fusion.OPSET,
        opset=default_domain_opset(export.proto),
        stated=call.opset if opset < TORCH_OPSETS.start else None,
    )


def run_reference(export: ExportConversion) -> None:
    """Run the model in PyTorch, and keep its outputs for a later comparison with the file."""
    assert export.model is not None
    if export.options.check:
        export.expected = export_check.run_expected(export.model)
    else:
        export.expected = export_check.ExpectedOutputs(())


def release_model(export: ExportConversion) -> None:
    """Read the notes and random ops of the model. Free its memory, unless it takes little."""
    model = export.model
    assert model is not None
    is_heavy = rewrite_rollback.total_weight_bytes(export.proto) >= _HEAVY
    # The caller of `export` holds the parameters of a live module or program anyway.
    is_from_file = isinstance(export.options.source, str | os.PathLike)
    if not (is_heavy and is_from_file):
        export.kept = model
    export.draws = random_ops_of_program(model.program)
    export.of_loading = [*model.notes, *buffer_write_notes(model.written), *input_write_notes(model.program)]
    export.model = None
    # torch's graphs contain reference cycles, so only the garbage collector frees them.
    del model
    if is_heavy and is_from_file:
        gc.collect()


def clean_up(export: ExportConversion) -> None:
    """Compute constants, and remove unused nodes."""
    samples = export.example_feeds() if export.before is None else ()
    export.simplified = _simplify_model(export.proto, samples, progress=export.options.progress)


def compare_rewritten(export: ExportConversion) -> None:
    """Compare the whole model before and after the rewrites.

    Raises:
        ExportError: onnxruntime does not load or run the file.
    """
    known = [run.known for run in export.expected.runs]
    export.proto = compare_models(export, lambda plain: _simplify_model(plain).proto, export.simplified.proto, known)
    export.ran = export.ran or export.simplified.ran
    export.before = None
    if not export.ran:
        export.notes += ort_loadability.require_runnable(
            export.proto, export.example_feeds(), export.options.runtime, partial(_why_not_eager, export.options)
        )


def compare_with_reference(export: ExportConversion) -> None:
    """Compare the file's outputs with PyTorch's.

    Raises:
        ExportError: an output differs by more than rounding.
    """
    call = export.options
    kept = export.kept
    export.kept = None
    export.notes += export_check.require_expected_outputs(
        export.expected, export.proto, lambda: kept or _load_prepared(call), call.runtime
    )
    # Its runs hold the file's outputs.
    export.expected = export_check.ExpectedOutputs(())


def raise_opset(export: ExportConversion) -> None:
    """Convert the file to an opset that torch's exporter does not write.

    Raises:
        ExportError: a node can't be converted.
    """
    opset = export.options.opset
    if opset is None or opset < TORCH_OPSETS.stop:
        return
    try:
        export.proto = convert_to_opset(export.proto, opset)
    except RefusedError as error:
        raise ExportError(
            f"the file can't be converted to opset {opset}: {error}; pass --opset {TORCH_OPSETS.stop - 1}"
        ) from error
    export.summary = replace(export.summary, opset=opset)


def add_record(export: ExportConversion) -> None:
    """Write the export record into the file: the inputs of the model and the options of the export.

    Raises:
        GraphError: the record can't be read back.
    """
    call = export.options
    flags: dict[str, Any] = {name: getattr(call, name) for name in ("opset", "runtime", "fuse", "strict", "trust")}
    flags |= {name: getattr(call, name) for name in ("precision", "quantize", "rotate") if getattr(call, name)}
    folder = _find_decoder_folder(call)
    if folder is not None and (digest := hash_vocabulary(folder)):
        flags[TOKENIZER_FLAG] = digest
    write_record(export.proto, replace(export.signature, inputs=tuple(export.inputs)), flags)
    record_image_inputs(export.proto, export.images)
    # The record is read back, so that a broken record is refused before the file is written.
    export.brings_code = runs_code(read_record(export.proto))


def copy_tokenizer_beside(export: ExportConversion) -> None:
    """Copy the tokenizer of a decoder's folder into the folder of the file."""
    assert export.output is not None
    folder = _find_decoder_folder(export.options)
    if folder is None:
        return
    note = copy_tokenizer(folder, Path(export.output))
    if note:
        export.notes.append(note)


def sign_file(export: ExportConversion) -> None:
    """Sign the file if loading the model as recorded may run code."""
    if export.brings_code:
        record_signing.sign_record(raw_record(export.proto), export.output)


def note_the_rest(export: ExportConversion) -> None:
    """Add the notes that belong to no earlier stage, and count the nodes."""
    call = export.options
    notes = export.notes
    if export.simplified.note:
        notes += [export.simplified.note]
    notes += export.of_loading
    if export.draws:
        notes.append(f"the file draws random numbers ({', '.join(export.draws)}), so it can't be verified")
    notes += image_notes(read_image_inputs(export.proto))
    notes += unmeasured_forms_note(call)
    taken = export.signature.taken
    if taken:
        dims = export.signature.named_dims.items()
        sizes = [f"{d.name}={d.min}:{d.opt}:{d.max} ({taken[name]})" for name, d in dims if name in taken]
        notes.append(f"sizes assumed because none were stated: {', '.join(sizes)}; state others with --dim")
    count_nodes(export)


STAGES: tuple[ConversionStage[ExportConversion], ...] = (
    ConversionStage(require_options),
    ConversionStage(require_loadable_opset),
    ConversionStage(note_unchecked_opset),
    ConversionStage(load_model, "load", details=describe_source),
    ConversionStage(trace_model, "export"),
    ConversionStage(run_reference, "reference"),
    ConversionStage(release_model),
    ConversionStage(fuse_norms, "norms"),
    ConversionStage(clean_up, "simplify"),
    ConversionStage(compare_rewritten, "compare"),
    ConversionStage(compare_with_reference, "check"),
    *LOWERING,
    ConversionStage(raise_opset),
    ConversionStage(require_stated_opset),
    ConversionStage(add_record),
    ConversionStage(write_file, "write", Conversion.is_written),
    ConversionStage(write_certificate, "certificate", Conversion.is_certified),
    ConversionStage(copy_tokenizer_beside, when=Conversion.is_written),
    ConversionStage(sign_file),
    ConversionStage(note_the_rest),
)


def _load_prepared(call: ExportCall) -> LoadedModel:
    """Load the model, give its inputs and outputs the user's names, and prepare its images as the user requests."""
    model = call.load_source()
    model = replace(
        model,
        inputs=rename_inputs(model.inputs, call.input_names),
        outputs=rename_outputs(model.outputs, call.output_names),
    )
    return with_image_inputs(model, resolve_image_inputs(call, model.inputs, model.images, "the model"))


def _find_decoder_folder(call: ExportCall) -> Path | None:
    """Return the Hugging Face folder of a decoder that is exported with its cache; None for another model."""
    if call.task is None or not find_task(call.task).past or not isinstance(call.source, str | os.PathLike):
        return None
    return resolve_model_path(os.fspath(call.source))


def _simplify_model(
    proto: onnx.ModelProto, samples: Sequence[Mapping[str, Any]] = (), progress: Progress | None = None
) -> simplification.SimplifiedModel:
    return simplification.simplify(proto, samples, resolves=True, progress=progress)


def _why_not_eager(call: ExportCall, feeds: Mapping[str, Any]) -> str:
    """Return the reason why PyTorch does not run the model on these inputs, or "" if it runs."""
    model = _load_prepared(call)
    try:
        with EagerRunner(model) as runner:
            runner.infer(feeds)
    # torch and the model raise exceptions of many types without a common base class.
    except Exception as error:
        return str(error) or type(error).__name__
    return ""
