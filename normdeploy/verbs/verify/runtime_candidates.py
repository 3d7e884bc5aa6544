"""Define the files to compare, the runtimes that run each file (the candidates), and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from ...compare.error_tally import ErrorTally
from ...compare.policy import Policy
from ...dtypes import is_float_dtype
from ...errors import GraphError, InputError, RuntimeCrash, RuntimeUnavailable
from ...inputs.input_cases import InputCase
from ...precision.emulated_half import emulate_half
from ...precision.type_conversion import FORMATS
from ...runtimes import Runner, RunResult
from ...runtimes.float64_evaluator import inline_functions
from ...runtimes.named_runners import NamedRunner, require_named_runner
from ...runtimes.ort_runner import OrtRunner, explain_missing_cuda, ort_title
from ...runtimes.rounding_draws import RoundingDraw
from ...runtimes.trt_runner import TITLES, TrtRunner, describe_missing_runtime, is_engine, read_runtime
from ...storage.onnx_files import iter_bodies, load_onnx, load_small_weights
from ...types import Arrays, PathLike
from ..build.build_function import Engine
from .compute_precision import ComputePrecision, find_compute_precision
from .io_matching import RenamedFile
from .quantization_budget import BOTH, ROUNDED, UNROUNDED, FileReplica, StepBudget
from .rule_measures import OutputMeasures

OFF = ort_title("cpu", optimize=False)
ON = ort_title("cpu", optimize=True)
# Name of the runtime that emulates a half-precision file as a GPU computes it. It is needed because the CPU has few
# half-precision kernels.
STEPWISE = "each node in float32, rounded"
FLOATS = {name: form.dtype.name for name, form in FORMATS.items()}
HALF_TYPES = tuple(form.dtype for form in FORMATS.values())

# Ops for which ONNX does not define the result of a NaN, and in which onnxruntime loses the NaN. In onnxruntime 1.31.1,
# a maximum ignores a NaN, and the gates of a recurrent layer clip a NaN to a number.
_MAXIMA = {
    "MaxPool",
    "GlobalMaxPool",
    "ReduceMax",
    "ReduceMin",
    "ArgMax",
    "ArgMin",
    "TopK",
    "NonMaxSuppression",
    "RoiAlign",
}
# Prefix of the names of ops (of ONNX and onnxruntime) that take a quantization range from their input.
DYNAMIC_QUANTIZING = "DynamicQuantize"
NAN_BLIND = frozenset(_MAXIMA | {"LSTM", "GRU", "RNN", "ScatterElements", "ScatterND"})
# Ops that are compared only on finite inputs. ONNX does not define a non-finite coordinate, and kernels clip it to
# either end of the image. Quantization codes can't represent a NaN, and outputs do not show that there was a NaN.
FINITE_ALONE = frozenset({"GridSample", "RoiAlign", "QuantizeLinear"})

File = Engine | PathLike


@dataclass(frozen=True, kw_only=True)
class ComparedFile(RenamedFile):
    """File to compare.

    Attributes:
        label: name that distinguishes it from the other files.
        runtime: runtime of an engine; "" for an ONNX file.
        precision: "fp16" or "bf16" if an ONNX file computes in this type and the model does not, otherwise "". The
            precision of an engine is known only after loading.
        computing: precision of an ONNX file's nodes.
        ops: op types in an ONNX file, its subgraphs and functions.
        steps: error budget of a quantized ONNX file; otherwise None.
        elsewhere: True if the file was quantized for TensorRT; onnxruntime then need not load it.
        spared: inputs of the model that the file does not have.
    """

    label: str
    runtime: str = ""
    precision: str = ""
    computing: ComputePrecision = field(default_factory=ComputePrecision)
    ops: frozenset[str] = frozenset()
    steps: StepBudget | None = field(default=None, compare=False)
    elsewhere: bool = False
    spared: frozenset[str] = frozenset()


def inspect_file(path: Path, label: str = "") -> ComparedFile:
    """Read the kind of a file and, for an ONNX file, its inputs, ops and precision.

    Args:
        label: name for the file; "" means the file's name.

    Returns:
        the file to compare.
    """
    if is_engine(path):
        return ComparedFile(path=path, label=label or path.name, runtime=read_runtime(path))
    proto = load_small_weights(path)
    found = find_compute_precision(proto)
    return ComparedFile(
        path=path,
        label=label or path.name,
        precision=found.precision,
        types=input_types(proto.graph),
        computing=found,
        ops=frozenset(node.op_type for body in iter_bodies(proto) for node in body.node),
    )


def input_types(graph: onnx.GraphProto) -> dict[str, np.dtype]:
    """Read the dtypes of a file's inputs.

    Returns:
        input name -> dtype.

    Raises:
        InputError: an input is not a tensor.
    """
    if (other := next((v.name for v in graph.input if not v.type.tensor_type.elem_type), None)) is not None:
        raise InputError(
            f"the file's input {other!r} is a sequence, an optional or untyped; only tensors are supported:"
            " make it a tensor"
        )
    return {v.name: np.dtype(onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type)) for v in graph.input}


@dataclass(frozen=True)
class NotRun:
    """Runtime that was not run, with the reason. It does not count as passed.

    Attributes:
        file: file that the runtime did not run; "" for every file.
    """

    runtime: str
    reason: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.runtime}: {self.reason}"


@dataclass(frozen=True)
class OrderAgreement:
    """Choices of a runtime (topk, sort, argmax) on one input that differ from the reference's, but that rounding
    explains.

    Attributes:
        differing: number of picks that differ.
        ratio: largest gap of two scores in another order, as a share of the gap that rounding explains.
    """

    differing: int
    ratio: float


@dataclass
class RuntimeCandidate:
    """One runtime with one file, and its results.

    Attributes:
        make: function that opens the runner.
        subject: the file; None for eager mode.
        provider: "cpu" or "cuda" for onnxruntime, a key of ``BUILTIN_RUNNERS``, otherwise "".
        lowered: "fp16" or "bf16" if the runtime computes in this type and the file does not.
        finite_only: True if the runtime guarantees nothing for NaN and infinities.
        optimize: True if onnxruntime's optimizer is on.
        unavailable: reason why the runtime can't run on this machine; None if it can.
        failure: reason why the runtime fails to load or run the file, although it is available; None if it runs the
            file.
        crashes: True if the process that opens the file in this runtime crashes.
        where: input case in which it failed.
        skipped: number of cases outside an engine's profile.
        ran: number of cases that ran.
        sources: sources of error that are allowed for a quantized file ("activations", "weights").
        tallies: (output, kind of case) -> tally of errors.
        measures: measures of the given rules.
        culprit: optimizers of onnxruntime that break the file.
        advice: advice that follows the reason of a failure.
        option: session option of onnxruntime, NAME=VALUE, with which the file was judged; "" without an option.
        without: note on the behavior without this option.
        followed: input case -> agreement of the runtime's choices with the reference, where they differ but rounding
            explains them and the runtime passes.
        wrong_choice: note on the first choice that rounding does not explain; "" if there is none.
    """

    name: str
    make: Callable[[], Runner]
    subject: ComparedFile | None = None
    provider: str = ""
    optimize: bool = False
    lowered: str = ""
    finite_only: bool = False
    runner: Runner | None = None
    unavailable: str | None = None
    failure: str | None = None
    crashes: bool = False
    where: str = ""
    skipped: int = 0
    ran: int = 0
    sources: tuple[str, ...] = BOTH
    tallies: dict[tuple[str, str], ErrorTally] = field(default_factory=dict)
    measures: OutputMeasures = field(default_factory=lambda: OutputMeasures(Policy()))
    culprit: tuple[str, ...] = ()
    advice: str = ""
    option: str = ""
    without: str = ""
    followed: dict[str, OrderAgreement] = field(default_factory=dict)
    wrong_choice: str = ""

    @property
    def file_label(self) -> str:
        """Return the file's label; "" for eager mode."""
        if self.subject is not None:
            return self.subject.label
        return ""

    def load(self, stack: ExitStack) -> None:
        """Open the runner. If it can't be opened, record the reason."""
        try:
            self.runner = stack.enter_context(self.make())
            if isinstance(self.runner, TrtRunner):
                assert self.subject is not None
                types = self.runner.input_dtypes()
                # The map may also have names of inputs of other files, which this engine does not have.
                own = {theirs: ours for theirs, ours in self.subject.inputs.items() if theirs in types}
                subject = replace(self.subject, inputs=own)
                self.subject = replace(subject, types=subject.rename_types(types))
        except RuntimeUnavailable as error:
            self.unavailable = str(error)
        except GraphError as error:
            if self.subject is not None and self.subject.elsewhere:
                self.unavailable = str(error)
            else:
                self.failure = str(error)
                self.crashes = isinstance(error, RuntimeCrash)

    def infer(self, case: InputCase, feeds: Arrays) -> RunResult | None:
        """Run one case and translate the names of inputs and outputs.

        Returns:
            the outputs by the model's names; None if the runner can't run, or if the case is outside an engine's
            profile.
        """
        if self.runner is None:
            return None
        subject = self.subject
        # A `FileReplica` already uses the model's names.
        renames = subject is not None and not isinstance(self.runner, FileReplica)
        feeds = self.file_feeds(feeds) if renames else self._without_spared(feeds)
        if isinstance(self.runner, TrtRunner) and not self.runner.accepts_shapes(feeds):
            self.skipped += 1
            return None
        self.ran += 1
        try:
            result = self.runner.infer(feeds)
        except RuntimeUnavailable as error:
            self.runner = None
            self.unavailable = str(error)
            return None
        except InputError as error:
            self.runner = None
            self.failure = str(error)
            self.where = case.name
            return None
        if subject is not None and renames:
            return subject.model_results(result)
        return result

    def file_feeds(self, feeds: Arrays) -> Arrays:
        """Select and rename the inputs that the file has, and cast them to the file's dtypes.

        Returns:
            the file's name -> array.
        """
        feeds = self._without_spared(feeds)
        if self.subject is None:
            return feeds
        return self.subject.own_feeds(feeds)

    def _without_spared(self, feeds: Arrays) -> Arrays:
        if self.subject is None or not self.subject.spared:
            return feeds
        return {name: value for name, value in feeds.items() if name not in self.subject.spared}

    def compute_precision(self, usual: str) -> str:
        """Determine the precision in which the candidate is judged.

        An engine is judged by the half type of its inputs and outputs.

        Args:
            usual: precision of the compared ONNX files; it is used for an engine without half-precision inputs and
                outputs.

        Returns:
            "fp16", "bf16", or "" for the model's own precision.
        """
        if self.subject is None:
            return ""
        if not self.subject.runtime:
            return self.subject.precision or self.lowered
        stated = self.runner.float_types() if isinstance(self.runner, TrtRunner) else ()
        return next((short for short, name in FLOATS.items() if name in stated), usual)


