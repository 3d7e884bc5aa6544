"""Define the stages that ``export`` and ``optimize`` share, and run them on the state of one conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import onnx

from ...compare.policy import Policy
from ...errors import ExportError, GraphError, InputError
from ...findings.precision_report import PrecisionReport
from ...findings.quantization_report import QuantizationReport
from ...findings.records import Finding, Summary
from ...graphs.graph import NEWEST
from ...image_input import ImageInput
from ...inputs.image_dataset import Preprocessing
from ...log import log_norms
from ...model import InputSpec
from ...option_values import TENSORRT, TORCH_OPSETS
from ...ort_sessions.opset_limits import describe_unloadable_opset
from ...ort_sessions.session import open_session
from ...precision import half_conversion as half
from ...precision.half_blocks import find_requested_nodes
from ...precision.tensor_ranges import serialize_for_session
from ...quantization.half_evaluation import judge_half_file
from ...quantization.measured_half import write_half_by_metric
from ...quantization.quantization_request import QuantizationRequest
from ...quantization.quantizer import quantize_model, recorded_or_declared_inputs
from ...quantization.sample_split import SampleSplit, split_samples
from ...rewriting import norm_optimizer, opset_change, rewrite_rollback
from ...rewriting.certificate_document import certificate_bytes
from ...rewriting.model_comparison import KnownRun
from ...rewriting.rewrite_ledger import RewriteOptions, RewriteStep
from ...rewriting.rewrite_records import RewriteRecorder
from ...runtimes import ort_loadability
from ...runtimes.crash_check import require_no_crash
from ...storage import record_signing
from ...storage.file_replacement import write_bytes
from ...storage.onnx_files import fill_shared_weights, require_data_name, save_onnx
from ...storage.shared_weights import Weights
from ...types import PathLike
from ...verb_options import ConversionOptions
from ..arguments.argument_validation import require_writable_output
from ..arguments.export_result import ExportResult, ModelOrigin
from ..stage_progress import StageTimer, describe_loading
from .certificate_file import describe_certified_file, require_certifiable
from .conversion_request import (
    TargetForms,
    parse_half_policy,
    parse_quantization_request,
    read_calibration_samples,
    read_preprocessing_option,
    select_forms,
    select_target,
)
from .finding_merge import merge_findings

NOT_MEASURED = "the forms for onnxruntime's CUDA provider follow its documentation and were not measured"


@dataclass
class Conversion:
    """State of a model during its conversion.

    A field without a default is set by the first stage that can compute its value.
    """

    options: ConversionOptions
    source: Any
    output: PathLike | None
    stages: StageTimer
    # Path of the certificate file; None if no certificate file was requested.
    certificate: PathLike | None = field(default=None, kw_only=True)
    # Restriction of the forms by the target and the stated opset.
    forms: TargetForms = field(init=False)
    target: str = field(init=False)
    wish: QuantizationRequest | None = field(init=False)
    # Preparation of the files in the calibration folders; None for arrays.
    preprocessing: Preprocessing | None = field(init=False)
    # The user's samples for the calibration of half precision; None if samples are generated.
    samples: Sequence[Mapping[str, Any]] | None = field(init=False)
    # Metrics that a half-precision file must reach; empty without metrics.
    half_policy: Policy = field(init=False)
    proto: onnx.ModelProto = field(init=False)
    inputs: Sequence[InputSpec] = field(init=False)
    wanted: RewriteOptions = field(init=False)
    # The model before the rewrites; None if it is too large to keep, and None again after the comparison.
    before: onnx.ModelProto | None = field(init=False)
    rewritten: rewrite_rollback.Made = field(init=False)
    summary: Summary = field(init=False)
    # True if onnxruntime ran the model during the comparison.
    ran: bool = False
    notes: list[str] = field(default_factory=list)
    # Images that the file takes and prepares itself.
    images: tuple[ImageInput, ...] = ()
    # The float model before quantization. ``split`` has the samples for quantization and its evaluation.
    plain: onnx.ModelProto | None = None
    split: SampleSplit | None = None
    quantization: QuantizationReport | None = None
    account: PrecisionReport | None = None
    # Both sides of each rewrite, for the certificate file; None without a certificate file.
    recorder: RewriteRecorder | None = None

    def is_quantized(self) -> bool:
        """Return whether the file will be quantized."""
        return self.wish is not None

    def is_joined(self) -> bool:
        """Return whether normdeploy's own ops will be written into the quantized file."""
        return self.wish is not None and self.options.fuse == "portable"

    def is_half(self) -> bool:
        """Return whether the file will compute in half precision."""
        return self.options.precision is not None

    def is_quantized_half(self) -> bool:
        """Return whether the file will be quantized and compute in half precision."""
        return self.is_quantized() and self.is_half()

    def is_certified(self) -> bool:
        """Return whether a certificate file was requested."""
        return self.recorder is not None

    def is_written(self) -> bool:
        """Return whether the file is written to an output."""
        return self.output is not None

    def sample_preprocessing(self) -> Preprocessing | None:
        """Return the preparation of the files in the calibration folders, without the steps that the file does."""
        if self.preprocessing is None:
            return None
        return self.preprocessing.for_images(self.images)

    def example_feeds(self) -> Sequence[dict[str, np.ndarray]]:
        """List input cases on which the file must run; none by default.

        Returns:
            for each input case, input name -> array.
        """
        return []

    def set_wanted(self, weights: Weights, *, attentions: bool, opset: int, stated: int | None = None) -> None:
        """Set the options of the rewrites.

        Args:
            weights: the model's large weights.
            attentions: also fuse attentions.
            opset: opset of the file before the rewrites.
            stated: opset to which the file is lowered or raised before the rewrites; None to keep it.
        """
        self.wanted = RewriteOptions(
            self.target,
            # `join_ops` writes normdeploy's own ops into a quantized file later, after quantization.
            "standard" if self.wish is not None else self.options.fuse,
            opset=stated,
            limit=stated or self._opset_limit(opset),
            avoided=self.forms.avoided,
            attentions=attentions,
            rows=not self.options.dynamic,
            partial=self.wish is None or self.wish.activation_format is None,
            progress=self.stages.progress,
            weights=weights,
            recorder=self.recorder,
        )

    def _opset_limit(self, opset: int) -> int:
        if self.forms.limit is None:
            return NEWEST
        return max(self.forms.limit, opset)

    def make_result(self, origin: ModelOrigin) -> ExportResult:
        """Build the verb's result.

        Args:
            origin: source and arguments of the model.

        Returns:
            the result; it holds the model in memory only if no output was requested.
        """
        log_norms(self.summary, self.notes)
        if self.output is None:
            proto = fill_shared_weights(self.proto)
            path = None
        else:
            proto = None
            path = Path(self.output)
        return ExportResult(
            proto,
            path,
            self.summary,
            tuple(self.notes),
            self.stages.seconds,
            self.account,
            origin,
            self.quantization,
        )


