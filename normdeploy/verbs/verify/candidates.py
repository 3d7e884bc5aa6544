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

from ...choices import TENSORRT
from ...compare.tally import Tally
from ...element_types import is_float
from ...engines.build import Engine
from ...errors import GraphError, InputError, RuntimeCrash, RuntimeUnavailable
from ...graphs.handwritten import casts_codes, with_pairs
from ...graphs.qoperators import sealed
from ...graphs.quantized import is_quantized, ranges, recorded_ranges, recorded_runtime
from ...model import Signature
from ...precision.retype import FORMATS
from ...precision.stepwise import stepwise
from ...runtimes import Runner, RunResult
from ...runtimes.draws import Draw
from ...runtimes.exact import inlined
from ...runtimes.guests import GuestRunner, required
from ...runtimes.guests import title as title_of_guest
from ...runtimes.ort import OrtRunner, no_cuda, title
from ...runtimes.trt import TITLES, TrtRunner, is_engine, missing, runtime_of
from ...storage.files import load_onnx, load_small_weights
from .cases import Case
from .computing import Computing, computing
from .measured import Measures
from .names import End, Ends, check_used, ends_of, match
from .policy import Policy
from .steps import BOTH, ROUNDED, UNROUNDED, Replica, StepBudget

OFF, ON = title("cpu", optimize=False), title("cpu", optimize=True)
STEPWISE = (  # a file in half precision as a GPU computes it; the CPU has few half kernels
    "each node in float32, rounded"
)
FLOATS = {name: form.dtype.name for name, form in FORMATS.items()}
HALF_TYPES = tuple(form.dtype for form in FORMATS.values())

# of a NaN in these ONNX says nothing, and onnxruntime drops it (1.31.1: a maximum passes it by, a recurrent net's gates
# clip it)
_SAME_RANGE = 1e-6  # relative: scales are float32
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
class Subject:
    """A file to compare. ``label`` tells it from the others; ``runtime`` is an engine's, "" of an ONNX file.

    ``precision``: "fp16" or "bf16" where an ONNX file computes in it and the model does not, else "" (``computing``).
    Of an engine it is known once it is loaded. ``inputs`` and ``outputs``: its names -> the model's, where they differ
    (``names``).
    """

    path: Path
    label: str
    runtime: str = ""
    precision: str = ""
    types: Mapping[str, np.dtype] = field(default_factory=dict)  # of the inputs of an ONNX file, by the model's names
    computing: Computing = field(default_factory=Computing)
    ops: frozenset[str] = frozenset()  # in an ONNX file, its subgraphs and functions
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    steps: StepBudget | None = field(default=None, compare=False)  # of an ONNX file that is quantized
    elsewhere: bool = False  # it was quantized for TensorRT, and onnxruntime need not load it

    # Inputs of the model that it does not take.
    spared: frozenset[str] = frozenset()

    def named(self, types: Mapping[str, np.dtype]) -> dict[str, np.dtype]:
        """Of its inputs, by the model's names."""
        return {self.inputs.get(name, name): kind for name, kind in types.items()}


def subjects(
    files: Iterable[File],
    model: Signature,
    ends: Sequence[End],
    names: Mapping[str, str] | None = None,
    ordered: bool = True,
    own_unit: float = 0.0,
    rounding_model: bool = False,
    unused: Collection[str] = (),
    stores_codes: bool = False,
) -> tuple[list[Subject], list[str]]:
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
    called, given = [p.name for p in paths], names or {}
    every = [subject_of(path, path.name if called.count(path.name) == 1 else str(path)) for path in paths]
    graphs = {s.label: load_small_weights(s.path) for s in every if not s.runtime}
    if len(graphs) == len(every):
        check_used(given, model, {label: _names(proto.graph) for label, proto in graphs.items()})
    named, notes = list[Subject](), list[str]()
    for subject in every:
        if subject.runtime:
            inputs = {spec.name for spec in model.inputs}
            own = {theirs: ours for theirs, ours in given.items() if ours in inputs}
            named.append(replace(subject, inputs=own, outputs={a: b for a, b in given.items() if a not in own}))
            continue
        matched = match(subject.label, graphs[subject.label].graph, model, ends, given, ordered, unused)
        notes += matched.notes
        subject = replace(subject, inputs=matched.inputs, outputs=matched.outputs, spared=matched.spared)
        subject = replace(subject, types=subject.named(subject.types))
        if any(own_unit >= FORMATS[half].unit for half in subject.computing.halves):
            # The model computes in half itself, and its own roundings say where.
            subject = replace(subject, precision="", computing=replace(subject.computing, lowered=()))
        proto = graphs[subject.label]
        if casts_codes(proto) and not stores_codes:
            proto = with_pairs(load_onnx(subject.path))
        if is_quantized(proto) and not rounding_model:
            subject, note = _budgeted(subject, proto)
            notes.append(note)
        named.append(subject)
    return named, notes


