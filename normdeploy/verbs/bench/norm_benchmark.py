"""Benchmark the norms of a file, or built-in example norms, in all forms (`normdeploy.verbs.bench.norm_cases`)."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ...compare.runtime_agreement import find_disagreement
from ...dtypes import UNIT_ROUNDOFF
from ...errors import InputError, NormdeployError, RuntimeUnavailable
from ...graphs.graph import Graph
from ...graphs.shape_completion import ShapedGraph
from ...norms.norm_table import STANDARD
from ...rewriting import norm_optimizer
from ...runtimes.live_runner import LiveRunner
from ...runtimes.trt_runner import describe_missing_runtime
from ...storage.export_record import read_record
from ...storage.file_replacement import write_bytes
from ...storage.onnx_domains import is_standard
from ...storage.onnx_files import load_onnx, normalize_model
from ...types import PathLike, Progress
from ..build.build_function import build
from ..run.run_function import open_runner, parse_sizes
from ..verify.runtime_candidates import NotRun
from .bench_options import RaceOptions
from .benchmark_inputs import check_counts, check_sizes
from .machine_info import describe_machine
from .model_benchmark import UNSTEADY, Race, RaceEntry, with_times
from .norm_cases import FORMS, KINDS, NormCase
from .timing import Timing, race_calls

PLUGIN = "plugin"
IMPLEMENTATIONS = (*FORMS, PLUGIN)
# Maximum number of elements of a norm's input. The float64 evaluation of a norm of this size takes about 10 GB.
MOST = 2**28
# Offset of the second set of inputs. It is large enough that cancellation in the variance is visible.
FAR = 1e3
USUAL = {
    "LayerNorm": NormCase("LayerNorm", (8, 128, 768)),
    "RMSNorm": NormCase("RMSNorm", (8, 128, 768)),
    "ChannelLayerNorm": NormCase("ChannelLayerNorm", (1, 96, 56, 56)),
    "BatchLayerNorm": NormCase("BatchLayerNorm", (8, 16, 16, 16)),
    "GroupNorm": NormCase("GroupNorm", (1, 320, 32, 32), groups=32),
    "InstanceNorm": NormCase("InstanceNorm", (1, 64, 64, 64)),
}
# Maximum number of norms that an error lists if no norm of a file can be benchmarked.
_SAID = 3
_RACED = {op: row.kind for op, row in STANDARD.items() if row.kind in KINDS}
_USUAL_RACE = RaceOptions()


def bench_norms(
    cases: Sequence[NormCase],
    implementations: Sequence[str] = (),
    options: RaceOptions = _USUAL_RACE,
    progress: Progress | None = None,
) -> Race:
    """Benchmark the forms of each norm, one norm after the other.

    The norms run in onnxruntime on the CPU, and in TensorRT if it and a GPU are present.

    Args:
        implementations: forms from `IMPLEMENTATIONS`; empty means all. "plugin" is our kernel in a TensorRT engine;
            "standard" also runs in TensorRT, with TensorRT's own layer.

    Returns:
        The times and errors of all forms.

    Raises:
        InputError: ``cases`` is empty, a form is unknown, or no norm has one of the forms.
        RuntimeUnavailable: the runtimes of all chosen forms are missing on this machine.
    """
    threads = options.threads
    rounds = options.rounds
    seed = options.seed
    check_counts(threads, rounds)
    wanted = list(implementations or IMPLEMENTATIONS)
    if unknown := [name for name in wanted if name not in IMPLEMENTATIONS]:
        raise InputError(f"unknown form {unknown[0]!r} of a norm; choose from {', '.join(IMPLEMENTATIONS)}")
    if not cases:
        raise InputError("nothing to measure: no norm of the file can be written as one node; `inspect` shows why")
    before = describe_machine()
    entries = list[RaceEntry]()
    warmup = 0
    notes = list[str]()
    engines = PLUGIN in wanted
    absent = describe_missing_runtime("tensorrt") if engines else ""
    not_run = [NotRun("TensorRT", absent)] if absent else []
    for done, case in enumerate(cases):
        if progress is not None:
            progress(str(case), done, len(cases))
        raced, timing = _race_case(case, wanted, engines and not absent, options, progress)
        entries += raced
        if timing is not None:
            warmup = max(warmup, timing.warmup)
            notes += [UNSTEADY.format(str(case), timing.warmup)] if timing.unsteady else []
    shapes = {str(case): case.shape for case in cases}
    if not entries and not_run:
        raise RuntimeUnavailable("; ".join(f"{n.runtime}: {n.reason}" for n in not_run))
    if not entries:
        raise InputError(f"none of {', '.join(shapes)} has the form {' or '.join(wanted)}")
    return Race(
        threads,
        warmup,
        rounds,
        seed,
        shapes,
        "float64",
        tuple(entries),
        tuple(not_run),
        before,
        describe_machine().load,
        tuple(notes),
    )


def race_norms(
    sources: Sequence[Any],
    implementations: Sequence[str],
    kind: str | None,
    options: RaceOptions,
    progress: Progress | None = None,
) -> Race:
    """Benchmark the norms of one ONNX file, or the built-in example norms of a kind.

    Args:
        sources: one ONNX file, or nothing if ``kind`` is given.
        implementations: forms to benchmark; empty or ["all"] means all forms.
        kind: a key of `USUAL`, "all", or None for the norms of the file.

    Returns:
        The times and errors of all forms.

    Raises:
        InputError: there is not exactly one file, or the kind or a form is unknown.
        GraphError: the file is broken.
    """
    sizes = parse_sizes(options.sizes)
    notes = list[str]()
    if kind is None:
        if len(sources) != 1:
            raise InputError(
                f"{len(sources)} files were passed; pass one ONNX file to measure its norms, or none and --norms"
            )
        cases, notes = find_norm_cases(sources[0], sizes)
        if notes and not cases:
            raise InputError(
                "none of the file's norms can be measured: "
                + "; ".join(notes[:_SAID])
                + ("; ..." if notes[_SAID:] else "")
            )
    elif sizes:
        raise InputError(
            f"--norms measures norms of fixed sizes, but sizes were passed: {dict(sizes)}; omit the sizes or --norms"
        )
    elif sources:
        raise InputError(
            f"--norms measures common norms, but files were passed: {list(map(str, sources))}; omit the files or"
            " --norms"
        )
    elif kind != "all" and kind not in USUAL:
        raise InputError(f"unknown kind of norm {kind!r}; choose from {', '.join(USUAL)}, or all")
    else:
        cases = list(USUAL.values()) if kind == "all" else [USUAL[kind]]
    chosen = [] if list(implementations) == ["all"] else implementations
    raced = bench_norms(cases, chosen, options, progress)
    return replace(raced, notes=(*notes, *raced.notes))


def find_norm_cases(
    source: PathLike | onnx.ModelProto, sizes: Mapping[str, int] | None = None
) -> tuple[list[NormCase], list[str]]:
    """Find the distinct norms of a file as ``optimize`` writes them, at the given sizes of dynamic dims.

    Norms that differ only in epsilon take the same time and count as one norm.

    Returns:
        The norms, and a note for each norm that can't be benchmarked.

    Raises:
        InputError: a dim of ``sizes`` is unknown.
        GraphError: the file is broken.
    """
    if isinstance(source, onnx.ModelProto):
        proto = normalize_model(source)
    else:
        proto = load_onnx(source)
    usual = {d.name: d.opt for spec in read_record(proto).get("inputs", ()) for d in spec.shape if d.name is not None}
    # With the target TensorRT, the optimizer writes every norm as one node.
    proto, _ = norm_optimizer.optimize_norms(proto, runtime="tensorrt")
    fixed = onnx.ModelProto()
    fixed.CopyFrom(proto)
    del fixed.graph.value_info[:]
    named = {dim.dim_param for value in fixed.graph.input for dim in value.type.tensor_type.shape.dim if dim.dim_param}
    check_sizes(sizes or {}, named)
    for value in fixed.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if size := (usual | dict(sizes or {})).get(dim.dim_param):
                dim.dim_value = size
    for value in fixed.graph.output:
        value.type.tensor_type.ClearField("shape")
    graph = ShapedGraph(fixed)
    cases = dict[str, NormCase]()
    notes = list[str]()
    for node in graph.nodes:
        if node.op not in _RACED or not is_standard(node):
            continue
        case = _make_case(graph, node)
        if isinstance(case, str):
            notes.append(f"{node.name or node.outputs[0].name} was not measured: {case}")
        else:
            cases.setdefault(str(case), case)
    return [*cases.values()], notes


def _make_case(graph: Graph, node: gs.Node) -> NormCase | str:
    """Read a standard norm node as a `NormCase`, or return the reason why it can't be benchmarked."""
    kind = graph.dtype(node.inputs[0])
    dims = graph.shape(node.inputs[0])
    given = graph.attrs(node)
    if kind is None or kind.name not in UNIT_ROUNDOFF or kind.name == "bfloat16":
        return "its dtype is not float32, float16 or float64"
    if dims is None or not all(isinstance(d, int) and d > 0 for d in dims):
        return f"its shape is {list(dims) if dims is not None else 'unknown'}; pass sizes with --size"
    shape = tuple(d for d in dims if isinstance(d, int))
    if math.prod(shape) > MOST:
        return f"its input {list(shape)} has more than {MOST} elements; pass smaller sizes with --size"
    case = NormCase(_RACED[node.op], shape, epsilon=given.get("epsilon", 1e-5), dtype=kind.name)
    if case.kind in ("LayerNorm", "RMSNorm"):
        axis = int(given.get("axis", -1))
        return replace(case, axis=axis - len(dims) if axis >= 0 else axis)
    if case.kind == "GroupNorm":
        return replace(case, groups=int(given["num_groups"]))
    return case


