"""Time eager mode, torch.compile, onnxruntime and engines on the same inputs, after a check of their outputs.

Each runtime with one model or file is a contestant. All contestants run in one process, in turns
(`normdeploy.verbs.bench.timing`). Threads that spin while they wait for work would take cores from the other
contestants. Therefore onnxruntime's threads are set to stop between runs. torch's libgomp threads stop by themselves
within a few milliseconds (docs/reference/bench.md has the figures). Only the run is timed: the inputs are checked,
copied to the device and bound before it.

The reference is the model in float64. Without a model, the reference is the first file that runs and is not quantized,
or the first file if all files are quantized.

A contestant is not timed if its outputs differ too much from the reference. The limit is the square root of the unit
roundoff (half the digits of the type), relative to the largest value of the output. A larger error can't come from
rounding. `verify` uses a tighter bound. A quantized file that exceeds the limit is also compared with its own
evaluation in float64 (`verbs.verify.quantized_reference`).

The unit roundoff is that of the coarsest type that the contestant may compute in. Engines and onnxruntime on CUDA may
use TF32 for float32, so they count as float16, which has the same precision. Files with 4-bit weights count as
bfloat16, because onnxruntime's optimizer rounds the inputs of these layers to 8 bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

from ...compare.runtime_agreement import find_disagreement
from ...dtypes import UNIT_ROUNDOFF
from ...errors import GraphError, InputError, NormdeployError, RuntimeUnavailable
from ...findings.rendering import Renderable, ShortRepr, make_printable
from ...model import LoadedModel, TensorSpec
from ...precision.half_conversion import recorded_precision
from ...runtimes import RunResult
from ...runtimes.code_runner import CodeRunner
from ...runtimes.live_runner import LiveRunner
from ...runtimes.named_runners import require_named_runner
from ...runtimes.ort_runner import explain_missing_cuda
from ...runtimes.torch_runners import Float64Runner
from ...runtimes.trt_runner import TITLES, describe_missing_runtime, is_engine, read_runtime
from ...storage.npz_files import read_npz
from ...storage.onnx_files import load_onnx
from ...types import Array, Arrays, PathLike, Progress
from ..run.run_function import can_run, open_runner, parse_sizes
from ..verify.quantized_reference import evaluate_quantized, has_four_bit_weights, is_supported_quantized
from ..verify.runtime_candidates import FLOATS, NotRun
from .bench_options import BenchOptions
from .benchmark_inputs import check_counts, make_benchmark_inputs
from .machine_info import MachineInfo, describe_machine
from .timing import Timing, race_calls

if TYPE_CHECKING:
    from rich.console import Console

UNSTEADY = "{}: the times were still changing after {} warm-up rounds; another program keeps the machine busy"


@dataclass(frozen=True, repr=False)
class RaceEntry(ShortRepr):
    """Times (in milliseconds) and errors of one contestant.

    Attributes:
        median, p95, p99: percentiles of its calls; None if it was not timed.
        samples: times of some single calls, chosen evenly from all calls.
        ratio: relative time of the contestant. In each round, its time is divided by the time of the first entry (for a
            norm, the first entry of the same norm). The ratio is the median over the rounds.
        interval: 95 % confidence interval of ``ratio``.
        error: largest difference from the reference. For a model it is relative to the largest value of the output; for
            a norm (``bench_norms``) it is absolute.
        far_error: absolute error of a norm on inputs around an offset of 1000; None for a model.
        reason: reason why the contestant was not timed; "" if it was timed.
    """

    runtime: str
    file: str = ""
    form: str = ""
    norm: str = ""
    median: float | None = None
    p95: float | None = None
    p99: float | None = None
    samples: tuple[float, ...] = ()
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    error: float | None = None
    far_error: float | None = None
    reason: str = ""

    def summarize(self) -> str:
        """Return the main facts in one line."""
        who = " · ".join(filter(None, (self.norm, self.runtime, self.file, self.form)))
        if self.median is None:
            return f"{who}: not timed: {self.reason}"
        error = "" if self.error is None else f", error {self.error:.1e}"
        return f"{who}: median {self.median:.3g} ms{error}{f'; {self.reason}' if self.reason else ''}"


@dataclass(frozen=True, repr=False)
class Race(Renderable):
    """Result of ``bench``; true if at least one contestant ran and none gave a wrong answer.

    Attributes:
        warmup: number of warm-up rounds, which are not counted.
        shapes: name of the input (or of the norm) -> shape.
        reference: name of the contestant or model that the errors are measured against.
        machine: the machine, with its load before the benchmark.
        load: load of the machine after the benchmark; None if the system does not report it.
    """

    threads: int
    warmup: int
    rounds: int
    seed: int
    shapes: dict[str, tuple[int, ...]]
    reference: str
    entries: tuple[RaceEntry, ...]
    not_run: tuple[NotRun, ...]
    machine: MachineInfo
    load: float | None
    notes: tuple[str, ...] = ()

    def summarize(self) -> str:
        """Return the main facts in one line."""
        bad = [entry for entry in self.entries if entry.reason]
        timed = [entry for entry in self.entries if entry.median is not None and not entry.reason]
        facts = [f"FAILED, {bad[0].summarize()}"] if bad else []
        facts.append(f"{len(timed)} of {len(self.entries)} timed in {self.rounds} rounds")
        if timed and not any(entry.norm for entry in timed):
            facts.append(f"fastest {min(timed, key=lambda entry: entry.median or 0.0).summarize()}")
        if self.not_run:
            facts.append(f"{len(self.not_run)} not run")
        return "; ".join(facts)

    @property
    def unrun(self) -> tuple[NotRun, ...]:
        """Return the files that the user passed and that could not run."""
        return tuple(missed for missed in self.not_run if missed.file)

    def __bool__(self) -> bool:
        return bool(self.entries) and not any(entry.reason for entry in self.entries)

    def show(self, console: Console) -> None:
        from .bench_tables import show_race

        show_race(console, make_printable(self))


@dataclass
class Contestant:
    """Runtime with one model or file, ready to run.

    Attributes:
        infer: runs the inputs and returns the outputs in their order.
        prepare: binds the inputs and returns the call that is timed.
        coarsest: coarsest floating type that the contestant may compute in.
        specs: inputs of the file; empty for a PyTorch model.
        quantized: path of the file if the file is quantized, else None.
        reason: reason why the contestant is not timed; "" if it is timed.
        call: the timed call. `_check_contestant` sets it.
    """

    runtime: str
    file: str
    infer: Callable[[Arrays], RunResult]
    prepare: Callable[[Arrays], Callable[[], object]]
    coarsest: str = "float32"
    specs: tuple[TensorSpec, ...] = ()
    quantized: PathLike | None = None
    error: float | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
    call: Callable[[], object] = field(default=lambda: None)


def race_files(
    model: LoadedModel | None, files: Sequence[PathLike], options: BenchOptions, progress: Progress | None = None
) -> Race:
    """Benchmark ``files`` and, if a model is passed, ``model`` in eager mode and in torch.compile.

    Args:
        files: ONNX files and engines. The content of a file decides which of the two it is.
        progress: called with (stage, done, total).

    Returns:
        The times and errors of all contestants.

    Raises:
        InputError: there is no contestant, the inputs do not fit, or a file is neither ONNX nor an engine.
        GraphError: onnxruntime refuses a file.
        NormdeployError: the model has no float64 form.
    """
    threads = options.threads
    rounds = options.rounds
    seed = options.seed
    inputs = read_npz(options.feeds) if isinstance(options.feeds, str | os.PathLike) else options.feeds
    sizes = parse_sizes(options.sizes)
    if model is None and not files:
        raise InputError("nothing to measure; pass a model, ONNX files or engines")
    check_counts(threads, rounds)
    before = describe_machine()
    notes = list[str]()
    with ExitStack() as stack, _use_torch_threads(threads):
        contestants, not_run = _open_contestants(model, files, threads, stack, options.runners)
        if inputs is None:
            first = contestants[0]
            inputs, notes = make_benchmark_inputs(
                model, files, first.specs, sizes or {}, seed, runs=lambda feeds: can_run(first.infer, feeds)
            )
        elif sizes:
            raise InputError(
                f"sizes apply to generated inputs, but inputs were passed: {dict(sizes)}; omit the sizes or the inputs"
            )
        reference = _find_reference(model, contestants, inputs)
        for i, contestant in enumerate(contestants):
            if progress is not None:
                progress(f"check {contestant.runtime}", i, len(contestants))
            _check_contestant(contestant, inputs, reference)
        not_run += [NotRun(_contestant_title(c), c.reason) for c in contestants if c.call is _run_absent]
        present = [c for c in contestants if c.call is not _run_absent]
        running = [c for c in present if not c.reason]
        timing = race_calls([c.call for c in running], rounds=rounds, seed=seed, progress=progress)
    notes += dict.fromkeys(note for contestant in contestants for note in contestant.notes)
    notes += [UNSTEADY.format(_contestant_title(running[i]), timing.warmup) for i in timing.unsteady]
    places = iter(range(len(running)))
    entries = [RaceEntry(c.runtime, c.file, error=c.error, reason=c.reason) for c in present]
    entries = [e if e.reason else with_times(e, timing, next(places)) for e in entries]
    shapes = {name: tuple(array.shape) for name, array in inputs.items()}
    return Race(
        threads,
        timing.warmup,
        rounds,
        seed,
        shapes,
        reference.judge,
        tuple(entries),
        tuple(not_run),
        before,
        describe_machine().load,
        tuple(notes),
    )


def with_times(entry: RaceEntry, timing: Timing, i: int) -> RaceEntry:
    """Add the times of contestant ``i`` to ``entry``.

    Returns:
        A copy of ``entry`` with times in milliseconds, and the ratio to contestant 0.
    """
    ratio, low, high = timing.round_ratio(i, 0)
    median, p95, p99 = (1e3 * timing.percentile(i, share) for share in (50, 95, 99))
    samples = tuple(round(1e3 * t, 6) for t in timing.sample_calls(i))
    return replace(entry, median=median, p95=p95, p99=p99, samples=samples, ratio=ratio, interval=(low, high))


# ------------------------------------------------------------------ contestants


def _open_contestants(
    model: LoadedModel | None,
    files: Sequence[PathLike],
    threads: int,
    stack: ExitStack,
    runners: Sequence[str] = (),
) -> tuple[list[Contestant], list[NotRun]]:
    contestants, not_run = list[Contestant](), list[NotRun]()
    if model is not None:
        for compiled in (False, True):
            runner = stack.enter_context(CodeRunner(model, compiled=compiled))
            contestants.append(
                Contestant(
                    runner.name, "", runner.infer, runner.prepare, _coarsest_type(spec.dtype for spec in model.inputs)
                )
            )
    cuda: str | None = None
    if any(not is_engine(f) for f in files):
        cuda = explain_missing_cuda()

    def add_contestant(runtime: str, name: str, coarsest: str, file: PathLike, **options: Any) -> None:
        """Open a runner for a file, or note why it can't run here."""
        try:
            runner = stack.enter_context(open_runner(file, **options))
        except RuntimeUnavailable as error:
            # Every ONNX file is also run on CUDA, although the user did not ask for CUDA. So a missing CUDA does not
            # count as a file that could not run.
            named = "" if options.get("provider") == "cuda" else name
            not_run.append(NotRun(f"{runtime} ({name})", str(error), named))
        except GraphError as error:
            if not quantized:
                raise
            not_run.append(NotRun(f"{runtime} ({name})", str(error)))
        else:
            made = _make_contestant(runner, runtime, name, coarsest)
            notes = () if is_engine(file) else runner.notes
            contestants.append(replace(made, quantized=file if quantized else None, notes=notes))

    places = {(Path(file).name, os.path.realpath(file)) for file in files}
    for file in files:
        quantized = False
        name = Path(file).name
        if sum(name == other for other, _ in places) > 1:
            name = os.fspath(file)
        if is_engine(file):
            runtime = read_runtime(Path(file))
            if reason := describe_missing_runtime(runtime):
                not_run.append(NotRun(f"{TITLES[runtime]} ({name})", reason, name))
            else:
                add_contestant(TITLES[runtime], name, "float16", file)
            continue
        quantized = is_supported_quantized(file)
        requested = _requested_type(file)
        on_cpu, on_cuda = requested, "float16"
        if quantized and has_four_bit_weights(file):
            on_cpu = on_cuda = "bfloat16"
        add_contestant("onnxruntime CPU", name, on_cpu, file, threads=threads)
        if not cuda:
            add_contestant("onnxruntime CUDA", name, on_cuda, file, provider="cuda")
        for other in runners:
            further = require_named_runner(other)
            computed = FLOATS.get(further.precision, requested)
            own_threads = {"threads": threads} if further.provider else {}
            add_contestant(further.title, name, computed, file, runner=other, **own_threads)
    if cuda:
        not_run.append(NotRun("onnxruntime CUDA", cuda))
    if not contestants:
        raise RuntimeUnavailable("; ".join(f"{n.runtime}: {n.reason}" for n in not_run))
    return contestants, not_run


