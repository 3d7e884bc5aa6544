"""One architecture through everything: the pipeline from the module, the exporter's own file through the passes,
parity, an engine."""

from __future__ import annotations

import contextlib
import io
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

import normdeploy
from benchmarks.architectures.catalogue import Architecture, made
from benchmarks.architectures.leftovers import decomposed
from normdeploy import build, errors
from normdeploy.exporting.exporter import export_to_proto
from normdeploy.findings.records import Finding
from normdeploy.graphs.own_op_functions import DOMAIN
from normdeploy.loading import from_module
from normdeploy.model import LoadedModel
from normdeploy.option_values import DEFAULT_OPSET
from normdeploy.storage.onnx_files import save_onnx
from normdeploy.verbs.verify import file_comparison as compare

NORM = re.compile(r".*(Layer|Batch|Group|Instance|RMS)Norm(Act)?(\dd)?$")
BUILD_SECONDS = 60.0


@dataclass
class Result:
    """One file that came out."""

    nodes: int = 0
    norms: dict[str, int] = field(default_factory=dict)  # "LayerNorm fused" -> how many
    own: dict[str, int] = field(default_factory=dict)  # op of this project's own -> how many
    left: list[str] = field(default_factory=list)  # decomposed norms that are left, by the root's output
    refused: list[dict[str, Any]] = field(default_factory=list)
    checked: str = ""  # what onnx.checker says against it
    parity: list[dict[str, Any]] = field(default_factory=list)  # the worst output of each runtime
    failed: str = ""  # the error that ended it

    @property
    def excused(self) -> str:
        """Why a failed parity is none of this project's doing; "" where it is, or where none failed."""
        failed = [p for p in self.parity if not p["ok"]]
        if failed and all(p["other form"] for p in failed):
            return "onnxruntime's kernel: passes in the form for --runtime onnxruntime-accurate"
        if failed and all(not p["reason"] and p["untouched"] >= p["error"] / 2 for p in failed):
            return "the exporter's own file, untouched, is as far off"
        return ""

    @property
    def accounted(self) -> int:
        """Norms that are one node, folded, or kept with a reason."""
        return sum(
            n
            for what, n in self.norms.items()
            if not what.endswith(("refused", "undone")) and not what.startswith("scale")
        )


@dataclass
class Row:
    """Everything about one architecture."""

    name: str
    modules: dict[str, int] = field(default_factory=dict)  # class of a norm module -> calls in one run of the model
    exporter_nodes: int = 0  # of torch.onnx.export(dynamo=True, optimize=True)
    ours: Result = field(default_factory=Result)
    rewritten: Result = field(default_factory=Result)  # the exporter's optimized file through `optimize`
    portable: Result = field(default_factory=Result)  # ours, with ops of this project's own
    engine: str = ""
    portable_engine: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def norm_calls(self) -> int:
        return sum(self.modules.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = round(time.perf_counter() - start, 2)


def measured(architecture: Architecture, folder: Path, engine: bool = True) -> Row:
    row = Row(architecture.name)
    module = made(architecture)
    with row.timed("load"):
        model = from_module(module, inputs=architecture.inputs, dims=architecture.dims)
    row.modules = _norm_calls(module, model)
    path = folder / "ours.onnx"
    with row.timed("ours"):
        result = normdeploy.export(module, inputs=architecture.inputs, dims=architecture.dims, output=path)
    row.seconds.update({f"ours: {stage}": round(s, 2) for stage, s in result.seconds.items()})
    _fill(row.ours, result.proto, result.summary.findings)
    row.ours.failed = "; ".join(n for n in result.notes if "not simplified" in n)
    with row.timed("parity"):
        _parity(row.ours, model, path)
    with row.timed("portable"):
        portable = normdeploy.optimize(result.proto, fuse="portable")
    _fill(row.portable, portable.proto, portable.summary.findings)
    joined = folder / "portable.onnx"
    save_onnx(portable.proto, joined)
    _parity(row.portable, model, joined)
    with row.timed("exporter"):
        exported = _exported(model)
    row.exporter_nodes = _count(exported)
    with row.timed("optimize"):
        rewritten = normdeploy.optimize(exported)
    _fill(row.rewritten, rewritten.proto, rewritten.summary.findings)
    other = folder / "rewritten.onnx"
    save_onnx(rewritten.proto, other)
    _parity(row.rewritten, model, other)
    if not all(p["ok"] for p in (*row.ours.parity, *row.rewritten.parity, *row.portable.parity)):
        _excuse(row, model, folder)
    if engine:
        with row.timed("engine"):
            row.engine = _engine(path, folder / "model.engine")
            row.portable_engine = _engine(joined, folder / "portable.engine")
    return row


def _norm_calls(module: nn.Module, model: LoadedModel) -> dict[str, int]:
    """How often each class of norm module runs: those called so that hold no other norm module."""
    calls: Counter[str] = Counter()
    handles = []
    for m in module.modules():
        inner = [c for c in m.modules() if c is not m and NORM.match(type(c).__name__)]
        if NORM.match(type(m).__name__) and not inner:
            handles.append(m.register_forward_hook(lambda m, *_: calls.update([type(m).__name__])))
    feeds = {name: torch.from_numpy(value) for name, value in model.samples(0).items()}
    with torch.no_grad():
        module(**feeds)
    for handle in handles:
        handle.remove()
    return dict(calls)


def _exported(model: LoadedModel) -> onnx.ModelProto:
    names = [spec.name for spec in model.inputs]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model.program,
            dynamo=True,
            optimize=True,
            opset_version=DEFAULT_OPSET,
            input_names=names,
            output_names=list(model.outputs),
            verbose=False,
        )
    assert program is not None
    return program.model_proto


