"""The files to compare, the runtimes in which each is run, and what became of each of these."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from ...graphs.decomposed_dequantize import has_code_casts, rewrite_as_dequantize
from ...graphs.qoperator_expansion import unexpandable_ops
from ...graphs.quantization_info import is_quantized, quantized_ranges, read_recorded_ranges, read_recorded_runtime
from ...inputs.input_cases import InputCase
from ...model import ModelSignature
from ...option_values import TENSORRT
from ...precision.emulated_half import emulate_half
from ...precision.type_conversion import FORMATS
from ...runtimes import Runner, RunResult
from ...runtimes.float64_evaluator import inline_functions
from ...runtimes.ort_runner import OrtRunner, explain_missing_cuda, ort_title
from ...runtimes.rounding_draws import RoundingDraw
from ...runtimes.third_party_runner import ThirdPartyRunner, require_runtime
from ...runtimes.third_party_runner import third_party_title as title_of_guest
from ...runtimes.trt_runner import TITLES, TrtRunner, describe_missing_runtime, is_engine, read_runtime
from ...storage.onnx_files import load_onnx, load_small_weights
from ..build.build_function import Engine
from .compute_precision import ComputePrecision, find_compute_precision
from .io_matching import Ends, TensorEnd, graph_ends, match_names, require_used_names
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
# relative: scales are float32
_SAME_RANGE = 1e-6
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

File = Engine | str | os.PathLike[str]


@dataclass(frozen=True)
class ComparedFile:
    """A file to compare. ``label`` tells it from the others; ``runtime`` is an engine's, "" of an ONNX file.

    ``precision``: "fp16" or "bf16" where an ONNX file computes in it and the model does not, else "" (``computing``).
    Of an engine it is known once it is loaded. ``inputs`` and ``outputs``: its names -> the model's, where they differ
    (``names``).
    """

    path: Path
    label: str
    runtime: str = ""
    precision: str = ""
    # of the inputs of an ONNX file, by the model's names
    types: Mapping[str, np.dtype] = field(default_factory=dict)
    computing: ComputePrecision = field(default_factory=ComputePrecision)
    # in an ONNX file, its subgraphs and functions
    ops: frozenset[str] = frozenset()
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    # of an ONNX file that is quantized
    steps: StepBudget | None = field(default=None, compare=False)
    # it was quantized for TensorRT, and onnxruntime need not load it
    elsewhere: bool = False

    # Inputs of the model that it does not take.
    spared: frozenset[str] = frozenset()

    def rename_types(self, types: Mapping[str, np.dtype]) -> dict[str, np.dtype]:
        """Of its inputs, by the model's names."""
        return {self.inputs.get(name, name): kind for name, kind in types.items()}


def open_compared_files(
    files: Iterable[File],
    model: ModelSignature,
    ends: Sequence[TensorEnd],
    names: Mapping[str, str] | None = None,
    ordered: bool = True,
    own_unit: float = 0.0,
    rounding_model: bool = False,
    unused: Collection[str] = (),
    stores_codes: bool = False,
) -> tuple[list[ComparedFile], list[str]]:
    """The files, each once, and notes on them. ONNX files and engines are told apart by their content.

    Args:
        ends: the model's outputs.
        names: a file's name of an input or output -> the model's, as the user says.
        ordered: whether names that differ are matched by their order.
        own_unit: the unit roundoff of the model's coarsest type.
        rounding_model: the model rounds as a quantized file does, so that no budget of steps is needed.
        unused: inputs of the model that it does not use.
        stores_codes: the model holds codes of weights itself, so that those of a file are no rounding.

    Raises:
        InputError: there is none, one is missing, or has other inputs than the model; or a name is said that no file
            has.
        GraphError: one is neither an engine nor ONNX.
    """
    paths = list(
        {os.path.realpath(p): p for p in (Path(f.path if isinstance(f, Engine) else f) for f in files)}.values()
    )
    if not paths:
        raise InputError("there is no file to compare with the model; give an ONNX file or an engine")
    called = [p.name for p in paths]
    given = names or {}
    every = [inspect_file(path, path.name if called.count(path.name) == 1 else str(path)) for path in paths]
    graphs = {s.label: load_small_weights(s.path) for s in every if not s.runtime}
    if len(graphs) == len(every):
        require_used_names(given, model, {label: _io_names(proto.graph) for label, proto in graphs.items()})
    named = list[ComparedFile]()
    notes = list[str]()
    for subject in every:
        if subject.runtime:
            inputs = {spec.name for spec in model.inputs}
            own = {theirs: ours for theirs, ours in given.items() if ours in inputs}
            named.append(replace(subject, inputs=own, outputs={a: b for a, b in given.items() if a not in own}))
            continue
        matched = match_names(subject.label, graphs[subject.label].graph, model, ends, given, ordered, unused)
        notes += matched.notes
        subject = replace(subject, inputs=matched.inputs, outputs=matched.outputs, spared=matched.spared)
        subject = replace(subject, types=subject.rename_types(subject.types))
        if any(own_unit >= FORMATS[half].unit_roundoff for half in subject.computing.halves):
            # The model computes in half itself, and its own roundings say where.
            subject = replace(subject, precision="", computing=replace(subject.computing, lowered=()))
        proto = graphs[subject.label]
        if has_code_casts(proto) and not stores_codes:
            proto = rewrite_as_dequantize(load_onnx(subject.path))
        if is_quantized(proto) and not rounding_model:
            subject, note = _with_step_budget(subject, proto)
            notes.append(note)
        named.append(subject)
    return named, notes


