"""What ``export`` and ``optimize`` share: the state of a conversion, and the stages that both run on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import onnx

from .. import runnable
from ..arguments import check_output
from ..choices import TENSORRT
from ..errors import GraphError
from ..log import norms
from ..model import InputSpec
from ..options import ConversionOptions
from ..precision import precision as half
from ..precision.calibrate import loadable
from ..quantization.half import judged_again
from ..quantization.quantize import described, quantized
from ..quantization.samples import Split, split
from ..quantization.wish import Wish
from ..quantized import Quantization
from ..records import Summary
from ..results import ExportResult, Origin
from ..rewriting import rewrite, whole
from ..rewriting.ledger import Wanted
from ..runtimes.survival import require_survival
from ..sessions import open_session
from ..storage import signing
from ..storage.files import filled, save_onnx
from ..storage.held import Weights
from ..types import PathLike
from .common import NOT_MEASURED, Stages, compared, samples_of, target_of
from .quantizing import merged, wish_of


@dataclass
class Conversion:
    """A model on its way to a file.

    The fields without a default are set by the stage that first knows them.
    """

    options: ConversionOptions
    source: Any
    output: PathLike | None
    stages: Stages
    target: str = field(init=False)
    wish: Wish | None = field(init=False)
    # What half precision is calibrated on: the user's samples, None for generated ones.
    samples: Sequence[Mapping[str, Any]] | None = field(init=False)
    proto: onnx.ModelProto = field(init=False)
    inputs: Sequence[InputSpec] = field(init=False)
    wanted: Wanted = field(init=False)
    # The model as it was before the rewrites; None where it is too large to be held, and once it was compared.
    before: onnx.ModelProto | None = field(init=False)
    rewritten: whole.Made = field(init=False)
    summary: Summary = field(init=False)
    # Whether onnxruntime ran the model.
    ran: bool = False
    notes: list[str] = field(default_factory=list)
    # The model that is quantized, and the samples for it.
    plain: onnx.ModelProto | None = None
    split: Split | None = None
    quantization: Quantization | None = None
    account: half.Account | None = None

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

    def examples(self) -> Sequence[dict[str, np.ndarray]]:
        """Inputs on which the file must run."""
        return []

    def want(self, weights: Weights, *, attentions: bool) -> None:
        """Say what the rewrites shall make of the model, whose large weights ``weights`` holds."""
        self.wanted = Wanted(
            self.target,
            # The ops of a quantized file are joined when it is quantized.
            "standard" if self.wish is not None else self.options.fuse,
            attentions=attentions,
            rows=not self.options.dynamic,
            partial=self.wish is None or self.wish.activation is None,
            progress=self.stages.progress,
            weights=weights,
        )

    def result(self, origin: Origin) -> ExportResult:
        """What the verb returns."""
        norms(self.summary, self.notes)
        proto = filled(self.proto) if self.output is None else None
        path = None if self.output is None else Path(self.output)
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
class Stage(Generic[C]):
    """One step of a conversion.

    ``name`` is what the progress bar shows and the seconds are kept by, "" of a step that takes none. ``when`` says
    whether it is taken.
    """

    run: Callable[[C], None]
    name: str = ""
    when: Callable[[C], bool] = lambda conversion: True


def run_stages(conversion: D, stages: Iterable[Stage[D]]) -> None:
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
        check_output(conversion.output, conversion.source)
    signing.check(conversion.output)
    conversion.target = target_of(options)
    conversion.wish = wish_of(options)
    conversion.samples = samples_of(options)


def fuse_norms(conversion: Conversion) -> None:
    """Rewrite the model, and keep the one before where it is small enough to be compared."""
    is_compared = whole.weight(conversion.proto) <= conversion.options.compare_limit
    conversion.before = conversion.proto if is_compared else None
    conversion.rewritten = rewrite.optimized(conversion.proto, conversion.wanted, conversion.options.strict)
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
    (proto, conversion.summary, _), notes, conversion.ran = compared(
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
        rewrite.require_exact(conversion.summary.findings)


def quantize(conversion: Conversion) -> None:
    """Quantize the model, on the samples that are given.

    Raises:
        InputError: the samples do not fit, or no choice of layers reaches the metrics.
        GraphError: onnxruntime does not load the file, which it should.
    """
    assert conversion.wish is not None
    conversion.plain = conversion.proto
    plain = filled(conversion.proto)
    if conversion.options.calibrate:
        conversion.split = split(conversion.options.calibrate, described(plain, conversion.inputs))
    made, conversion.quantization = quantized(
        plain, conversion.wish, conversion.split, conversion.inputs, conversion.stages.progress
    )
    if conversion.wish.runtime not in TENSORRT:
        try:
            with loadable(made) as file:
                require_survival(file)
                open_session(file, optimize=True)
        # onnxruntime's exceptions share no base class.
        except Exception as error:
            raise GraphError(
                f"the quantized file would not run, and nothing is written: {' '.join(str(error).split())[:300]}; leave"
                " --quantize out, and please report it"
            ) from error
    conversion.proto = made
    recount(conversion)


def join_ops(conversion: Conversion) -> None:
    """Write the ops of ``--fuse portable`` into a quantized file, and join the accounts of both passes.

    They are written last: an Add and a norm that are one op already keep their gamma and beta from the layers behind,
    and a norm is joined with a QuantizeLinear that stands there only now.

    Raises:
        CertificateError: with ``strict``, where a certificate failed.
    """
    options = conversion.options
    wanted = Wanted(conversion.target, options.fuse, attentions=False, rows=False, progress=conversion.stages.progress)
    made = rewrite.optimized(conversion.proto, wanted, options.strict)
    (proto, summary, _), notes, _ = compared(conversion.proto, conversion.inputs, wanted, made, options.strict)
    conversion.summary = replace(conversion.summary, findings=merged(conversion.summary.findings, summary.findings))
    conversion.proto = proto
    conversion.notes += notes
    recount(conversion)


def lower_precision(conversion: Conversion) -> None:
    """Let the file compute in half precision.

    Raises:
        InputError: the samples do not fit.
        GraphError: the file does not run in half precision, where the float32 model does.
    """
    options = conversion.options
    assert options.precision is not None
    conversion.proto, conversion.account = half.converted(
        filled(conversion.proto),
        options.precision,
        conversion.samples if conversion.split is None else conversion.split.calibrating,
        inputs=conversion.inputs,
        keep_io=options.keep_io,
        progress=conversion.stages.progress,
    )
    conversion.inputs = half.recast(conversion.inputs, conversion.account)
    if conversion.ran and options.runtime not in TENSORRT:
        runnable.require_half(conversion.proto, conversion.examples(), options.precision)
    recount(conversion)


def judge_half(conversion: Conversion) -> None:
    """Judge a quantized file again, which is in half precision since.

    Raises:
        InputError: a metric is missed in half precision.
    """
    assert conversion.plain is not None
    assert conversion.wish is not None
    assert conversion.quantization is not None
    conversion.quantization = judged_again(
        conversion.proto,
        filled(conversion.plain),
        conversion.quantization,
        conversion.wish,
        conversion.split,
        conversion.stages.progress,
    )


def write_file(conversion: Conversion) -> None:
    """Write the file to the output."""
    assert conversion.output is not None
    save_onnx(conversion.proto, conversion.output)


def recount(conversion: Conversion) -> None:
    """Let the summary say which opset and which nodes the file has now."""
    conversion.summary = replace(conversion.summary, opset=half.opset_of(conversion.proto))
    count_nodes(conversion)


def count_nodes(conversion: Conversion) -> None:
    """Let the summary say which nodes the file has now."""
    proto = conversion.proto
    conversion.summary = replace(
        conversion.summary, nodes_after=len(proto.graph.node), ops_after=rewrite.op_counts(proto)
    )


def not_measured(options: ConversionOptions) -> list[str]:
    """The note on forms that were not measured."""
    return [NOT_MEASURED] if options.provider == "cuda" else []


LOWERING: tuple[Stage[Conversion], ...] = (
    Stage(require_proofs),
    Stage(quantize, "quantize", Conversion.is_quantized),
    Stage(join_ops, "join", Conversion.is_joined),
    Stage(lower_precision, "precision", Conversion.is_half),
    Stage(judge_half, "judge", Conversion.is_quantized_half),
)
"""From the float32 file that was compared with its model to the one that was asked for."""