def _race_case(
    case: NormCase,
    wanted: Sequence[str],
    engines: bool,
    options: RaceOptions,
    progress: Progress | None,
) -> tuple[list[RaceEntry], Timing | None]:
    """Benchmark the forms of one norm.

    Returns:
        An entry for each form, and the times; the times are None if no form could be timed.
    """
    entries = list[RaceEntry]()
    running = list[LiveRunner]()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for runtime, form in _iter_contestants(case, wanted, engines):
            entry = RaceEntry(runtime, form=form, norm=str(case))
            try:
                path = _write_form(case, form, runtime, Path(folder))
                runner = stack.enter_context(open_runner(path, threads=0 if runtime == "TensorRT" else options.threads))
                entry = _judge_entry(entry, case, runner)
                if not entry.reason:
                    running += [runner]
            except NormdeployError as error:
                entry = replace(entry, reason=str(error))
            entries.append(entry)
        if not running:
            return entries, None
        calls = [runner.prepare(case.feeds()) for runner in running]
        timing = race_calls(calls, rounds=options.rounds, seed=options.seed, progress=progress)
        places = iter(range(len(running)))
        return [e if e.reason else with_times(e, timing, next(places)) for e in entries], timing


def _iter_contestants(case: NormCase, wanted: Sequence[str], engines: bool) -> Iterator[tuple[str, str]]:
    """Yield runtime and form of each contestant."""
    yield from (("onnxruntime CPU", form) for form in case.distinct_forms if form in wanted)
    if engines:
        yield from (("TensorRT", form) for form in ("standard", PLUGIN) if form in wanted)


def _write_form(case: NormCase, form: str, runtime: str, folder: Path) -> Path:
    path = folder / f"{form}.onnx"
    write_bytes(path, case.make_model("standard" if form == PLUGIN else form).SerializeToString())
    if runtime != "TensorRT":
        return path
    build(
        path, engine := folder / f"{form}.engine", library="tensorrt", norm_impl=PLUGIN if form == PLUGIN else "native"
    )
    return engine


def _judge_entry(entry: RaceEntry, case: NormCase, runner: LiveRunner) -> RaceEntry:
    """Add the errors to an entry. If the form does not compute the norm, add the reason why it is not timed."""
    errors = []
    for offset in (0.0, FAR):
        feeds = case.feeds(offset)
        (answer,), expected = runner.infer(feeds).values(), case.evaluate_float64(feeds["x"])
        if not offset:
            wrong = find_disagreement([answer], [expected], UNIT_ROUNDOFF[case.dtype]).reason
            entry = replace(entry, reason=f"it does not compute the norm: {wrong}; not timed" if wrong else "")
        errors.append(float(np.abs(answer.astype(np.float64) - expected).max()))
    return replace(entry, error=errors[0], far_error=errors[1])