# C is the type of the state that a stage takes; D is the type of the state that `run_stages` takes.
C = TypeVar("C", bound=Conversion, contravariant=True)
D = TypeVar("D", bound=Conversion)


@dataclass(frozen=True)
class ConversionStage(Generic[C]):
    """One step of a conversion.

    Attributes:
        name: name of the step on the progress bar and in the report of seconds; "" if the step is not timed.
        when: condition under which the step runs.
        details: text for the progress bar after the name.
    """

    run: Callable[[C], None]
    name: str = ""
    when: Callable[[C], bool] = lambda conversion: True
    details: Callable[[C], str] = lambda conversion: ""


def describe_source(conversion: Conversion) -> str:
    """Describe the source that is loaded and what makes loading slow, for the progress bar."""
    return describe_loading(conversion.source)


def run_stages(conversion: D, stages: Iterable[ConversionStage[D]]) -> None:
    """Run the stages in order, and skip each stage whose condition is false."""
    for stage in stages:
        if not stage.when(conversion):
            continue
        if stage.name:
            with conversion.stages(stage.name, stage.details(conversion)):
                stage.run(conversion)
        else:
            stage.run(conversion)


# ------------------------------------------------------------------ the stages, in the order in which they run


def require_options(conversion: Conversion) -> None:
    """Validate the options before any work, and set the target, quantization request and samples.

    Raises:
        InputError: options contradict each other, or the samples can't be read.
        NormdeployError: the output can't be written.
    """
    conversion.forms = select_forms(conversion.options)
    conversion.options = replace(conversion.options, runtime=conversion.forms.runtime)
    options = conversion.options
    if conversion.output is not None:
        require_writable_output(conversion.output, conversion.source)
    if conversion.certificate is not None:
        require_certifiable(conversion.certificate, options, conversion.output)
        conversion.recorder = RewriteRecorder()
    if options.external_data_name is not None:
        if conversion.output is None:
            raise InputError(
                f"the external data {options.external_data_name!r} is a file beside the output, but no output was"
                " passed; pass output='model.onnx'"
            )
        require_data_name(options.external_data_name, conversion.output)
    record_signing.require_usable_team_key(conversion.output)
    conversion.target = select_target(options)
    conversion.wish = parse_quantization_request(options)
    conversion.preprocessing = read_preprocessing_option(options)
    conversion.samples = read_calibration_samples(options)
    conversion.half_policy = parse_half_policy(options)


