"""Measure one architecture: export, verify, optimize of the plain file, and build, all with default options.

*Time.* The whole of ``normdeploy.export`` is compared with ``torch.onnx.export(dynamo=True)``, with the same module,
inputs and ranges of dims. Both run until the file is written, because each must trace the module itself. They run in
one process, one after the other, so that other jobs on the machine affect both. Before, the process has exported
another model with each exporter, so that imports and caches do not count.

If the ratio is not between ``LOW`` and ``AGAIN``, both run again, ours first, up to ``PAIRS`` times in total. Automatic
rows run again only above ``AGAIN_AUTOMATIC``. The smallest times are compared. There are two reasons for repetitions.
The first run of the plain exporter includes the loading of everything in torch that only this model needs. And with
other jobs on the machine, the times of two runs may differ by half. Times are processor times including child
processes, because wall times depend on the other jobs.

*Cause of failures.* If ``verify`` fails, the plain file is verified by the same rule. If the plain file fails too,
normdeploy did not cause the failure.
"""

from __future__ import annotations

import gc
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

import normdeploy
from normdeploy.errors import NormdeployError
from normdeploy.verbs.arguments.export_result import ExportResult

from .catalogue import Architecture, Automatic, made, samples
from .catalogue.automatic import UnmakeableError
from .leftovers import decomposed
from .narrowing import describe_plain_sizes, proposed_sizes

NORM = re.compile(r".*(Layer|Batch|Group|Instance|RMS)Norm(Act)?(\dd)?$")
LOW, AGAIN, PAIRS = 0.85, 1.15, 2
# An automatic row is measured again only if its ratio is above this, because there are about a thousand of them.
AGAIN_AUTOMATIC = 1.3
BUILD_SECONDS = 120.0
# Limit on the processor time of ``verify`` of an automatic row
VERIFY_SECONDS = 6.0


@dataclass
class Row:
    """Results for one architecture. The text of a stage is "" if the stage did not fail or did not run.

    Attributes:
        modules: class of a norm module -> calls in one run of the model.
        plain: error of the bare exporter.
        export: error of our exporter.
        norms: "LayerNorm fused" -> number.
        reasons: why a norm was refused, undone or kept -> number.
        left: number of norms that are still decomposed in our file.
        unexplained: number of these norms that no finding with a reason covers.
        nodes: plain, ours, optimized -> number of nodes that compute.
        verify: "passes", or the fault.
        plain_verify: result of ``verify`` for the plain file, if our file fails.
        optimize: "passes" if the optimized plain file has the same outputs as before.
        optimized: numbers of norms in the optimized plain file, as in ``norms``.
        runs: plain, ours -> processor seconds of each run.
        stages: wall seconds of our last export.
        took: wall seconds of the other verbs.
        failed: reason why the row ended early: the time limit or a crash.
        automatic: True if the model was made automatically. Such rows have no ``optimize`` and no ``build``.
        unmade: reason why no model was made, or why no inputs were found.
        fixed: errors of both exporters with dynamic dims, if the row was measured with fixed sizes.
        narrowed: dim -> sizes that the row was measured with, because our export refused more of them, and what the
            plain file does at the refused sizes.
        whole: errors of both exporters for the whole model, if the row was measured for a part of it.
        model: class of the model, and ``inputs`` in the notation of ``--input``, of an automatic row.
    """

    name: str
    library: str
    modules: dict[str, int] = field(default_factory=dict)
    plain: str = ""
    export: str = ""
    norms: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    left: int = 0
    unexplained: list[str] = field(default_factory=list)
    nodes: dict[str, int] = field(default_factory=dict)
    verify: str = ""
    plain_verify: str = ""
    optimize: str = ""
    optimized: dict[str, int] = field(default_factory=dict)
    optimized_unexplained: list[str] = field(default_factory=list)
    build: str = ""
    runs: dict[str, list[float]] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failed: str = ""
    automatic: bool = False
    unmade: str = ""
    fixed: str = ""
    narrowed: dict[str, str] = field(default_factory=dict)
    whole: str = ""
    model: str = ""
    inputs: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """Return our export's time over the plain one's; None if one failed."""
        return (
            min(self.runs["ours"]) / min(self.runs["plain"])
            if self.runs.get("ours") and self.runs.get("plain")
            else None
        )

    def to_json(self) -> dict[str, Any]:
        """Convert the row to JSON's types.

        Returns:
            fields and the ratio.
        """
        return asdict(self) | {"ratio": self.ratio and round(self.ratio, 3)}