def _with_step_budget(subject: ComparedFile, proto: onnx.ModelProto) -> tuple[ComparedFile, str]:
    """A quantized file with the budget of its steps, and a note on what that is."""
    if inside := unexpandable_ops(proto):
        return subject, (
            f"{subject.label} is quantized by {', '.join(inside)}, of whose steps no error budget can be made; give"
            " a metric: --metric 'cosine>=0.99'"
        )
    calibrated, altered = _calibrated_tensors(proto)
    types = input_types(proto.graph)
    budget = StepBudget(subject.path, subject.inputs, subject.outputs, types, calibrated, altered)
    return replace(subject, steps=budget, elsewhere=read_recorded_runtime(proto) in TENSORRT), (
        f"{subject.label} is quantized: the default rule allows what half a step of each scale in it does to the"
        " outputs, on inputs that are finite and of the usual size"
    )


def _calibrated_tensors(proto: onnx.ModelProto) -> tuple[list[str], str]:
    """What quantizers make whose ranges are the recorded ones, and why one is not."""
    record = read_recorded_ranges(proto)
    now = quantized_ranges(proto)
    for name, (low, high) in record.items():
        ends = now.get(name)
        if ends is not None and not np.allclose(ends, (low, high), rtol=_SAME_RANGE, atol=0):
            return [], (
                f"the range of {name!r} is {ends[0]:.4g} to {ends[1]:.4g}, and the file records that calibration gave"
                f" {low:.4g} to {high:.4g}: its scale or zero point was changed since; quantize the model again"
            )
    return [name for name in record if name in now], ""


def _io_names(graph: onnx.GraphProto) -> Ends:
    inputs, outputs = graph_ends(graph)
    return [end.name for end in inputs], [end.name for end in outputs]


def inspect_file(path: Path, label: str = "") -> ComparedFile:
    """What kind of file it is, and what it takes where it is ONNX; ``label`` is its name unless another is given."""
    if is_engine(path):
        return ComparedFile(path, label or path.name, read_runtime(path))
    proto = load_small_weights(path)
    found = find_compute_precision(proto)
    return ComparedFile(
        path=path,
        label=label or path.name,
        precision=found.precision,
        types=input_types(proto.graph),
        computing=found,
        ops=_op_types(proto),
    )