def fuse_norms(conversion: Conversion) -> None:
    """Rewrite the norms of the model.

    If the weights are within ``compare_limit``, the original is kept for the comparison.
    """
    is_compared = rewrite_rollback.total_weight_bytes(conversion.proto) <= conversion.options.compare_limit
    if is_compared:
        conversion.before = conversion.proto
    else:
        conversion.before = None
    conversion.rewritten = norm_optimizer.optimize_with_steps(
        conversion.proto, conversion.wanted, conversion.options.strict
    )
    conversion.proto, conversion.summary, _ = conversion.rewritten


def compare_models(
    conversion: Conversion,
    tidy: Callable[[onnx.ModelProto], onnx.ModelProto],
    tidied: onnx.ModelProto,
    known: Sequence[KnownRun] = (),
) -> onnx.ModelProto:
    """Compare the whole model before and after the rewrites, and undo the rewrites that change its outputs.

    Args:
        tidy: function that cleans up a model.
        tidied: result of ``tidy`` for the rewritten model.
        known: runs of the model in PyTorch, with which the rewritten model is compared first.

    Returns:
        ``tidied``, or the model without the undone rewrites.
    """
    _, summary, taken = conversion.rewritten
    made = (tidied, summary, taken)
    (proto, conversion.summary, _), notes, conversion.ran = _compare_with_original(
        conversion.before, conversion.inputs, conversion.wanted, made, conversion.options.strict, tidy, known
    )
    conversion.notes += notes
    return proto


def require_loadable_opset(conversion: Conversion) -> None:
    """Refuse an opset that the installed libraries can't write or load, before any work.

    Raises:
        ExportError: onnx or onnxruntime is older than the opset.
    """
    opset = getattr(conversion.options, "opset", None)
    if opset is None or opset in TORCH_OPSETS:
        return
    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        raise ExportError(
            f"opset {opset} can't be written: the installed onnx {onnx.__version__} has opsets up to {newest}; install "
            f"a newer onnx, or pass --opset {newest}"
        )
    unloadable = describe_unloadable_opset(opset)
    if unloadable and conversion.options.runtime not in TENSORRT:
        raise ExportError(
            f"a file of opset {opset} would not run, so nothing was written: {unloadable}. Pass an older --opset, or "
            "--runtime tensorrt if onnxruntime does not have to run the file"
        )


def require_stated_opset(conversion: Conversion) -> None:
    """Require the opset that the user stated. A norm never raises it, but a dtype may need a newer one.

    Raises:
        ExportError: the file needs a newer opset.
    """
    stated = getattr(conversion.options, "opset", None) or conversion.wanted.opset
    if stated is not None and conversion.summary.opset > stated:
        raise ExportError(
            f"the file needs opset {conversion.summary.opset}, not {stated}, because of its dtypes; pass --opset"
            f" {conversion.summary.opset}, or omit --opset"
        )