def _make_contestant(runner: LiveRunner, runtime: str, file: str, coarsest: str) -> Contestant:
    """Make a contestant that converts floating inputs to the runner's types before it runs or binds them."""

    def convert_inputs(feeds: Arrays) -> dict[str, Array]:
        """Convert floating inputs to the runner's types.

        Returns:
            Input name -> array.
        """
        types = {
            spec.name: np.dtype(ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else spec.dtype)
            for spec in runner.inputs
        }
        floats = {name for name, kind in types.items() if kind.name in UNIT_ROUNDOFF}
        return {n: v.astype(types[n]) if n in floats and v.dtype.name in UNIT_ROUNDOFF else v for n, v in feeds.items()}

    held = _coarsest_type(spec.dtype for spec in (*runner.inputs, *runner.outputs))
    worst = max(coarsest, held, key=UNIT_ROUNDOFF.__getitem__)
    return Contestant(
        runtime,
        file,
        lambda feeds: runner.infer(convert_inputs(feeds)),
        lambda feeds: runner.prepare(convert_inputs(feeds)),
        worst,
        runner.inputs,
    )


def _coarsest_type(types: Iterator[str] | Any) -> str:
    return max((t for t in types if t in UNIT_ROUNDOFF), key=UNIT_ROUNDOFF.__getitem__, default="float32")