@dataclass(frozen=True)
class Exports:
    """Results of the exports with one choice of sizes.

    Attributes:
        result: our result; None if our export failed.
        refusal: the error of our export; None without an error.
    """

    result: ExportResult | None
    refusal: Exception | None


def measured(architecture: Architecture | Automatic, folder: Path, save: Callable[[Row], None]) -> Row:
    """Measure an architecture.

    Args:
        save: called after each stage, so that the results so far survive a crash or the time limit.

    Returns:
        the row.
    """
    row = Row(architecture.name, architecture.library)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if isinstance(architecture, Automatic):
        return _measured_automatic(row, architecture, folder, save)
    module = made(architecture)
    files = {name: folder / f"{name}.onnx" for name in ("plain", "ours", "optimized")}
    row.modules = _norm_calls(module, samples.draw(architecture))
    save(row)
    result = _exports(row, module, architecture, files, pairs=PAIRS).result
    save(row)
    specs = _specs(architecture)
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


def warm_up(architecture: Architecture, folder: Path) -> None:
    """Export an architecture with both exporters, so that their imports are done."""
    module = made(architecture)
    files = {name: folder / f"{name}.onnx" for name in ("plain", "ours")}
    _exports(Row(architecture.name, architecture.library), module, architecture, files, pairs=1)


def _measured_automatic(row: Row, automatic: Automatic, folder: Path, save: Callable[[Row], None]) -> Row:
    """Measure an automatic architecture: exports by both exporters, and a short ``verify``.

    If both exporters refuse the whole model, both export the part that the catalogue states. If they refuse the dynamic
    dims, both export with fixed sizes. If only ours refuses a dim, both export with the sizes that its error proposes.
    """
    row.automatic = True
    try:
        architecture = automatic.resolved()
    except UnmakeableError as error:
        row.unmade = str(error)
        return row
    files = {name: folder / f"{name}.onnx" for name in ("plain", "ours")}
    module, exported = _export_automatic(row, architecture, files, save)
    if row.plain and row.export and architecture.part is not None:
        row.whole = f"plain: {row.plain} ours: {row.export}"
        row.plain = row.export = ""
        architecture = architecture.part
        module, exported = _export_automatic(row, architecture, files, save)
    if row.plain and row.export and architecture.sizes:
        row.fixed = f"plain: {row.plain} ours: {row.export}"
        row.plain = row.export = ""
        architecture = with_fixed_sizes(architecture)
        row.inputs = list(architecture.inputs)
        exported = _exports(row, module, architecture, files, pairs=PAIRS, usual=(0.0, AGAIN_AUTOMATIC))
    while not row.plain and (sizes := proposed_sizes(exported.refusal, architecture)) is not None:
        row.narrowed[sizes.name] = f"{sizes.text} ({describe_plain_sizes(sizes, architecture, module, files['plain'])})"
        architecture = sizes.applied_to(architecture)
        row.inputs = list(architecture.inputs)
        row.export = ""
        exported = _exports(row, module, architecture, files, pairs=PAIRS, usual=(0.0, AGAIN_AUTOMATIC))
    save(row)
    result = exported.result
    if not row.plain:
        row.nodes["plain"] = _count(onnx.load(files["plain"], load_external_data=False))
    if result is None:
        return row
    _account(row, result)
    specs = {**_specs(architecture), "seeds": 1, "max_seconds": VERIFY_SECONDS}
    row.verify = _clocked(row, "verify", lambda: verdict(module, files["ours"], specs))
    if row.verify != "passes" and not row.plain:
        row.plain_verify = verdict(module, files["plain"], specs)
    return row


def _export_automatic(
    row: Row, architecture: Architecture, files: Mapping[str, Path], save: Callable[[Row], None]
) -> tuple[nn.Module, Exports]:
    """Build an architecture, count its norms, and export it with both exporters."""
    module = architecture.build()
    row.model = type(module).__name__
    row.inputs = list(architecture.inputs)
    row.modules = _norm_calls(module, samples.draw(architecture))
    save(row)
    return module, _exports(row, module, architecture, files, pairs=PAIRS, usual=(0.0, AGAIN_AUTOMATIC))