def _op_types(proto: onnx.ModelProto) -> frozenset[str]:
    waiting = [list(proto.graph.node), *(list(f.node) for f in proto.functions)]
    ops = set[str]()
    while waiting:
        for node in waiting.pop():
            ops.add(node.op_type)
            waiting += [list(a.g.node) for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
            waiting += [list(g.node) for a in node.attribute for g in a.graphs]
    return frozenset(ops)


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
    # of its inputs
    types: Mapping[str, np.dtype] = field(default_factory=dict)
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
                types = self.runner.input_dtypes()
                # what was said of other files' inputs is not this one's
                if self.subject is not None:
                    self.subject = replace(
                        self.subject, inputs={a: b for a, b in self.subject.inputs.items() if a in types}
                    )
                if self.subject is None:
                    self.types = types
                else:
                    self.types = self.subject.rename_types(types)
        except RuntimeUnavailable as error:
            self.unavailable = str(error)
        except GraphError as error:
            if self.subject is not None and self.subject.elsewhere:
                self.unavailable = str(error)
            else:
                self.failure = str(error)
                self.crashes = isinstance(error, RuntimeCrash)

    def infer(self, case: InputCase, feeds: Mapping[str, np.ndarray]) -> RunResult | None:
        """None where it does not run (any more), or this case is none for it."""
        if self.runner is None:
            return None
        if self.subject is not None and self.subject.spared:
            feeds = {name: value for name, value in feeds.items() if name not in self.subject.spared}
        # by the model's names
        if isinstance(self.runner, FileReplica):
            return self._run_replica(feeds)
        feeds = {name: value.astype(self.types.get(name, value.dtype), copy=False) for name, value in feeds.items()}
        theirs = {} if self.subject is None else {ours: name for name, ours in self.subject.inputs.items()}
        feeds = {theirs.get(name, name): value for name, value in feeds.items()}
        if isinstance(self.runner, TrtRunner) and not self.runner.accepts_shapes(feeds):
            self.skipped += 1
            return None
        self.ran += 1
        try:
            result = self.runner.infer(feeds)
            ours = {} if self.subject is None else {a: b for a, b in self.subject.outputs.items() if a in result}
            # what is another's is not its own
            held = {name: value for name, value in result.items() if name not in ours.values()}
            return {ours.get(name, name): value for name, value in (held | {n: result[n] for n in ours}).items()}
        except RuntimeUnavailable as error:
            self.runner, self.unavailable = None, str(error)
        except InputError as error:
            self.runner, self.failure, self.where = None, str(error), case.name
        return None

    def _run_replica(self, feeds: Mapping[str, np.ndarray]) -> RunResult | None:
        assert self.runner is not None
        self.ran += 1
        try:
            return self.runner.infer(feeds)
        except RuntimeUnavailable as error:
            self.runner, self.unavailable = None, str(error)
        return None

    def compute_precision(self, usual: str) -> str:
        """What it is judged by. An engine's inputs and outputs tell; where they are not half, it is that of the ONNX
        files beside it."""
        if self.subject is None or not self.subject.runtime:
            if self.subject is not None:
                return self.subject.precision
            return ""
        if isinstance(self.runner, TrtRunner):
            stated = self.runner.float_types()
        else:
            stated = set[str]()
        return next((short for short, name in FLOATS.items() if name in stated), usual)


def make_candidates(
    compared: Sequence[ComparedFile], runners: Sequence[str] = ()
) -> tuple[list[RuntimeCandidate], list[NotRun]]:
    """Every runtime of this machine for every file, and what can't be run. ``runners``: those of packages, by name."""
    candidates = list[RuntimeCandidate]()
    not_run = list[NotRun]()
    files = [s for s in compared if not s.runtime]
    reason = explain_missing_cuda() if files else ""
    if reason:
        not_run.append(NotRun("onnxruntime CUDA", reason))
    for subject in files:
        candidates += _replica_candidates(subject)
        for provider in ("cpu",) if reason else ("cpu", "cuda"):
            candidates += [_onnxruntime_candidate(subject, provider, optimize) for optimize in (False, True)]
        for name in dict.fromkeys(runners):
            make = partial(ThirdPartyRunner, name, subject.path)
            candidates.append(
                RuntimeCandidate(title_of_guest(require_runtime(name)), make, subject, types=subject.types)
            )
        # onnxruntime's CPU provider has no bfloat16, and computes single float16 nodes in float32, without their Casts.
        if subject.precision or subject.computing.lowered or "bf16" in subject.computing.halves:
            wide = {n: np.dtype(np.float32) if is_float_dtype(t) else t for n, t in subject.types.items()}
            candidates.append(RuntimeCandidate(STEPWISE, partial(_open_stepwise, subject.path), subject, types=wide))
    if len(files) == len(compared):
        not_run.append(NotRun("TensorRT", "no engine was given"))
    for subject in (s for s in compared if s.runtime):
        name = f"{TITLES[subject.runtime]} ({subject.label})"
        if lack := describe_missing_runtime(subject.runtime):
            not_run.append(NotRun(name, lack, subject.label))
        else:
            candidates.append(RuntimeCandidate(name, partial(TrtRunner, subject.path), subject))
    return candidates, not_run


def _onnxruntime_candidate(subject: ComparedFile, provider: str, optimize: bool) -> RuntimeCandidate:
    make = partial(OrtRunner, subject.path, optimize=optimize, provider=provider)
    return RuntimeCandidate(
        ort_title(provider, optimize=optimize), make, subject, provider, optimize, types=subject.types
    )


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