def _requested_type(file: PathLike) -> str:
    """Return the type that an ONNX file was made to compute in, or "float64" if the file does not record a type."""
    try:
        return FLOATS.get(recorded_precision(load_onnx(file, external_data=False)), "float64")
    except GraphError:
        # onnxruntime runs files that onnx's checker rejects.
        return "float64"


def _contestant_title(contestant: Contestant) -> str:
    if contestant.file:
        return f"{contestant.runtime} ({contestant.file})"
    return contestant.runtime


# ------------------------------------------------------------------ comparison of outputs


def _run_absent() -> object:
    """Stand in for the call of a contestant that is not timed. It is never called."""
    raise AssertionError


@dataclass(frozen=True)
class _RaceReference:
    """Outputs that all contestants are compared with.

    Attributes:
        judge: name of the model or contestant that computed the outputs.
        unit: unit roundoff of the type that the outputs were computed in.
    """

    outputs: list[Array]
    judge: str
    unit: float


def _find_reference(model: LoadedModel | None, contestants: Sequence[Contestant], inputs: Arrays) -> _RaceReference:
    if model is not None:
        with Float64Runner(model) as runner:
            return _RaceReference([*runner.infer(inputs).values()], runner.name, UNIT_ROUNDOFF["float64"])
    first = next((c for c in contestants if c.quantized is None), contestants[0])
    return _RaceReference([*first.infer(inputs).values()], _contestant_title(first), UNIT_ROUNDOFF[first.coarsest])


