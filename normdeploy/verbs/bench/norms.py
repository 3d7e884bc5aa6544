"""Races norms: each one of a file, or some usual ones, in all its forms (`normdeploy.verbs.bench.norm_cases`)."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ...compare.answers import disagreement
from ...domains import is_standard
from ...element_types import UNIT_ROUNDOFF
from ...engines.build import build
from ...errors import InputError, NormdeployError, RuntimeUnavailable
from ...graphs.graph import Graph
from ...graphs.shapes import ShapedGraph
from ...norms.ops import STANDARD
from ...rewriting import rewrite
from ...runtimes.live import LiveRunner
from ...runtimes.trt import missing
from ...storage.atomic import write_bytes
from ...storage.files import load_onnx, opened_model
from ...storage.record import recorded
from ...types import Progress
from ..run import open_runner, sizes_of
from ..verify.candidates import NotRun
from .bench import UNSTEADY, Entry, Race, timed
from .given import check_counts, known
from .machine import machine
from .norm_cases import FORMS, KINDS, NormCase
from .options import RaceOptions
from .timing import Timing, race

PLUGIN = "plugin"
IMPLEMENTATIONS = (*FORMS, PLUGIN)
MOST = 2**28  # elements of a norm that is raced: its float64 takes some 10 GB
FAR = 1e3  # offset at which cancellation shows
USUAL = {
    "LayerNorm": NormCase("LayerNorm", (8, 128, 768)),
    "RMSNorm": NormCase("RMSNorm", (8, 128, 768)),
    "ChannelLayerNorm": NormCase("ChannelLayerNorm", (1, 96, 56, 56)),
    "BatchLayerNorm": NormCase("BatchLayerNorm", (8, 16, 16, 16)),
    "GroupNorm": NormCase("GroupNorm", (1, 320, 32, 32), groups=32),
    "InstanceNorm": NormCase("InstanceNorm", (1, 64, 64, 64)),
}
_SAID = 3  # norms that can't be raced, of an error that says why
_RACED = {op: row.kind for op, row in STANDARD.items() if row.kind in KINDS}
_USUAL_RACE = RaceOptions()


def bench_norms(
    cases: Sequence[NormCase],
    implementations: Sequence[str] = (),
    options: RaceOptions = _USUAL_RACE,
    progress: Progress | None = None,
) -> Race:
    """Race the forms of each norm, one norm after the other, in onnxruntime on the CPU and, where it is and a GPU too,
    in TensorRT.

    Args:
        implementations: of `IMPLEMENTATIONS`; empty: all. "plugin" is our kernel in a TensorRT engine, beside
        TensorRT's own layer.

    Raises:
        InputError: there is nothing to race, no such implementation, or it is none of these norms'.
        RuntimeUnavailable: what could be raced can't run here.
    """
    threads, rounds, seed = options.threads, options.rounds, options.seed
    check_counts(threads, rounds)
    wanted = list(implementations or IMPLEMENTATIONS)
    if unknown := [name for name in wanted if name not in IMPLEMENTATIONS]:
        raise InputError(f"there is no form {unknown[0]!r} of a norm; there are {', '.join(IMPLEMENTATIONS)}")
    if not cases:
        raise InputError("there is no norm to race: the file holds none as one node, and `inspect` says why")
    before, entries, warmup, notes = machine(), list[Entry](), 0, list[str]()
    engines = PLUGIN in wanted
    absent = missing("tensorrt") if engines else ""
    not_run = [NotRun("TensorRT", absent)] if absent else []
    for done, case in enumerate(cases):
        if progress is not None:
            progress(str(case), done, len(cases))
        raced, timing = _raced(case, wanted, engines and not absent, options, progress)
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
        machine().load,
        tuple(notes),
    )


def race_norms(
    sources: Sequence[Any],
    implementations: Sequence[str],
    kind: str | None,
    options: RaceOptions,
    progress: Progress | None = None,
) -> Race:
    """The norms of one ONNX file, or the usual ones of a kind.

    Raises:
        InputError: it is not one file, or there is no such kind or implementation.
        GraphError: the file is broken.
    """
    sizes = sizes_of(options.sizes)
    notes = list[str]()
    if kind is None:
        if len(sources) != 1:
            raise InputError(
                f"{len(sources)} files were given; norms are raced of one ONNX file, or without any with --norms"
            )
        cases, notes = norms_of(sources[0], sizes)
        if notes and not cases:
            raise InputError(
                "none of the file's norms can be raced: "
                + "; ".join(notes[:_SAID])
                + ("; ..." if notes[_SAID:] else "")
            )
    elif sizes:
        raise InputError(
            f"--norms races norms of fixed sizes, and sizes were given: {dict(sizes)}; leave one of them out"
        )
    elif sources:
        raise InputError(
            f"--norms races usual norms, and files were given: {list(map(str, sources))}; leave one of them out"
        )
    elif kind != "all" and kind not in USUAL:
        raise InputError(f"there is no kind of norm {kind!r}; there are {', '.join(USUAL)}, or all")
    else:
        cases = list(USUAL.values()) if kind == "all" else [USUAL[kind]]
    chosen = [] if list(implementations) == ["all"] else implementations
    raced = bench_norms(cases, chosen, options, progress)
    return replace(raced, notes=(*notes, *raced.notes))


def norms_of(
    source: str | os.PathLike[str] | onnx.ModelProto, sizes: Mapping[str, int] | None = None
) -> tuple[list[NormCase], list[str]]:
    """The distinct norms of a file as ``optimize`` writes them, at the given sizes of dynamic dims, and notes on those
    left out.

    Those that differ in epsilon alone take the same time, and are one.

    Raises:
        InputError: there is no such dim.
        GraphError: the file is broken.
    """
    proto = opened_model(source) if isinstance(source, onnx.ModelProto) else load_onnx(source)
    usual = {d.name: d.opt for spec in recorded(proto).get("inputs", ()) for d in spec.shape if d.name is not None}
    proto, _ = rewrite.optimize(proto, runtime="tensorrt")  # for which every norm is one node
    fixed = onnx.ModelProto()
    fixed.CopyFrom(proto)
    del fixed.graph.value_info[:]
    named = {dim.dim_param for value in fixed.graph.input for dim in value.type.tensor_type.shape.dim if dim.dim_param}
    known(sizes or {}, named)
    for value in fixed.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if size := (usual | dict(sizes or {})).get(dim.dim_param):
                dim.dim_value = size
    for value in fixed.graph.output:
        value.type.tensor_type.ClearField("shape")
    graph, cases, notes = ShapedGraph(fixed), dict[str, NormCase](), list[str]()
    for node in graph.nodes:
        if node.op not in _RACED or not is_standard(node):
            continue
        case = _case(graph, node)
        if isinstance(case, str):
            notes.append(f"{node.name or node.outputs[0].name} was not raced: {case}")
        else:
            cases.setdefault(str(case), case)
    return [*cases.values()], notes


def _case(graph: Graph, node: gs.Node) -> NormCase | str:
    """The norm that a standard node is, or why it can't be raced."""
    kind, dims, given = graph.dtype(node.inputs[0]), graph.shape(node.inputs[0]), graph.attrs(node)
    if kind is None or kind.name not in UNIT_ROUNDOFF or kind.name == "bfloat16":
        return "its type is not float32, float16 or float64"
    if dims is None or not all(isinstance(d, int) and d > 0 for d in dims):
        return f"its shape is {list(dims) if dims is not None else 'not known'}; give the sizes with --size"
    shape = tuple(d for d in dims if isinstance(d, int))
    if math.prod(shape) > MOST:
        return f"its input {list(shape)} has more than {MOST} elements; give smaller sizes with --size"
    case = NormCase(_RACED[node.op], shape, epsilon=given.get("epsilon", 1e-5), dtype=kind.name)
    if case.kind in ("LayerNorm", "RMSNorm"):
        axis = int(given.get("axis", -1))
        return replace(case, axis=axis - len(dims) if axis >= 0 else axis)
    return replace(case, groups=int(given["num_groups"])) if case.kind == "GroupNorm" else case