def require_proofs(conversion: Conversion) -> None:
    """Require exact certificates if ``strict_proof`` is set.

    Raises:
        CertificateError: a certificate is not exact.
    """
    if conversion.options.strict_proof:
        norm_optimizer.require_exact(conversion.summary.findings)


def apply_quantization(conversion: Conversion) -> None:
    """Quantize the model with the given samples.

    Raises:
        InputError: the samples do not fit the inputs, or the metrics are not reached for any choice of layers.
        GraphError: onnxruntime, if targeted, can't load the quantized file.
    """
    assert conversion.wish is not None
    conversion.plain = conversion.proto
    plain = fill_shared_weights(conversion.proto)
    if conversion.options.calibrate:
        conversion.split = split_samples(
            conversion.options.calibrate,
            recorded_or_declared_inputs(plain, conversion.inputs),
            conversion.sample_preprocessing(),
        )
    made, conversion.quantization = quantize_model(plain, conversion.wish, conversion.split, conversion.stages.progress)
    if conversion.wish.runtime not in TENSORRT:
        try:
            with serialize_for_session(made) as file:
                require_no_crash(file)
                open_session(file, optimize=True)
        # onnxruntime's exceptions have no common base class.
        except Exception as error:
            raise GraphError(
                "onnxruntime can't run the quantized file, so nothing was written:"
                f" {' '.join(str(error).split())[:300]}; omit --quantize, and please report this"
            ) from error
    conversion.proto = made
    update_summary(conversion)


def join_ops(conversion: Conversion) -> None:
    """Write normdeploy's own ops (``--fuse portable``) into a quantized file, and merge the findings of both passes.

    These ops are written after quantization for two reasons. If an Add and a norm were already one of these ops, the
    norm's scale and shift could not be folded into the next layers. Also, such an op may include a QuantizeLinear,
    which exists only after quantization.

    Raises:
        CertificateError: a certificate failed and ``strict`` is set.
    """
    options = conversion.options
    wanted = RewriteOptions(
        conversion.target,
        options.fuse,
        limit=conversion.wanted.limit,
        avoided=conversion.wanted.avoided,
        attentions=False,
        rows=False,
        progress=conversion.stages.progress,
    )
    made = norm_optimizer.optimize_with_steps(conversion.proto, wanted, options.strict)
    (proto, summary, _), notes, _ = _compare_with_original(
        conversion.proto, conversion.inputs, wanted, made, options.strict
    )
    conversion.summary = replace(
        conversion.summary, findings=merge_findings(conversion.summary.findings, summary.findings)
    )
    conversion.proto = proto
    conversion.notes += notes
    update_summary(conversion)


def lower_precision(conversion: Conversion) -> None:
    """Convert the file to half precision. If metrics were requested, some blocks stay float32 to reach them.

    Raises:
        InputError: the samples do not fit, a layer that should stay float is unknown, or the metrics are not reached.
        GraphError: onnxruntime runs the float32 model, but not the half-precision file.
    """
    options = conversion.options
    assert options.precision is not None
    before = fill_shared_weights(conversion.proto)
    if conversion.half_policy and conversion.split is None:
        inputs = recorded_or_declared_inputs(before, conversion.inputs)
        split = split_samples(options.calibrate, inputs, conversion.sample_preprocessing())
        # Half precision fits nothing to the calibration samples, so the file must reach the metrics on them too.
        conversion.split = replace(split, judging=(*split.calibrating, *split.judging))
    plan = half.plan_half(
        before,
        options.precision,
        conversion.samples if conversion.split is None else conversion.split.calibrating,
        inputs=conversion.inputs,
        keep_io=options.keep_io,
        progress=conversion.stages.progress,
    )
    # In a quantized file, ``keep_float`` names layers that are not quantized. They may be half precision.
    requested = {} if conversion.is_quantized() else find_requested_nodes(plan.view, options.keep_float)
    if conversion.half_policy and conversion.split is not None:
        judged = before if conversion.plain is None else fill_shared_weights(conversion.plain)
        conversion.proto, conversion.account = write_half_by_metric(
            plan, requested, judged, conversion.half_policy, conversion.split, conversion.stages.progress
        )
    else:
        conversion.proto, conversion.account = half.write_half(plan, requested)
    conversion.inputs = half.recast_inputs(conversion.inputs, conversion.account)
    if conversion.ran and options.runtime not in TENSORRT:
        ort_loadability.require_runnable_half(conversion.proto, conversion.example_feeds(), options.precision)
    update_summary(conversion)