def _check_contestant(contestant: Contestant, inputs: Arrays, reference: _RaceReference) -> None:
    """Run a contestant once, compare its outputs and prepare its timed call.

    If the contestant can't run on this machine or its outputs are wrong, the function sets its ``reason``.
    """
    try:
        outputs = [*contestant.infer(inputs).values()]
        unit = max(reference.unit, UNIT_ROUNDOFF[contestant.coarsest])
        judge = reference.judge
        verdict = find_disagreement(outputs, reference.outputs, unit)
        contestant.error = verdict.error
        wrong = verdict.reason
        if contestant.quantized is not None and wrong:
            own = evaluate_quantized(contestant.quantized, inputs)
        else:
            own = None
        if own is not None:
            judge = f"{Path(contestant.file).name} in float64"
            right = [*own.outputs.values()]
            more = [*own.allowed.values()]
            wrong = find_disagreement(outputs, right, UNIT_ROUNDOFF[contestant.coarsest], more).reason
        if wrong:
            contestant.reason = f"its outputs differ from {judge}: {wrong}; not timed"
        else:
            contestant.reason = ""
        contestant.call = contestant.prepare(inputs)
    except RuntimeUnavailable as error:
        contestant.reason = str(error)
        contestant.call = _run_absent
    except NormdeployError as error:
        if reference.outputs and contestant.runtime == "eager":
            raise
        contestant.reason = str(error)


@contextmanager
def _use_torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
