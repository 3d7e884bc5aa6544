"""The spellings of ``models``: each becomes the norm nodes that its entry expects, and gives the same numbers.
Lookalikes are refused.

All static spellings travel in one module through one export; the module path tells whose node is whose. Some go through
alone, dynamic.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from functools import cache

import numpy as np
import onnx
import pytest
import torch

from models import registry
from models.case import Case, norm_ops
from normdeploy.exporting.exporter import MODULE
from normdeploy.findings.records import Finding, Summary
from normdeploy.rewriting.norm_optimizer import optimize_norms
from tests.support import run_onnxruntime

BANK = (*registry.SPELLINGS, *registry.SMALL)
DYNAMIC = [c for c in registry.SPELLINGS if c.dynamic][::8]
UNIT = 2.0**-24


def raw(module: torch.nn.Module, args: tuple[torch.Tensor, ...], dynamic_shapes: object = None) -> onnx.ModelProto:
    program = torch.export.export(module, args, dynamic_shapes=dynamic_shapes, strict=False)
    exported = torch.onnx.export(program, dynamo=True, optimize=False, opset_version=21, verbose=False)
    assert exported is not None
    return exported.model_proto


def tensors(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)  # type: ignore[call-overload]


def by_module(proto: onnx.ModelProto) -> dict[str, list[onnx.NodeProto]]:
    """Module path -> the nodes of that module."""
    found: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in proto.graph.node:
        scopes = {p.key: p.value for p in node.metadata_props}
        path = scopes.get(MODULE) or eval_scopes(scopes.get("pkg.torch.onnx.name_scopes", ""))
        found[".".join(path.split(".")[:2])].append(node)
    return found


def eval_scopes(text: str) -> str:
    parts = [p.strip(" '\"") for p in text.strip("[]").split(",")]
    return parts[-2] if len(parts) > 1 else ""


def assert_close(got: list[np.ndarray], module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    """onnxruntime within 4 times eager's own error against float64, and 64 u of the largest output: onnxruntime's
    GroupNormalization sums squares in another order and in float32."""
    with torch.no_grad():
        eager = tensors(module(*args))
        exact = tensors(copy.deepcopy(module).double()(*(a.double() if a.is_floating_point() else a for a in args)))
    for found, own, reference in zip(got, eager, exact, strict=True):
        bound = 4 * float((own.double() - reference).abs().max()) + 64 * UNIT * float(reference.abs().max())
        assert float(np.abs(found.astype(np.float64) - reference.numpy()).max()) <= bound


@cache
def bank() -> tuple[registry.Bank, tuple[torch.Tensor, ...], onnx.ModelProto, Summary]:
    module = registry.Bank(BANK).eval()
    args = module.samples()
    proto, summary = optimize_norms(raw(module, args))
    return module, args, proto, summary


@pytest.mark.slow
def test_every_static_spelling_becomes_its_norm() -> None:
    _, _, proto, summary = bank()
    nodes = by_module(proto)
    found = {
        c.name: norm_ops(nodes.get(f"members.{i}", []), "GroupNormalization" in c.expect) for i, c in enumerate(BANK)
    }
    wrong = {c.name: found[c.name] for c in BANK if not c.accepts(found[c.name])}
    assert not wrong, [f for f in summary.findings if f.status in ("refused", "undone")][:5]


@pytest.mark.slow
def test_every_static_spelling_gives_the_same_numbers() -> None:
    module, args, proto, _ = bank()
    feeds = {i.name: a.numpy() for i, a in zip(proto.graph.input, args, strict=True)}
    assert_close(run_onnxruntime(proto, feeds), module, args)


@pytest.mark.slow
def test_every_rewrite_has_its_certificate() -> None:
    summary = bank()[3]
    rewritten = [f for f in summary.findings if f.status in ("fused", "folded")]
    assert len(rewritten) >= len(registry.SPELLINGS) - 20  # torch's own layers are nodes already
    assert all(f.certificate and f.module for f in rewritten)
    assert not [f for f in summary.findings if f.status == "undone"]


@pytest.mark.parametrize("case", DYNAMIC, ids=lambda c: c.name)
def test_dynamic_spelling(case: Case) -> None:
    module = case.make()
    args, shapes = registry.export_args(case, dynamic=True)
    proto, summary = optimize_norms(raw(module, args, shapes))
    assert case.accepts(norm_ops(proto.graph.node, "GroupNormalization" in case.expect)), summary.findings
    names = {d[0]: d for s in case.inputs for d in s.shape if not isinstance(d, int)}
    for dims in ({}, {n: min(d[2] + 1, d[3]) for n, d in names.items()}):
        values = registry.samples(case, dims=dims, seed=3)
        feeds = {i.name: v.numpy() for i, v in zip(proto.graph.input, values, strict=True)}
        assert_close(run_onnxruntime(proto, feeds), module, values)


def refusal(case: Case, summary: Summary) -> Finding | None:
    return next((f for f in summary.findings if case.reason in f.reason), None)


# No root, or none that a norm's statistics feed: nothing there looks like a norm, and nothing is said of it.
SILENT = {"variance_for_std", "fourth_root", "other_tensor", "other_numerator", "median", "softmax", "mean_deviation"}


@pytest.mark.parametrize("case", registry.LOOKALIKES, ids=lambda c: c.name)
def test_lookalike(case: Case) -> None:
    module = case.make()
    args, shapes = registry.export_args(case, dynamic=case.dynamic)
    before = raw(module, args, shapes)
    proto, summary = optimize_norms(before)
    if case.expect:  # a trap: it may be rewritten only as it says
        assert case.accepts(norm_ops(proto.graph.node, "GroupNormalization" in case.expect)), summary.findings
    elif case.name == "weight_standardization":  # of constants alone: computed once, and no node says it
        assert [f.status for f in summary.findings] == ["folded"]
        assert [n.op_type for n in proto.graph.node] == ["Conv"]
        return
    else:
        assert not [f for f in summary.findings if f.status in ("fused", "folded")], summary.findings
    if case.reason and case.name not in SILENT:
        assert refusal(case, summary) is not None, (case.reason, [f.reason for f in summary.findings])
    feeds = {i.name: a.numpy() for i, a in zip(proto.graph.input, args, strict=True)}
    for old, new in zip(run_onnxruntime(before, feeds), run_onnxruntime(proto, feeds), strict=True):
        assert np.abs(old - new).max() <= 64 * UNIT * np.abs(old).max()  # a trap's allowed rewrite may round otherwise