def judge_half(conversion: Conversion) -> None:
    """Compute the metrics of a quantized file again after its conversion to half precision."""
    assert conversion.plain is not None
    assert conversion.wish is not None
    assert conversion.quantization is not None
    conversion.quantization = judge_half_file(
        conversion.proto,
        fill_shared_weights(conversion.plain),
        conversion.quantization,
        conversion.wish,
        conversion.split,
        conversion.stages.progress,
    )


def write_file(conversion: Conversion) -> None:
    """Write the model to the output."""
    assert conversion.output is not None
    save_onnx(conversion.proto, conversion.output, data_name=conversion.options.external_data_name)


def write_certificate(conversion: Conversion) -> None:
    """Write the certificate file of the written model."""
    assert conversion.certificate is not None
    assert conversion.output is not None
    assert conversion.recorder is not None
    file = describe_certified_file(conversion.output, conversion.source, conversion.recorder.opset)
    data = certificate_bytes(file, conversion.recorder.records, conversion.summary.findings)
    write_bytes(conversion.certificate, data)


def update_summary(conversion: Conversion) -> None:
    """Update the summary with the file's current opset and nodes."""
    conversion.summary = replace(conversion.summary, opset=half.file_opset(conversion.proto))
    count_nodes(conversion)


def count_nodes(conversion: Conversion) -> None:
    """Update the summary with the file's current node counts."""
    proto = conversion.proto
    conversion.summary = replace(
        conversion.summary, nodes_after=len(proto.graph.node), ops_after=norm_optimizer.count_ops(proto)
    )


def image_notes(images: Sequence[ImageInput]) -> list[str]:
    """Write a note on each image that the file prepares itself.

    Returns:
        one note for each image.
    """
    return [f"the file takes {image.name} as {image}, and prepares it itself" for image in images]


def unmeasured_forms_note(options: ConversionOptions) -> list[str]:
    """Write a note if the forms of norms were chosen without a measurement.

    Returns:
        one note for the CUDA provider, otherwise no notes.
    """
    if options.provider == "cuda":
        return [NOT_MEASURED]
    return []


LOWERING: tuple[ConversionStage[Conversion], ...] = (
    ConversionStage(require_proofs),
    ConversionStage(apply_quantization, "quantize", Conversion.is_quantized),
    ConversionStage(join_ops, "join", Conversion.is_joined),
    ConversionStage(lower_precision, "precision", Conversion.is_half),
    ConversionStage(judge_half, "judge", Conversion.is_quantized_half),
)
"""Stages from the compared float32 file to the requested precision or quantization."""


def _compare_with_original(
    before: onnx.ModelProto | None,
    inputs: Sequence[InputSpec],
    wanted: RewriteOptions,
    made: rewrite_rollback.Made,
    strict: bool,
    tidy: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None,
    known: Sequence[KnownRun] = (),
) -> tuple[rewrite_rollback.Made, list[str], bool]:
    """Compare a rewritten model with the original by `rewrite_rollback.roll_back_differences`.

    Args:
        before: the original model; None if it is too large to keep. Then nothing is compared, and a note says so.

    Returns:
        (model, findings and steps after the comparison; notes; True if onnxruntime ran the model).
    """
    if before is None:
        return (
            made,
            ["the whole model was not compared with the original: its weights exceed compare_limit"],
            False,
        )
    model = before

    def optimize_without_undone(undone: Mapping[RewriteStep, Finding]) -> rewrite_rollback.Made:
        return norm_optimizer.optimize_with_steps(model, replace(wanted, progress=None, undone=undone))

    return rewrite_rollback.roll_back_differences(
        opset_change.write_out_newer_ops(model, wanted),
        inputs,
        optimize_without_undone,
        made,
        tidy,
        strict=strict,
        loads=wanted.runtime not in TENSORRT,
        known=known,
    )
