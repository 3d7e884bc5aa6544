"""Floating inputs that equal the numbers at which a model decides: > and >= differ there alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from normdeploy import verify
from tests.support import parsed

Decision = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Decides(torch.nn.Module):
    def __init__(self, decision: Decision) -> None:
        super().__init__()
        self.decision = decision
        self.register_buffer("edges", torch.tensor([-1.5, -0.5, 0.5, 1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decision(x, self.edges) * 0.7


PAIRS: dict[str, tuple[Decision, Decision]] = {
    "buckets": (lambda x, e: torch.bucketize(x, e), lambda x, e: torch.bucketize(x, e, right=True)),
    "a number that float32 rounds": (
        lambda x, e: torch.where(x > 0.1, x, -x),
        lambda x, e: torch.where(x >= 0.1, x, -x),
    ),
    "a view": (lambda x, e: -x.T < 0.3, lambda x, e: -x.T <= 0.3),
    "a tensor": (lambda x, e: (x.unsqueeze(-1) >= e).sum(-1), lambda x, e: (x.unsqueeze(-1) > e).sum(-1)),
    "a product by a power of two": (
        lambda x, e: torch.where(2 * x > 1, x, -x),
        lambda x, e: torch.where(2 * x >= 1, x, -x),
    ),
    "halves rounded up": (lambda x, e: torch.round(x * 4) / 4, lambda x, e: torch.floor(x * 4 + 0.5) / 4),
    "halves rounded away from zero": (
        lambda x, e: torch.round(x * 2),
        lambda x, e: x.sign() * torch.floor(x.abs() * 2 + 0.5),
    ),
    "equality": (lambda x, e: x == 3, lambda x, e: x != x),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_file_that_decides_otherwise_at_the_edge_fails(name: str, tmp_path: Path) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    right, wrong = (Decides(decision).eval() for decision in PAIRS[name])
    for model, path in ((right, tmp_path / "right.onnx"), (wrong, tmp_path / "wrong.onnx")):
        torch.onnx.export(model, (x,), path, dynamo=False, input_names=["x"])
    assert verify(right, tmp_path / "right.onnx", (x,), seeds=1)
    assert not verify(right, tmp_path / "wrong.onnx", (x,), seeds=1)


@pytest.mark.parametrize("right", [False, True])
def test_the_edges_of_searchsorted_are_tried(right: bool, tmp_path: Path) -> None:
    """torch's exporters have no form of it, so the file counts the edges below."""
    counted = Decides(lambda x, e: (x.unsqueeze(-1) >= e if right else x.unsqueeze(-1) > e).sum(-1)).eval()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    torch.onnx.export(counted, (x,), tmp_path / "counted.onnx", dynamo=False, input_names=["x"])
    for side in (False, True):
        model = Decides(lambda x, e, side=side: torch.searchsorted(e, x, right=side)).eval()  # type: ignore[misc]
        assert bool(verify(model, tmp_path / "counted.onnx", (x,), seeds=1)) is (side == right)


def saved(path: Path, body: str, **constants: float | np.ndarray) -> Path:
    stored = {name: np.asarray(value, np.float32) for name, value in constants.items()}
    onnx.save(parsed(f"net (float[3, 4] x) => (float[3, 4] y) {{ {body} }}", **stored), path)
    return path


@pytest.mark.parametrize(
    ("body", "op", "other"),
    [
        ("t = Neg(x) m = OP(t, edge) y = Where(m, x, t)", "Less", "LessOrEqual"),
        ("m = OP(edge, x) n = Not(m) t = Neg(x) y = Where(n, x, t)", "Greater", "GreaterOrEqual"),
    ],
)
def test_a_file_beside_a_file_is_tried_at_the_edges_of_the_reference(
    body: str, op: str, other: str, tmp_path: Path
) -> None:
    reference = saved(tmp_path / "right.onnx", body.replace("OP", op), edge=0.3)
    assert verify(reference, reference, seeds=1)
    assert not verify(reference, saved(tmp_path / "wrong.onnx", body.replace("OP", other), edge=0.3), seeds=1)


def test_an_edge_that_a_rounding_moves_is_not_drawn(tmp_path: Path) -> None:
    """x · 0.3 + 0.1 > 0.4 at x = 1: float32 says no, float64 yes."""
    body = "t = Mul(x, factor) u = Add(t, term) m = Greater(u, edge) y = Where(m, x, u)"
    reference = saved(tmp_path / "right.onnx", body, factor=0.3, term=0.1, edge=0.4)
    comparison = verify(reference, reference, seeds=1)
    assert comparison
    assert not any("x at" in case for case in comparison.cases)


@pytest.mark.parametrize(
    ("model", "file"),
    [
        (lambda x, e: torch.round(x * 0.1) * 0.3, lambda x, e: torch.round(x / 10) * 0.3),
        (lambda x, e: torch.floor(x / 0.1) * 0.1, lambda x, e: torch.floor(x * 10) * 0.1),
    ],
    ids=["round", "floor"],
)
def test_a_tie_that_a_rounding_makes_or_moves_fails_nothing(model: Decision, file: Decision, tmp_path: Path) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    torch.onnx.export(Decides(file).eval(), (x,), tmp_path / "file.onnx", dynamo=False, input_names=["x"])
    comparison = verify(Decides(model).eval(), tmp_path / "file.onnx", (x,), seeds=1)
    assert comparison
    assert any("multiples of 0.125" in case for case in comparison.cases)


def test_a_file_beside_a_file_is_tried_at_its_ties(tmp_path: Path) -> None:
    body = "t = Mul(x, four) OP y = Div(r, four)"
    reference = saved(tmp_path / "right.onnx", body.replace("OP", "r = Round(t)"), four=4.0)
    assert verify(reference, reference, seeds=1)
    other = body.replace("OP", "u = Add(t, half) r = Floor(u)")
    assert not verify(reference, saved(tmp_path / "wrong.onnx", other, four=4.0, half=0.5), seeds=1)


def test_leaves_of_trees_are_tried_at_their_thresholds(tmp_path: Path) -> None:
    def tree(mode: str) -> onnx.ModelProto:
        node = onnx.helper.make_node(
            "TreeEnsembleRegressor",
            ["x"],
            ["y"],
            domain="ai.onnx.ml",
            n_targets=1,
            nodes_treeids=[0, 0, 0],
            nodes_nodeids=[0, 1, 2],
            nodes_featureids=[1, 0, 0],
            nodes_values=[0.25, 0.0, 0.0],
            nodes_modes=[mode, "LEAF", "LEAF"],
            nodes_truenodeids=[1, 0, 0],
            nodes_falsenodeids=[2, 0, 0],
            target_treeids=[0, 0],
            target_nodeids=[1, 2],
            target_ids=[0, 0],
            target_weights=[1.0, 2.0],
        )
        value = onnx.helper.make_tensor_value_info
        graph = onnx.helper.make_graph([node], "g", [value("x", 1, [3, 4])], [value("y", 1, [3, 1])])
        opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
        return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)

    reference, wrong = tmp_path / "right.onnx", tmp_path / "wrong.onnx"
    onnx.save(tree("BRANCH_LEQ"), reference)
    onnx.save(tree("BRANCH_LT"), wrong)
    assert verify(reference, reference, seeds=1)
    assert not verify(reference, wrong, seeds=1)