def _budgeted(subject: Subject, proto: onnx.ModelProto) -> tuple[Subject, str]:
    """A quantized file with the budget of its steps, and a note on what that is."""
    if inside := sealed(proto):
        return subject, (
            f"{subject.label} is quantized by {', '.join(inside)}, of whose steps no error budget can be made; give"
            " a metric: --metric 'cosine>=0.99'"
        )
    calibrated, altered = _calibrated(proto)
    types = types_of(proto.graph)
    budget = StepBudget(subject.path, subject.inputs, subject.outputs, types, calibrated, altered)
    return replace(subject, steps=budget, elsewhere=recorded_runtime(proto) in TENSORRT), (
        f"{subject.label} is quantized: the default rule allows what half a step of each scale in it does to the"
        " outputs, on inputs that are finite and of the usual size"
    )


def _calibrated(proto: onnx.ModelProto) -> tuple[list[str], str]:
    """What quantizers make whose ranges are the recorded ones, and why one is not."""
    record, now = recorded_ranges(proto), ranges(proto)
    for name, (low, high) in record.items():
        ends = now.get(name)
        if ends is not None and not np.allclose(ends, (low, high), rtol=_SAME_RANGE, atol=0):
            return [], (
                f"the range of {name!r} is {ends[0]:.4g} to {ends[1]:.4g}, and the file records that calibration gave"
                f" {low:.4g} to {high:.4g}: its scale or zero point was changed since; quantize the model again"
            )
    return [name for name in record if name in now], ""


def _names(graph: onnx.GraphProto) -> Ends:
    inputs, outputs = ends_of(graph)
    return [end.name for end in inputs], [end.name for end in outputs]


def subject_of(path: Path, label: str = "") -> Subject:
    """What kind of file it is, and what it takes where it is ONNX; ``label`` is its name unless another is given."""
    if is_engine(path):
        return Subject(path, label or path.name, runtime_of(path))
    proto = load_small_weights(path)
    found = computing(proto)
    return Subject(
        path=path,
        label=label or path.name,
        precision=found.precision,
        types=types_of(proto.graph),
        computing=found,
        ops=_ops(proto),
    )


def _ops(proto: onnx.ModelProto) -> frozenset[str]:
    waiting = [list(proto.graph.node), *(list(f.node) for f in proto.functions)]
    ops = set[str]()
    while waiting:
        for node in waiting.pop():
            ops.add(node.op_type)
            waiting += [list(a.g.node) for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
            waiting += [list(g.node) for a in node.attribute for g in a.graphs]
    return frozenset(ops)


def types_of(graph: onnx.GraphProto) -> dict[str, np.dtype]:
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
    file: str = ""  # "" where it is so for every file

    def __str__(self) -> str:
        return f"{self.runtime}: {self.reason}"


@dataclass
class Candidate:
    """A runtime under test on one file, and what became of it."""

    name: str
    make: Callable[[], Runner]
    subject: Subject | None = None  # None of eager
    provider: str = ""  # of onnxruntime, "cpu" or "cuda"
    optimize: bool = False
    runner: Runner | None = None
    unavailable: str | None = None  # why it can't be run here
    failure: str | None = None  # why it does not run the model, which it should
    crashes: bool = False  # the process that opens it there ends
    where: str = ""  # the case in which it failed
    skipped: int = 0  # cases outside an engine's profile
    ran: int = 0  # cases
    types: Mapping[str, np.dtype] = field(default_factory=dict)  # of its inputs
    sources: tuple[str, ...] = BOTH  # of error that is allowed in a quantized file
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)  # (output, kind of case)
    measures: Measures = field(default_factory=lambda: Measures(Policy()))  # by the rules given
    culprit: tuple[str, ...] = ()  # onnxruntime's optimizers that break the file
    advice: str = ""
    option: str = ""  # of onnxruntime's session, NAME=VALUE, with which it was judged
    without: str = ""  # what it does without that option

    @property
    def file(self) -> str:
        return self.subject.label if self.subject is not None else ""

    def load(self, stack: ExitStack) -> None:
        try:
            self.runner = stack.enter_context(self.make())
            if isinstance(self.runner, TrtRunner):
                types = self.runner.types()
                if self.subject is not None:  # what was said of other files' inputs is not this one's
                    self.subject = replace(
                        self.subject, inputs={a: b for a, b in self.subject.inputs.items() if a in types}
                    )
                self.types = types if self.subject is None else self.subject.named(types)
        except RuntimeUnavailable as error:
            self.unavailable = str(error)
        except GraphError as error:
            if self.subject is not None and self.subject.elsewhere:
                self.unavailable = str(error)
            else:
                self.failure = str(error)
                self.crashes = isinstance(error, RuntimeCrash)

    def infer(self, case: Case, feeds: Mapping[str, np.ndarray]) -> RunResult | None:
        """None where it does not run (any more), or this case is none for it."""
        if self.runner is None:
            return None
        if self.subject is not None and self.subject.spared:
            feeds = {name: value for name, value in feeds.items() if name not in self.subject.spared}
        if isinstance(self.runner, Replica):  # by the model's names
            return self._replicated(feeds)
        feeds = {name: value.astype(self.types.get(name, value.dtype), copy=False) for name, value in feeds.items()}
        theirs = {} if self.subject is None else {ours: name for name, ours in self.subject.inputs.items()}
        feeds = {theirs.get(name, name): value for name, value in feeds.items()}
        if isinstance(self.runner, TrtRunner) and not self.runner.fits(feeds):
            self.skipped += 1
            return None
        self.ran += 1
        try:
            result = self.runner.infer(feeds)
            ours = {} if self.subject is None else {a: b for a, b in self.subject.outputs.items() if a in result}
            held = {
                name: value for name, value in result.items() if name not in ours.values()
            }  # what is another's is not its own
            return {ours.get(name, name): value for name, value in (held | {n: result[n] for n in ours}).items()}
        except RuntimeUnavailable as error:
            self.runner, self.unavailable = None, str(error)
        except InputError as error:
            self.runner, self.failure, self.where = None, str(error), case.name
        return None

    def _replicated(self, feeds: Mapping[str, np.ndarray]) -> RunResult | None:
        assert self.runner is not None
        self.ran += 1
        try:
            return self.runner.infer(feeds)
        except RuntimeUnavailable as error:
            self.runner, self.unavailable = None, str(error)
        return None

    def precision(self, usual: str) -> str:
        """What it is judged by. An engine's inputs and outputs tell; where they are not half, it is that of the ONNX
        files beside it."""
        if self.subject is None or not self.subject.runtime:
            return self.subject.precision if self.subject is not None else ""
        stated = self.runner.floats() if isinstance(self.runner, TrtRunner) else set[str]()
        return next((short for short, name in FLOATS.items() if name in stated), usual)