def _raced(
    case: NormCase,
    wanted: Sequence[str],
    engines: bool,
    options: RaceOptions,
    progress: Progress | None,
) -> tuple[list[Entry], Timing | None]:
    """The entries of one norm, and their times; None where no form could be timed."""
    entries, running = list[Entry](), list[LiveRunner]()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for runtime, form in _contestants(case, wanted, engines):
            entry = Entry(runtime, form=form, norm=str(case))
            try:
                path = _file(case, form, runtime, Path(folder))
                runner = stack.enter_context(open_runner(path, threads=0 if runtime == "TensorRT" else options.threads))
                entry = _judged(entry, case, runner)
                running += [] if entry.reason else [runner]
            except NormdeployError as error:
                entry = replace(entry, reason=str(error))
            entries.append(entry)
        if not running:
            return entries, None
        calls = [runner.prepare(case.feeds()) for runner in running]
        timing = race(calls, rounds=options.rounds, seed=options.seed, progress=progress)
        places = iter(range(len(running)))
        return [e if e.reason else timed(e, timing, next(places)) for e in entries], timing


def _contestants(case: NormCase, wanted: Sequence[str], engines: bool) -> Iterator[tuple[str, str]]:
    """Runtime and form of each."""
    yield from (("onnxruntime CPU", form) for form in case.forms if form in wanted)
    if engines:
        yield from (("TensorRT", form) for form in ("standard", PLUGIN) if form in wanted)


def _file(case: NormCase, form: str, runtime: str, folder: Path) -> Path:
    path = folder / f"{form}.onnx"
    write_bytes(path, case.model("standard" if form == PLUGIN else form).SerializeToString())
    if runtime != "TensorRT":
        return path
    build(
        path, engine := folder / f"{form}.engine", runtime="tensorrt", norm_impl=PLUGIN if form == PLUGIN else "native"
    )
    return engine


def _judged(entry: Entry, case: NormCase, runner: LiveRunner) -> Entry:
    """With its errors, and the reason where it does not compute the norm."""
    errors = []
    for offset in (0.0, FAR):
        feeds = case.feeds(offset)
        (answer,), expected = runner.infer(feeds).values(), case.reference(feeds["x"])
        if not offset:
            wrong = disagreement([answer], [expected], UNIT_ROUNDOFF[case.dtype]).reason
            entry = replace(entry, reason=f"it does not compute the norm: {wrong}; not timed" if wrong else "")
        errors.append(float(np.abs(answer.astype(np.float64) - expected).max()))
    return replace(entry, error=errors[0], far_error=errors[1])