def _count(proto: onnx.ModelProto) -> int:
    """Nodes that compute: exporters differ in where they keep constants."""
    return sum(n.op_type != "Constant" for n in proto.graph.node)


def _fill(result: Result, proto: onnx.ModelProto, findings: tuple[Finding, ...]) -> None:
    result.nodes = _count(proto)
    result.norms = dict(sorted(Counter(f"{f.kind} {f.status}" for f in findings).items()))
    result.own = dict(sorted(Counter(n.op_type for n in proto.graph.node if n.domain == DOMAIN).items()))
    result.left = decomposed(proto)
    result.refused = [
        {
            "kind": f.kind,
            "status": f.status,
            "module": f.module,
            "tensor": f.tensor,
            "became": f.became,
            "reason": f.reason,
        }
        for f in findings
        if f.reason and not f.reason.startswith("it is already one standard node")
    ]
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:
        result.checked = str(error).split("\n")[0]


def _parity(result: Result, model: LoadedModel, path: Path) -> None:
    """`verify`: two seeds at the usual batch, others at 1 and 3, small inputs and zeros, by the rule of
    normdeploy.verbs.verify.file_comparison."""
    try:
        result.parity = _worst(model, path)
    except errors.NormdeployError as error:
        result.failed = f"{type(error).__name__}: {error}"


def _worst(model: LoadedModel, path: Path) -> list[dict[str, Any]]:
    """What came nearest to failing in each runtime, or failed most."""
    found = []
    comparison = compare.compare_files(model, path, seeds=2)
    for runtime in dict.fromkeys(r.runtime for r in comparison.results if r.runtime != "eager"):
        mine = [r for r in comparison.results if r.runtime == runtime]
        worst = max(mine, key=lambda r: (not r, r.max_abs_error / r.allowed if r.allowed else 0.0))
        numbers = {"ok": bool(worst), "output": worst.output, "error": worst.max_abs_error, "allowed": worst.allowed}
        found.append({"runtime": runtime, **numbers, "case": worst.case, "reason": worst.reason})
    return found


def _excuse(row: Row, model: LoadedModel, folder: Path) -> None:
    """Whose doing a failed parity is: the same for the exporter's raw file, and for the form with the smallest
    errors."""
    raw = export_to_proto(model)
    paths = {"untouched": folder / "untouched.onnx", "other form": folder / "other_form.onnx"}
    save_onnx(raw, paths["untouched"])
    save_onnx(normdeploy.optimize(raw, runtime="onnxruntime-accurate").proto, paths["other form"])
    untouched, other = ({p["runtime"]: p for p in _worst(model, path)} for path in paths.values())
    for found in (*row.ours.parity, *row.rewritten.parity, *row.portable.parity):
        if not found["ok"]:
            found["untouched"] = untouched[found["runtime"]]["error"]
            found["other form"] = other[found["runtime"]]["ok"]


def _engine(path: Path, engine: Path) -> str:
    try:
        built = build(path, engine, timeout=BUILD_SECONDS)
    except errors.RuntimeUnavailable as error:
        return f"not tried: {error}"
    except errors.NormdeployError as error:
        return f"failed: {error}"
    return f"built, {built.layers} layers"