def make_candidates(
    compared: Sequence[ComparedFile], runners: Sequence[str] = ()
) -> tuple[list[RuntimeCandidate], list[NotRun]]:
    """List a candidate for every file in every runtime of this machine, and the runtimes that can't run.

    Args:
        runners: names of further runtimes.

    Returns:
        (candidates, runtimes that can't run).
    """
    candidates = list[RuntimeCandidate]()
    not_run = list[NotRun]()
    files = [s for s in compared if not s.runtime]
    if files:
        reason = explain_missing_cuda()
    else:
        reason = ""
    if reason:
        not_run.append(NotRun("onnxruntime CUDA", reason))
    for subject in files:
        candidates += _replica_candidates(subject)
        for provider in ("cpu",) if reason else ("cpu", "cuda"):
            for optimize in (False, True):
                make_session = partial(OrtRunner, subject.path, optimize=optimize, provider=provider)
                title = ort_title(provider, optimize=optimize)
                candidates.append(RuntimeCandidate(title, make_session, subject, provider, optimize))
        for name in dict.fromkeys(runners):
            further = require_named_runner(name)
            if lack := further.explain_missing():
                not_run.append(NotRun(further.title, lack, subject.label))
            else:
                candidates.append(_further_candidate(further, subject))
        # The stepwise runtime is needed for half precision: onnxruntime's CPU provider has no bfloat16, and it removes
        # Casts to compute single float16 nodes in float32.
        if subject.precision or subject.computing.lowered or "bf16" in subject.computing.halves:
            wide = {n: np.dtype(np.float32) if is_float_dtype(t) else t for n, t in subject.types.items()}
            stepwise = replace(subject, types=wide)
            candidates.append(RuntimeCandidate(STEPWISE, partial(_open_stepwise, subject.path), stepwise))
    if len(files) == len(compared):
        not_run.append(NotRun("TensorRT", "no engine was passed"))
    for subject in (s for s in compared if s.runtime):
        name = f"{TITLES[subject.runtime]} ({subject.label})"
        if lack := describe_missing_runtime(subject.runtime):
            not_run.append(NotRun(name, lack, subject.label))
        else:
            candidates.append(RuntimeCandidate(name, partial(TrtRunner, subject.path), subject))
    return candidates, not_run


