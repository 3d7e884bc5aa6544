"""One architecture through export, verify, optimize of the plain file, build; every stage with default options.

*Time.* The whole of ``normdeploy.export`` against ``torch.onnx.export(dynamo=True)`` on the same module, the same
inputs and ranges of dims, both until the file is written: each of the two has to trace the module itself. Both run in
one process, which has exported another model by each before, so that imports and caches that are filled once are paid
by neither; one after the other, so that another job on the machine hits both. Where the ratio is not between ``LOW``
and ``AGAIN`` both run again, ours first, up to ``PAIRS`` times in all, and the smallest of each is compared: what this
model alone makes torch load is paid by the plain one's first run, which a second one replaces, and one run may be half
as long again as the next beside other jobs. It is processor time, that of child processes included: seconds on the
clock say little there.

*Whose fault.* Where ``verify`` fails, the plain file is verified by the same rule. Where that fails too the fault was
there before this project touched anything.
"""

from __future__ import annotations

import gc
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

import normdeploy
from normdeploy.errors import NormdeployError
from normdeploy.verbs.arguments.export_result import ExportResult

from .catalogue import Architecture, made
from .catalogue.building import SIZES
from .leftovers import decomposed

NORM = re.compile(r".*(Layer|Batch|Group|Instance|RMS)Norm(Act)?(\dd)?$")
LOW, AGAIN, PAIRS = 0.85, 1.15, 2
BUILD_SECONDS = 120.0


@dataclass
class Row:
    """Everything about one architecture; "" of a stage that failed nowhere, or did not run."""

    name: str
    library: str
    modules: dict[str, int] = field(default_factory=dict)  # class of a norm module -> calls in one run of the model
    plain: str = ""  # what the bare exporter says where it fails
    export: str = ""  # what ours says where it fails
    norms: dict[str, int] = field(default_factory=dict)  # "LayerNorm fused" -> how many
    reasons: dict[str, int] = field(default_factory=dict)  # why something was refused, undone or kept -> how often
    left: int = 0  # decomposed norms that are left in our file
    unexplained: list[str] = field(default_factory=list)  # those of them that no finding with a reason holds
    nodes: dict[str, int] = field(default_factory=dict)  # plain, ours, optimized -> nodes that compute
    verify: str = ""  # "passes", or what is wrong
    plain_verify: str = ""  # the same of the plain file, where ours fails
    optimize: str = ""  # "passes": the optimized plain file gives what it gave
    optimized: dict[str, int] = field(default_factory=dict)  # norms, as above
    optimized_unexplained: list[str] = field(default_factory=list)
    build: str = ""
    runs: dict[str, list[float]] = field(default_factory=dict)  # plain, ours -> processor seconds of each run
    stages: dict[str, float] = field(default_factory=dict)  # of our last export, wall clock
    took: dict[str, float] = field(default_factory=dict)  # seconds on the clock of the other verbs
    notes: list[str] = field(default_factory=list)
    failed: str = ""  # what ended the whole row: the time limit, a crash

    @property
    def ratio(self) -> float | None:
        """Our export's time over the plain one's."""
        return (
            min(self.runs["ours"]) / min(self.runs["plain"])
            if self.runs.get("ours") and self.runs.get("plain")
            else None
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio and round(self.ratio, 3)}


def measured(architecture: Architecture, folder: Path, save: Callable[[Row], None]) -> Row:
    """``save`` is called after each stage, so that a crash or the time limit leaves what was known."""
    row = Row(architecture.name, architecture.library)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    module = made(architecture)
    specs: dict[str, Any] = {"inputs": architecture.inputs, "dims": architecture.dims}
    files = {name: folder / f"{name}.onnx" for name in ("plain", "ours", "optimized")}
    feeds = samples(architecture)
    row.modules = _norm_calls(module, feeds)
    save(row)
    result = _exports(row, module, feeds, files, specs)
    save(row)
    if result is not None:
        _account(row, result)
        row.verify = _clocked(row, "verify", lambda: verdict(module, files["ours"], specs))
        if row.verify != "passes" and not row.plain:
            row.plain_verify = verdict(module, files["plain"], specs)
        save(row)
        row.build = _clocked(row, "build", lambda: _built(files["ours"], folder / "model.engine"))
        save(row)
    if not row.plain:
        _clocked(row, "optimize", lambda: _optimized(row, files, specs))
    return row


def samples(architecture: Architecture) -> dict[str, torch.Tensor]:
    """Example inputs at the usual sizes, for the bare exporter and the census of modules: by the text of
    ``--input``."""
    return {spec.partition(":")[0]: _sample(spec) for spec in architecture.inputs}


def _sample(spec: str) -> torch.Tensor:
    found = re.fullmatch(r"\w+:(\w+)\[(.*?)\](?:\{(.*?):(.*?)\})?", spec)
    assert found is not None, spec
    dtype, dims, low, high = found.groups()
    shape = [int(SIZES[d].split(":")[1]) if d in SIZES else int(d) for d in dims.split(",")]
    if dtype == "int64":
        return torch.randint(int(low), int(high), shape)
    return torch.randn(shape) if low is None else float(low) + (float(high) - float(low)) * torch.rand(shape)


def dynamic(architecture_inputs: tuple[str, ...]) -> dict[str, dict[int, Any]]:
    """The ranges of the dims as ``torch.onnx.export`` takes them."""
    made: dict[str, Any] = {}
    for name, sizes in SIZES.items():
        low, _, high = map(int, sizes.split(":"))
        made[name] = torch.export.Dim(name, min=low, max=high)
    shapes = {}
    for spec in architecture_inputs:
        dims = spec.partition("[")[2].partition("]")[0].split(",")
        shapes[spec.partition(":")[0]] = {axis: made[d] for axis, d in enumerate(dims) if d in made}
    return shapes


