"""The race: how long eager, torch.compile, onnxruntime and engines take for the same inputs, each shown to compute the
same first.

Everything runs in one process, in turns (`normdeploy.verbs.bench.timing`). Threads that wait for work by spinning would
take the others' cores: onnxruntime's are told to stop between runs, and libgomp's, torch's, do so on their own within a
few milliseconds (docs/bench.md has the figures). What is timed is the run alone: inputs are checked and bound once, and
lie on the device that computes.

The reference is the model in float64, or without a model the first file that runs. A contestant whose outputs are
farther from it than the square root of the unit roundoff, relative to the largest value of the output (half of the
type's digits), is not timed: its answer is wrong, not rounded. A quantized file is held against what it says itself, in
float64 (`verbs.verify.quantized_reference`), and is the reference of none but quantized files. `verify` draws a
narrower line. The type is the coarsest that is known to be computed in; of an engine and of onnxruntime on CUDA, which
may take TF32 for float32, it is one of float16's precision; of weights of four bits one of bfloat16's, for
onnxruntime's optimizer rounds what these layers read to 8 bits.
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
from ...findings.rendering import Renderable, make_printable
from ...model import LoadedModel, TensorSpec
from ...precision.half_conversion import recorded_precision
from ...runtimes import RunResult
from ...runtimes.code_runner import CodeRunner
from ...runtimes.live_runner import LiveRunner
from ...runtimes.ort_runner import explain_missing_cuda
from ...runtimes.third_party_runner import require_runtime, third_party_title
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

UNSTEADY = "{}: the times still moved after {} rounds of warm-up; something else keeps the machine busy"


@dataclass(frozen=True)
class RaceEntry:
    """One contestant; milliseconds.

    ``ratio``: the median over the rounds of its time over that of the first entry (of the same norm) in the same round,
    ``interval`` its 95 % confidence interval. ``error``: the largest difference from the reference, relative to the
    largest value of the output; of a norm (``bench_norms``) absolute, and ``far_error`` the same around an offset of
    1000.
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
    # why it was not timed
    reason: str = ""


@dataclass(frozen=True)
class Race(Renderable):
    """What ``bench`` measured; true where every contestant that could run gave the right answer."""

    threads: int
    # rounds that were not counted
    warmup: int
    rounds: int
    seed: int
    shapes: dict[str, tuple[int, ...]]
    reference: str
    entries: tuple[RaceEntry, ...]
    not_run: tuple[NotRun, ...]
    machine: MachineInfo
    # of the machine when the race was over; ``machine`` holds that before
    load: float | None
    notes: tuple[str, ...] = ()

    @property
    def unrun(self) -> tuple[NotRun, ...]:
        """Of what was not run the files that the user named."""
        return tuple(missed for missed in self.not_run if missed.file)

    def __bool__(self) -> bool:
        return bool(self.entries) and not any(entry.reason for entry in self.entries)

    def show(self, console: Console) -> None:
        from .bench_tables import show_race

        show_race(console, make_printable(self))


@dataclass
class Contestant:
    """``infer`` gives the outputs in their order, ``prepare`` the run that is timed; ``reason`` says why it is not
    timed."""

    runtime: str
    file: str
    infer: Callable[[Arrays], RunResult]
    prepare: Callable[[Arrays], Callable[[], object]]
    # type of its arithmetic
    coarsest: str = "float32"
    # of its inputs; empty for the model
    specs: tuple[TensorSpec, ...] = ()
    # the file, where it is quantized
    quantized: PathLike | None = None
    error: float | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
    call: Callable[[], object] = field(default=lambda: None)


def race_files(
    model: LoadedModel | None, files: Sequence[PathLike], options: BenchOptions, progress: Progress | None = None
) -> Race:
    """Race ``files``, and ``model`` in eager and torch.compile where it is given.

    Args:
        files: ONNX files and engines, told apart by their content.
        progress: called with (stage, done, total).

    Raises:
        InputError: there is nothing to race, the inputs do not fit, or a file is none.
        GraphError: onnxruntime refuses a file.
        NormdeployError: the model has no float64 form.
    """
    threads = options.threads
    rounds = options.rounds
    seed = options.seed
    inputs = read_npz(options.feeds) if isinstance(options.feeds, str | os.PathLike) else options.feeds
    sizes = parse_sizes(options.sizes)
    if model is None and not files:
        raise InputError("there is nothing to race; give a model, ONNX files or engines")
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
                f"sizes are for generated inputs, and inputs were given: {dict(sizes)}; leave one of them out"
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
    """``entry`` with the times of contestant ``i``."""
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
        try:
            runner = stack.enter_context(open_runner(file, **options))
        except RuntimeUnavailable as error:
            # Every ONNX file is raced on CUDA, too, without being asked for.
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
            add_contestant(third_party_title(require_runtime(other)), name, requested, file, runner=other)
    if cuda:
        not_run.append(NotRun("onnxruntime CUDA", cuda))
    if not contestants:
        raise RuntimeUnavailable("; ".join(f"{n.runtime}: {n.reason}" for n in not_run))
    return contestants, not_run


def _make_contestant(runner: LiveRunner, runtime: str, file: str, coarsest: str) -> Contestant:
    """A runner as it is given the inputs: floating ones in its own types, and on a GPU before the time runs."""

    def convert_inputs(feeds: Arrays) -> dict[str, Array]:
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
    """The type that an ONNX file was made to compute in."""
    try:
        return FLOATS.get(recorded_precision(load_onnx(file, external_data=False)), "float64")
    except GraphError:
        # onnxruntime runs files that onnx's checker does not know
        return "float64"


def _contestant_title(contestant: Contestant) -> str:
    if contestant.file:
        return f"{contestant.runtime} ({contestant.file})"
    return contestant.runtime


# ------------------------------------------------------------------ the same answer


def _run_absent() -> object:
    """Stands for a run that can't be had here."""
    raise AssertionError


@dataclass(frozen=True)
class _RaceReference:
    """The outputs that all are compared with, whose they are, and the unit roundoff of the type that they were computed
    in."""

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
    """Run it once, compare, and make it ready; what can't run here, or is wrong, says why."""
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
            contestant.reason = f"its outputs are not those of {judge}: {wrong}; not timed"
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