def candidates_of(compared: Sequence[Subject], runners: Sequence[str] = ()) -> tuple[list[Candidate], list[NotRun]]:
    """Every runtime of this machine for every file, and what can't be run. ``runners``: those of packages, by name."""
    candidates, not_run = list[Candidate](), list[NotRun]()
    files = [s for s in compared if not s.runtime]
    reason = no_cuda() if files else ""
    if reason:
        not_run.append(NotRun("onnxruntime CUDA", reason))
    for subject in files:
        candidates += _replicas(subject)
        for provider in ("cpu",) if reason else ("cpu", "cuda"):
            candidates += [_onnxruntime(subject, provider, optimize) for optimize in (False, True)]
        for name in dict.fromkeys(runners):
            make = partial(GuestRunner, name, subject.path)
            candidates.append(Candidate(title_of_guest(required(name)), make, subject, types=subject.types))
        # onnxruntime's CPU provider has no bfloat16, and computes single float16 nodes in float32, without their Casts.
        if subject.precision or subject.computing.lowered or "bf16" in subject.computing.halves:
            wide = {n: np.dtype(np.float32) if is_float(t) else t for n, t in subject.types.items()}
            candidates.append(Candidate(STEPWISE, partial(_stepwise, subject.path), subject, types=wide))
    if len(files) == len(compared):
        not_run.append(NotRun("TensorRT", "no engine was given"))
    for subject in (s for s in compared if s.runtime):
        name = f"{TITLES[subject.runtime]} ({subject.label})"
        if lack := missing(subject.runtime):
            not_run.append(NotRun(name, lack, subject.label))
        else:
            candidates.append(Candidate(name, partial(TrtRunner, subject.path), subject))
    return candidates, not_run


def _onnxruntime(subject: Subject, provider: str, optimize: bool) -> Candidate:
    make = partial(OrtRunner, subject.path, optimize=optimize, provider=provider)
    return Candidate(title(provider, optimize=optimize), make, subject, provider, optimize, types=subject.types)


def _replicas(subject: Subject) -> list[Candidate]:
    """A quantized file in float64, without rounding its activations and with it."""
    if subject.steps is None:
        return []
    rounded = partial(Replica, subject.steps, Draw(), ROUNDED)
    return [
        Candidate(UNROUNDED, partial(_unrounded, subject.steps), subject, sources=("weights",)),
        Candidate(ROUNDED, rounded, subject, sources=BOTH),
    ]


def _unrounded(steps: StepBudget) -> Replica:
    return Replica(steps, Draw(activations="exact", clips=not steps.calibrated), UNROUNDED)


def _stepwise(path: Path) -> Runner:
    """
    Raises:
        RuntimeUnavailable: the file holds half precision in a body of control flow.
    """
    try:
        return OrtRunner(stepwise(inlined(load_onnx(path))), optimize=False)
    except GraphError as error:
        raise RuntimeUnavailable(str(error)) from error
