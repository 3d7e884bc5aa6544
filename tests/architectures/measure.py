"""One architecture through everything: the pipeline from the module, the exporter's own file through the passes, parity, an engine."""

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

from normdeploy import build, compare, deploy, errors
from normdeploy.files import save_onnx
from normdeploy.loading import from_module
from normdeploy.model import Model
from normdeploy.records import Finding

from .catalogue import BATCH, Architecture, made
from .leftovers import decomposed

NORM = re.compile(r"(?!.*WeightNorm).*norm", re.IGNORECASE)
BUILD_SECONDS = 60.0


@dataclass
class Result:
    """One file that came out."""

    nodes: int = 0
    norms: dict[str, int] = field(default_factory=dict)  # "LayerNorm fused" -> how many
    left: list[str] = field(default_factory=list)  # decomposed norms that are left, by the root's output
    refused: list[dict[str, Any]] = field(default_factory=list)
    checked: str = ""  # what onnx.checker says against it
    parity: list[dict[str, Any]] = field(default_factory=list)  # the worst output of each runtime
    failed: str = ""  # the error that ended it

    @property
    def accounted(self) -> int:
        """Norms that are one node, folded, or kept with a reason."""
        return sum(n for what, n in self.norms.items() if not what.endswith(("refused", "undone")) and not what.startswith("scale"))


@dataclass
class Row:
    """Everything about one architecture."""

    name: str
    modules: dict[str, int] = field(default_factory=dict)  # class of a norm module -> calls in one run of the model
    exporter_nodes: int = 0  # of torch.onnx.export(dynamo=True, optimize=True)
    ours: Result = field(default_factory=Result)
    rewritten: Result = field(default_factory=Result)  # the exporter's optimized file through `optimize`
    engine: str = ""
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
        model = from_module(module, inputs=architecture.inputs, dims=[BATCH])
    row.modules = _norm_calls(module, model)
    path = folder / "ours.onnx"
    with row.timed("ours"):
        result = deploy.export(module, inputs=architecture.inputs, dims=[BATCH], output=path)
    row.seconds.update({f"ours: {stage}": round(s, 2) for stage, s in result.seconds.items()})
    _fill(row.ours, result.proto, result.summary.findings)
    row.ours.failed = "; ".join(n for n in result.notes if "unsimplified" in n)
    with row.timed("parity"):
        _parity(row.ours, model, path)
    with row.timed("exporter"):
        exported = _exported(model)
    row.exporter_nodes = _count(exported)
    with row.timed("optimize"):
        rewritten = deploy.optimize(exported)
    _fill(row.rewritten, rewritten.proto, rewritten.summary.findings)
    other = folder / "rewritten.onnx"
    save_onnx(rewritten.proto, other)
    _parity(row.rewritten, model, other)
    if engine:
        with row.timed("engine"):
            row.engine = _engine(path, folder / "model.engine")
    return row


def _norm_calls(module: nn.Module, model: Model) -> dict[str, int]:
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


def _exported(model: Model) -> onnx.ModelProto:
    names = [spec.name for spec in model.inputs]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model.program,
            dynamo=True,
            optimize=True,
            opset_version=deploy.OPSET,
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
    result.left = decomposed(proto)
    result.refused = [
        {"kind": f.kind, "status": f.status, "module": f.module, "tensor": f.tensor, "became": f.became, "reason": f.reason}
        for f in findings
        if f.reason
    ]
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:
        result.checked = str(error).split("\n")[0]


def _parity(result: Result, model: Model, path: Path) -> None:
    """`verify`: three seeds at the usual batch, others at 1 and 3, small inputs and zeros, by the rule of normdeploy.compare."""
    try:
        comparison = compare.verify(model, path, seeds=2)
    except errors.NormdeployError as error:
        result.failed = f"{type(error).__name__}: {error}"
        return
    for runtime in dict.fromkeys(r.runtime for r in comparison.results):
        mine = [r for r in comparison.results if r.runtime == runtime]
        worst = max(mine, key=lambda r: (not r, r.max_abs_error / r.allowed if r.allowed else 0.0))
        result.parity.append(
            {
                "runtime": runtime,
                "ok": bool(worst),
                "output": worst.output,
                "error": worst.max_abs_error,
                "allowed": worst.allowed,
                "case": worst.case,
                "reason": worst.reason,
            }
        )


def _engine(path: Path, engine: Path) -> str:
    try:
        built = build(path, engine, timeout=BUILD_SECONDS)
    except errors.RuntimeUnavailable as error:
        return f"not tried: {error}"
    except errors.NormdeployError as error:
        return f"failed: {error}"
    return f"built, {built.layers} layers"