def _specs(architecture: Architecture) -> dict[str, Any]:
    return {"inputs": architecture.inputs, "dims": architecture.dims}


def dynamic(architecture: Architecture) -> dict[str, dict[int, Any]]:
    """Convert the ranges of the dims for ``torch.onnx.export``.

    Returns:
        input -> axis -> dim.
    """
    made: dict[str, Any] = {}
    for name, sizes in architecture.sizes.items():
        low, _, high = map(int, sizes.split(":")[:3])
        made[name] = torch.export.Dim(name, min=low, max=high)
    shapes = {}
    for spec in architecture.inputs:
        dims = spec.partition("[")[2].partition("]")[0].split(",")
        shapes[spec.partition(":")[0]] = {axis: made[d] for axis, d in enumerate(dims) if d in made}
    return shapes


def with_fixed_sizes(architecture: Architecture) -> Architecture:
    """Replace the dims of the inputs by their usual sizes.

    Returns:
        The architecture without dynamic dims.
    """
    sizes = {name: text.split(":")[1] for name, text in architecture.sizes.items()}

    def fix(spec: str) -> str:
        """Replace the dims of one input."""
        head, _, rest = spec.partition("[")
        dims, _, tail = rest.partition("]")
        return f"{head}[{','.join(sizes.get(d, d) for d in dims.split(','))}]{tail}"

    return replace(architecture, inputs=tuple(fix(spec) for spec in architecture.inputs), ranges={})


# ------------------------------------------------------------------ export, and its time


def _exports(
    row: Row,
    module: nn.Module,
    architecture: Architecture,
    files: Mapping[str, Path],
    *,
    pairs: int,
    usual: tuple[float, float] = (LOW, AGAIN),
) -> Exports:
    """Export with both exporters, up to ``pairs`` times if the ratio is not between the two ``usual`` values."""
    row.runs = {"plain": [], "ours": []}
    feeds = samples.draw(architecture)
    specs = _specs(architecture)
    results: list[Any] = []

    def plain() -> None:
        """Export with torch."""
        torch.onnx.export(
            module,
            (),
            files["plain"],
            kwargs=feeds,
            dynamic_shapes=dynamic(architecture),
            dynamo=True,
            verbose=False,
        )

    def ours() -> None:
        """Export with normdeploy."""
        results.append(normdeploy.export(module, output=files["ours"], **specs))

    if (error := _failure(lambda: _timed(row.runs["plain"], plain))) is not None:
        row.plain = _describe_error(error)
    refusal = _failure(lambda: _timed(row.runs["ours"], ours))
    if refusal is not None:
        row.export = _describe_error(refusal)
    while row.ratio is not None and not usual[0] < row.ratio < usual[1] and len(row.runs["ours"]) < pairs:
        _timed(row.runs["ours"], ours)
        _timed(row.runs["plain"], plain)
    return Exports(results[-1] if results else None, refusal)


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


def _failure(work: Callable[[], object]) -> Exception | None:
    """Run ``work``; return its error, or None."""
    try:
        work()
    except Exception as error:
        while not isinstance(error, NormdeployError) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        return error
    return None


def _describe_error(error: Exception) -> str:
    """Return an error on one line."""
    # The text after "While executing" quotes sources with their paths.
    said = " ".join(str(error).partition("While executing")[0].split())
    return f"{type(error).__name__}: {said[:400]}"


# ------------------------------------------------------------------ norms


def _norm_calls(module: nn.Module, feeds: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Count the calls of each class of norm module that contains no other norm module."""
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
    """Return roots that no refused finding covers. Cleaning renames tensors, so all roots count as explained if there
    are at least as many such findings.
    """
    refused = [f for f in result.summary.findings if f.status in ("refused", "undone") and f.reason]
    told = {t for f in refused for t in (*f.tensors, f.tensor)}
    unknown = [name for name in left if name not in told]
    return unknown if len(left) > len(refused) else []


def _count(proto: onnx.ModelProto) -> int:
    """Count the nodes that compute; exporters differ in the placement of constants."""
    return sum(n.op_type != "Constant" for n in proto.graph.node)


# ------------------------------------------------------------------ the other verbs


def verdict(source: Any, path: Path, specs: Mapping[str, Any]) -> str:
    """Verify a file.

    Returns:
        "passes", or the fault that ``verify`` reports.
    """
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
    wrong += [found.trace] if found.trace else []
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
