"""The files to compare, the runtimes in which each is run, and what became of each of these."""

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
from ...runtimes.ort_runner import OrtRunner, explain_missing_cuda, ort_title
from ...runtimes.rounding_draws import RoundingDraw
from ...runtimes.third_party_runner import ThirdPartyRunner, require_runtime
from ...runtimes.third_party_runner import third_party_title as title_of_guest
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
# a file in half precision as a GPU computes it; the CPU has few half kernels
STEPWISE = "each node in float32, rounded"
FLOATS = {name: form.dtype.name for name, form in FORMATS.items()}
HALF_TYPES = tuple(form.dtype for form in FORMATS.values())

# of a NaN in these ONNX says nothing, and onnxruntime drops it (1.31.1: a maximum passes it by, a recurrent net's gates
# clip it)
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
# How the names of ONNX's and onnxruntime's ops begin that take the range of a quantization from their input.
DYNAMIC_QUANTIZING = "DynamicQuantize"
NAN_BLIND = frozenset(_MAXIMA | {"LSTM", "GRU", "RNN", "ScatterElements", "ScatterND"})
# Of a coordinate that is not finite ONNX says nothing, and kernels cut it off at either end of the image. No code of a
# quantizer is a NaN, nor does an output tell that there was one.
FINITE_ALONE = frozenset({"GridSample", "RoiAlign", "QuantizeLinear"})

File = Engine | PathLike


@dataclass(frozen=True, kw_only=True)
class ComparedFile(RenamedFile):
    """A file to compare. ``label`` tells it from the others; ``runtime`` is an engine's, "" of an ONNX file.

    ``precision``: "fp16" or "bf16" where an ONNX file computes in it and the model does not, else "" (``computing``).
    Of an engine it is known once it is loaded.
    """

    label: str
    runtime: str = ""
    precision: str = ""
    computing: ComputePrecision = field(default_factory=ComputePrecision)
    # in an ONNX file, its subgraphs and functions
    ops: frozenset[str] = frozenset()
    # of an ONNX file that is quantized
    steps: StepBudget | None = field(default=None, compare=False)
    # it was quantized for TensorRT, and onnxruntime need not load it
    elsewhere: bool = False

    # Inputs of the model that it does not take.
    spared: frozenset[str] = frozenset()


def inspect_file(path: Path, label: str = "") -> ComparedFile:
    """What kind of file it is, and what it takes where it is ONNX; ``label`` is its name unless another is given."""
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
    """The types of a file's inputs.

    Raises:
        InputError: one is no tensor.
    """
    if (other := next((v.name for v in graph.input if not v.type.tensor_type.elem_type), None)) is not None:
        raise InputError(
            f"the file's input {other!r} is a sequence, an optional or of no type; only tensors can be given: make"
            " it one"
        )
    return {v.name: np.dtype(onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type)) for v in graph.input}


@dataclass(frozen=True)
class NotRun:
    """A runtime that was not run, and why. It has not passed."""

    runtime: str
    reason: str
    # "" where it is so for every file
    file: str = ""

    def __str__(self) -> str:
        return f"{self.runtime}: {self.reason}"


@dataclass
class RuntimeCandidate:
    """A runtime under test on one file, and what became of it."""

    name: str
    make: Callable[[], Runner]
    # None of eager
    subject: ComparedFile | None = None
    # of onnxruntime, "cpu" or "cuda"
    provider: str = ""
    optimize: bool = False
    runner: Runner | None = None
    # why it can't be run here
    unavailable: str | None = None
    # why it does not run the model, which it should
    failure: str | None = None
    # the process that opens it there ends
    crashes: bool = False
    # the case in which it failed
    where: str = ""
    # cases outside an engine's profile
    skipped: int = 0
    # cases
    ran: int = 0
    # of error that is allowed in a quantized file
    sources: tuple[str, ...] = BOTH
    # (output, kind of case)
    tallies: dict[tuple[str, str], ErrorTally] = field(default_factory=dict)
    # by the rules given
    measures: OutputMeasures = field(default_factory=lambda: OutputMeasures(Policy()))
    # onnxruntime's optimizers that break the file
    culprit: tuple[str, ...] = ()
    advice: str = ""
    # of onnxruntime's session, NAME=VALUE, with which it was judged
    option: str = ""
    # what it does without that option
    without: str = ""

    @property
    def file_label(self) -> str:
        if self.subject is not None:
            return self.subject.label
        return ""

    def load(self, stack: ExitStack) -> None:
        try:
            self.runner = stack.enter_context(self.make())
            if isinstance(self.runner, TrtRunner):
                assert self.subject is not None
                types = self.runner.input_dtypes()
                # what was said of other files' inputs is not this one's
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
        """None where it does not run (any more), or this case is none for it."""
        if self.runner is None:
            return None
        subject = self.subject
        if subject is not None and subject.spared:
            feeds = {name: value for name, value in feeds.items() if name not in subject.spared}
        # A replica takes and gives the model's names.
        renames = subject is not None and not isinstance(self.runner, FileReplica)
        if subject is not None and renames:
            feeds = subject.own_feeds(feeds)
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

    def compute_precision(self, usual: str) -> str:
        """What it is judged by. An engine's inputs and outputs tell; where they are not half, it is that of the ONNX
        files beside it."""
        if self.subject is None:
            return ""
        if not self.subject.runtime:
            return self.subject.precision
        stated = self.runner.float_types() if isinstance(self.runner, TrtRunner) else ()
        return next((short for short, name in FLOATS.items() if name in stated), usual)


def make_candidates(
    compared: Sequence[ComparedFile], runners: Sequence[str] = ()
) -> tuple[list[RuntimeCandidate], list[NotRun]]:
    """Every runtime of this machine for every file, and what can't be run. ``runners``: those of packages, by name."""
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
            make = partial(ThirdPartyRunner, name, subject.path)
            candidates.append(RuntimeCandidate(title_of_guest(require_runtime(name)), make, subject))
        # onnxruntime's CPU provider has no bfloat16, and computes single float16 nodes in float32, without their Casts.
        if subject.precision or subject.computing.lowered or "bf16" in subject.computing.halves:
            wide = {n: np.dtype(np.float32) if is_float_dtype(t) else t for n, t in subject.types.items()}
            stepwise = replace(subject, types=wide)
            candidates.append(RuntimeCandidate(STEPWISE, partial(_open_stepwise, subject.path), stepwise))
    if len(files) == len(compared):
        not_run.append(NotRun("TensorRT", "no engine was given"))
    for subject in (s for s in compared if s.runtime):
        name = f"{TITLES[subject.runtime]} ({subject.label})"
        if lack := describe_missing_runtime(subject.runtime):
            not_run.append(NotRun(name, lack, subject.label))
        else:
            candidates.append(RuntimeCandidate(name, partial(TrtRunner, subject.path), subject))
    return candidates, not_run


def _replica_candidates(subject: ComparedFile) -> list[RuntimeCandidate]:
    """A quantized file in float64, without rounding its activations and with it."""
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
    """
    Raises:
        RuntimeUnavailable: the file holds half precision in a body of control flow.
    """
    try:
        return OrtRunner(emulate_half(inline_functions(load_onnx(path))), optimize=False)
    except GraphError as error:
        raise RuntimeUnavailable(str(error)) from error
