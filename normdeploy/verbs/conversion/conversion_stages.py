"""What ``export`` and ``optimize`` share: the state of a conversion, and the stages that both run on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import onnx

from ...errors import GraphError
from ...findings.precision_report import PrecisionReport
from ...findings.quantization_report import QuantizationReport
from ...findings.records import Finding, Summary
from ...log import log_norms
from ...model import InputSpec
from ...option_values import TENSORRT
from ...ort_sessions.session import open_session
from ...precision import half_conversion as half
from ...precision.tensor_ranges import serialize_for_session
from ...quantization.half_evaluation import judge_half_file
from ...quantization.quantization_request import QuantizationRequest
from ...quantization.quantizer import quantize_model, recorded_or_declared_inputs
from ...quantization.sample_split import SampleSplit, split_samples
from ...rewriting import norm_optimizer, rewrite_rollback
from ...rewriting.rewrite_ledger import RewriteOptions, RewriteStep
from ...runtimes import ort_loadability
from ...runtimes.crash_check import require_no_crash
from ...storage import record_signing
from ...storage.onnx_files import fill_shared_weights, save_onnx
from ...storage.shared_weights import Weights
from ...types import PathLike
from ...verb_options import ConversionOptions
from ..arguments.argument_validation import require_writable_output
from ..arguments.export_result import ExportResult, ModelOrigin
from ..stage_progress import StageTimer
from .conversion_request import parse_quantization_request, read_calibration_samples, select_target
from .finding_merge import merge_findings

NOT_MEASURED = "the forms for onnxruntime's CUDA provider were chosen by its documents: they were not measured"


@dataclass
class Conversion:
    """A model on its way to a file.

    The fields without a default are set by the stage that first knows them.
    """

    options: ConversionOptions
    source: Any
    output: PathLike | None
    stages: StageTimer
    target: str = field(init=False)
    wish: QuantizationRequest | None = field(init=False)
    # What half precision is calibrated on: the user's samples, None for generated ones.
    samples: Sequence[Mapping[str, Any]] | None = field(init=False)
    proto: onnx.ModelProto = field(init=False)
    inputs: Sequence[InputSpec] = field(init=False)
    wanted: RewriteOptions = field(init=False)
    # The model as it was before the rewrites; None where it is too large to be held, and once it was compared.
    before: onnx.ModelProto | None = field(init=False)
    rewritten: rewrite_rollback.Made = field(init=False)
    summary: Summary = field(init=False)
    # Whether onnxruntime ran the model.
    ran: bool = False
    notes: list[str] = field(default_factory=list)
    # The model that is quantized, and the samples for it.
    plain: onnx.ModelProto | None = None
    split: SampleSplit | None = None
    quantization: QuantizationReport | None = None
    account: PrecisionReport | None = None

    def is_quantized(self) -> bool:
        return self.wish is not None

    def is_joined(self) -> bool:
        """Whether ops of our own are written into the quantized file."""
        return self.wish is not None and self.options.fuse == "portable"

    def is_half(self) -> bool:
        return self.options.precision is not None

    def is_quantized_half(self) -> bool:
        return self.is_quantized() and self.is_half()

    def is_written(self) -> bool:
        return self.output is not None

    def example_feeds(self) -> Sequence[dict[str, np.ndarray]]:
        """Inputs on which the file must run."""
        return []

    def set_wanted(self, weights: Weights, *, attentions: bool) -> None:
        """Say what the rewrites shall make of the model, whose large weights ``weights`` holds."""
        self.wanted = RewriteOptions(
            self.target,
            # The ops of a quantized file are joined when it is quantized.
            "standard" if self.wish is not None else self.options.fuse,
            attentions=attentions,
            rows=not self.options.dynamic,
            partial=self.wish is None or self.wish.activation_format is None,
            progress=self.stages.progress,
            weights=weights,
        )

    def make_result(self, origin: ModelOrigin) -> ExportResult:
        """What the verb returns."""
        log_norms(self.summary, self.notes)
        if self.output is None:
            proto = fill_shared_weights(self.proto)
        else:
            proto = None
        if self.output is None:
            path = None
        else:
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


# What a stage works on; and for whoever runs stages.
C = TypeVar("C", bound=Conversion, contravariant=True)
D = TypeVar("D", bound=Conversion)


@dataclass(frozen=True)
class ConversionStage(Generic[C]):
    """One step of a conversion.

    ``name`` is what the progress bar shows and the seconds are kept by, "" of a step that takes none. ``when`` says
    whether it is taken.
    """

    run: Callable[[C], None]
    name: str = ""
    when: Callable[[C], bool] = lambda conversion: True


def run_stages(conversion: D, stages: Iterable[ConversionStage[D]]) -> None:
    """Run the stages in their order."""
    for stage in stages:
        if not stage.when(conversion):
            continue
        if stage.name:
            with conversion.stages(stage.name):
                stage.run(conversion)
        else:
            stage.run(conversion)


# ------------------------------------------------------------------ the stages, in the order in which they are run


def require_options(conversion: Conversion) -> None:
    """Look at the options before any work.

    Raises:
        InputError: options contradict each other, or the samples can't be read.
        NormdeployError: the output can't be written.
    """
    options = conversion.options
    if conversion.output is not None:
        require_writable_output(conversion.output, conversion.source)
    record_signing.require_usable_team_key(conversion.output)
    conversion.target = select_target(options)
    conversion.wish = parse_quantization_request(options)
    conversion.samples = read_calibration_samples(options)


def fuse_norms(conversion: Conversion) -> None:
    """Rewrite the model, and keep the one before where it is small enough to be compared."""
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
    conversion: Conversion, tidy: Callable[[onnx.ModelProto], onnx.ModelProto], tidied: onnx.ModelProto
) -> onnx.ModelProto:
    """Compare the whole model before and after, and take back what changes it.

    Args:
        tidy: cleans a model up.
        tidied: the rewritten model, cleaned up.

    Returns:
        ``tidied``, or what is left of it.
    """
    _, summary, taken = conversion.rewritten
    made = (tidied, summary, taken)
    (proto, conversion.summary, _), notes, conversion.ran = _compare_with_original(
        conversion.before, conversion.inputs, conversion.wanted, made, conversion.options.strict, tidy
    )
    conversion.notes += notes
    return proto


def require_proofs(conversion: Conversion) -> None:
    """Require what ``strict_proof`` asks for.

    Raises:
        CertificateError: a certificate is not exact.
    """
    if conversion.options.strict_proof:
        norm_optimizer.require_exact(conversion.summary.findings)


def apply_quantization(conversion: Conversion) -> None:
    """Quantize the model, on the samples that are given.

    Raises:
        InputError: the samples do not fit, or no choice of layers reaches the metrics.
        GraphError: onnxruntime does not load the file, which it should.
    """
    assert conversion.wish is not None
    conversion.plain = conversion.proto
    plain = fill_shared_weights(conversion.proto)
    if conversion.options.calibrate:
        conversion.split = split_samples(
            conversion.options.calibrate, recorded_or_declared_inputs(plain, conversion.inputs)
        )
    made, conversion.quantization = quantize_model(
        plain, conversion.wish, conversion.split, conversion.inputs, conversion.stages.progress
    )
    if conversion.wish.runtime not in TENSORRT:
        try:
            with serialize_for_session(made) as file:
                require_no_crash(file)
                open_session(file, optimize=True)
        # onnxruntime's exceptions share no base class.
        except Exception as error:
            raise GraphError(
                f"the quantized file would not run, and nothing is written: {' '.join(str(error).split())[:300]}; leave"
                " --quantize out, and please report it"
            ) from error
    conversion.proto = made
    update_summary(conversion)


def join_ops(conversion: Conversion) -> None:
    """Write the ops of ``--fuse portable`` into a quantized file, and join the accounts of both passes.

    They are written last: an Add and a norm that are one op already keep their gamma and beta from the layers behind,
    and a norm is joined with a QuantizeLinear that stands there only now.

    Raises:
        CertificateError: with ``strict``, where a certificate failed.
    """
    options = conversion.options
    wanted = RewriteOptions(
        conversion.target, options.fuse, attentions=False, rows=False, progress=conversion.stages.progress
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
    """Let the file compute in half precision.

    Raises:
        InputError: the samples do not fit.
        GraphError: the file does not run in half precision, where the float32 model does.
    """
    options = conversion.options
    assert options.precision is not None
    conversion.proto, conversion.account = half.convert_to_half(
        fill_shared_weights(conversion.proto),
        options.precision,
        conversion.samples if conversion.split is None else conversion.split.calibrating,
        inputs=conversion.inputs,
        keep_io=options.keep_io,
        progress=conversion.stages.progress,
    )
    conversion.inputs = half.recast_inputs(conversion.inputs, conversion.account)
    if conversion.ran and options.runtime not in TENSORRT:
        ort_loadability.require_runnable_half(conversion.proto, conversion.example_feeds(), options.precision)
    update_summary(conversion)


def judge_half(conversion: Conversion) -> None:
    """Judge a quantized file again, which is in half precision since.

    Raises:
        InputError: a metric is missed in half precision.
    """
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
    """Write the file to the output."""
    assert conversion.output is not None
    save_onnx(conversion.proto, conversion.output)


def update_summary(conversion: Conversion) -> None:
    """Let the summary say which opset and which nodes the file has now."""
    conversion.summary = replace(conversion.summary, opset=half.file_opset(conversion.proto))
    count_nodes(conversion)


def count_nodes(conversion: Conversion) -> None:
    """Let the summary say which nodes the file has now."""
    proto = conversion.proto
    conversion.summary = replace(
        conversion.summary, nodes_after=len(proto.graph.node), ops_after=norm_optimizer.count_ops(proto)
    )


def unmeasured_forms_note(options: ConversionOptions) -> list[str]:
    """The note on forms that were not measured."""
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
"""From the float32 file that was compared with its model to the one that was asked for."""


def _compare_with_original(
    before: onnx.ModelProto | None,
    inputs: Sequence[InputSpec],
    wanted: RewriteOptions,
    made: rewrite_rollback.Made,
    strict: bool,
    tidy: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None,
) -> tuple[rewrite_rollback.Made, list[str], bool]:
    """As `rewrite_rollback.roll_back_differences`; ``before`` is None where it is too large to be held."""
    if before is None:
        return (
            made,
            ["the whole model was not compared with the one before: its weights are beyond compare_limit"],
            False,
        )
    model = before

    def optimize_without_undone(undone: Mapping[RewriteStep, Finding]) -> rewrite_rollback.Made:
        return norm_optimizer.optimize_with_steps(model, replace(wanted, progress=None, undone=undone))

    return rewrite_rollback.roll_back_differences(
        model, inputs, optimize_without_undone, made, tidy, strict=strict, loads=wanted.runtime not in TENSORRT
    )