# ------------------------------------------------------------------ export, and its time


def _exports(
    row: Row, module: nn.Module, feeds: Mapping[str, torch.Tensor], files: Mapping[str, Path], specs: Mapping[str, Any]
) -> ExportResult | None:
    row.runs = {"plain": [], "ours": []}
    results: list[Any] = []

    def plain() -> None:
        torch.onnx.export(
            module,
            (),
            files["plain"],
            kwargs=dict(feeds),
            dynamic_shapes=dynamic(specs["inputs"]),
            dynamo=True,
            verbose=False,
        )

    def ours() -> None:
        results.append(normdeploy.export(module, output=files["ours"], **specs))

    if reason := _failure(lambda: _timed(row.runs["plain"], plain)):
        row.plain = reason
    if reason := _failure(lambda: _timed(row.runs["ours"], ours)):
        row.export = reason
    while row.ratio is not None and not LOW < row.ratio < AGAIN and len(row.runs["ours"]) < PAIRS:
        _timed(row.runs["ours"], ours)
        _timed(row.runs["plain"], plain)
    return results[-1] if results else None


def _timed(runs: list[float], work: Callable[[], object]) -> None:
    gc.collect()
    start = sum(os.times()[:4])
    work()
    runs.append(round(sum(os.times()[:4]) - start, 3))


def _clocked(row: Row, stage: str, work: Callable[[], str]) -> str:
    start = time.perf_counter()
    said = work()
    row.took[stage] = round(time.perf_counter() - start, 1)
    return said


def _failure(work: Callable[[], object]) -> str:
    """What went wrong, in one line; "" where nothing did."""
    try:
        work()
    except Exception as error:
        while not isinstance(error, NormdeployError) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        said = " ".join(
            str(error).partition("While executing")[0].split()
        )  # what follows quotes sources with their paths
        return f"{type(error).__name__}: {said[:400]}"
    return ""


# ------------------------------------------------------------------ norms


def _norm_calls(module: nn.Module, feeds: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """How often each class of norm module runs: those called so that hold no other norm module."""
    calls: Counter[str] = Counter()
    handles = []
    for m in module.modules():
        inner = [c for c in m.modules() if c is not m and NORM.match(type(c).__name__)]
        if NORM.match(type(m).__name__) and not inner:
            handles.append(m.register_forward_hook(lambda m, *_: calls.update([type(m).__name__])))
    with torch.no_grad():
        module(**feeds)
    for handle in handles:
        handle.remove()
    return dict(calls)


def _account(row: Row, result: Any) -> None:
    row.stages = {stage: round(s, 2) for stage, s in result.seconds.items()}
    row.nodes["ours"] = _count(result.proto)
    row.norms = _census(result)
    told = [
        f for f in result.summary.findings if f.reason and not f.reason.startswith("it is already one standard node")
    ]
    row.reasons = dict(Counter(f"{f.kind} {f.status}: {f.reason}" for f in told))
    left = decomposed(result.proto)
    row.left, row.unexplained = len(left), _unexplained(left, result)
    row.notes = list(result.notes)


def _census(result: Any) -> dict[str, int]:
    return dict(sorted(Counter(f"{f.kind} {f.status}" for f in result.summary.findings).items()))


def _unexplained(left: list[str], result: Any) -> list[str]:
    """Roots that no refused finding holds; cleaning up renames tensors, so where their number fits that of the findings
    all are told."""
    refused = [f for f in result.summary.findings if f.status in ("refused", "undone") and f.reason]
    told = {t for f in refused for t in (*f.tensors, f.tensor)}
    unknown = [name for name in left if name not in told]
    return unknown if len(left) > len(refused) else []


def _count(proto: onnx.ModelProto) -> int:
    """Nodes that compute: exporters differ in where they keep constants."""
    return sum(n.op_type != "Constant" for n in proto.graph.node)


# ------------------------------------------------------------------ the other verbs


def verdict(source: Any, path: Path, specs: Mapping[str, Any]) -> str:
    """ "passes", or what ``verify`` says is wrong."""
    try:
        found = normdeploy.verify(source, path, **specs)
    except NormdeployError as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    if found:
        return "passes"
    wrong = [
        f"{r.output} in {r.runtime}, {r.case}: {r.reason or f'{r.max_abs_error:.1e} of {r.allowed:.1e}'}"
        for r in found.results
        if not r and r.runtime != "eager"
    ]
    wrong += [f"{m.runtime}: {m.reason}" for m in found.not_run if m.runtime.startswith("onnxruntime (")]
    wrong += [str(w.reason) for w in found.weights if not w]
    return "; ".join(wrong)[:800] or "; ".join(found.notes)[:400]


def _built(path: Path, engine: Path) -> str:
    try:
        built = normdeploy.build(path, engine, timeout=BUILD_SECONDS)
    except NormdeployError as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    return f"{built.layers} layers"


def _optimized(row: Row, files: Mapping[str, Path], specs: Mapping[str, Any]) -> str:
    row.nodes["plain"] = _count(onnx.load(files["plain"], load_external_data=False))
    try:
        result = normdeploy.optimize(files["plain"], files["optimized"])
    except NormdeployError as error:
        row.optimize = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        return row.optimize
    row.nodes["optimized"], row.optimized = _count(result.proto), _census(result)
    row.optimized_unexplained = _unexplained(decomposed(result.proto), result)
    row.optimize = verdict(files["plain"], files["optimized"], specs)
    return row.optimize