def _further_candidate(runner: NamedRunner, subject: ComparedFile) -> RuntimeCandidate:
    return RuntimeCandidate(
        runner.title,
        partial(runner.open, subject.path),
        subject,
        runner.provider,
        lowered=runner.precision,
        finite_only=runner.finite_only,
        advice=runner.describe_limits(load_small_weights(subject.path)),
    )


def _replica_candidates(subject: ComparedFile) -> list[RuntimeCandidate]:
    """Return two candidates that evaluate a quantized file in float64: one without and one with rounding of
    activations.
    """
    if subject.steps is None:
        return []
    rounded = partial(FileReplica, subject.steps, RoundingDraw(), ROUNDED)
    return [
        RuntimeCandidate(UNROUNDED, partial(_unrounded_replica, subject.steps), subject, sources=("weights",)),
        RuntimeCandidate(ROUNDED, rounded, subject, sources=BOTH),
    ]


def _unrounded_replica(steps: StepBudget) -> FileReplica:
    return FileReplica(steps, RoundingDraw(activations="exact", clips=not steps.calibrated), UNROUNDED)


def _open_stepwise(path: Path) -> Runner:
    """Open a file in stepwise half precision.

    Raises:
        RuntimeUnavailable: the file has half precision in a body of control flow.
    """
    try:
        return OrtRunner(emulate_half(inline_functions(load_onnx(path))), optimize=False)
    except GraphError as error:
        raise RuntimeUnavailable(str(error)) from error
