"""One number, axis or reduction of a file that is not the model's, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normdeploy
from normdeploy.verbs.bisect.fault_tracing import Fault

Function = Callable[[torch.Tensor], torch.Tensor]
LABELS = torch.tensor([1, 2, 4])
X = torch.linspace(-2, 2, 18).sin().reshape(3, 6)


class Behind(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


def only_fault(right: Function, wrong: Function, folder: Path) -> Fault:
    torch.onnx.export(Behind(wrong).eval(), (X,), folder / "wrong.onnx", dynamo=True, verbose=False)
    (fault,) = normdeploy.bisect(Behind(right).eval(), folder / "wrong.onnx", (X,), seeds=1).faults
    assert fault.mended
    return fault


@pytest.mark.parametrize(
    ("right", "wrong", "kind", "told"),
    [
        (lambda y: y.cumsum(1), lambda y: y.cumsum(0), "axis", "has axis 0; with 1 the result is correct"),
        (lambda y: y.flip(1), lambda y: y.flip(0), "axis", "has axis 0; with 1 the result is correct"),
        (lambda y: (y @ y.T).triu(1), lambda y: (y @ y.T).triu(0), "attribute", "has diagonal 0; with 1"),
        (lambda y: y.topk(3).values.sum(-1), lambda y: y.topk(2).values.sum(-1), "attribute", "has k 2; with 3"),
        (
            lambda y: F.cross_entropy(y, LABELS),
            lambda y: F.cross_entropy(y, LABELS, ignore_index=4),
            "attribute",
            "has ignore_index 4; with -100 the result is correct",
        ),
        (
            lambda y: F.cross_entropy(y, LABELS),
            lambda y: F.cross_entropy(y, LABELS, reduction="sum"),
            "attribute",
            "has reduction sum; with mean the result is correct",
        ),
        (lambda y: y.prod(-1), lambda y: y.sum(-1), "operator", "should be ReduceProd"),
        (lambda y: y.norm(2, -1), lambda y: y.norm(1, -1), "operator", "should be ReduceL2"),
        (lambda y: y.argmax(-1), lambda y: y.argmin(-1), "operator", "should be ArgMax"),
        (
            lambda y: torch.log(torch.sigmoid(y * 100) + 1e-12),
            lambda y: torch.log(torch.sigmoid(y * 100)),
            "epsilon",
            "the epsilon 1e-12 is missing before Log",
        ),
        (
            lambda y: torch.where(y > 0, y, y * 0.5),
            lambda y: torch.where(y < 0, y, y * 0.5),
            "order",
            "Less 'node_lt' reads",
        ),
        (
            lambda y: (y / 1.0).softmax(-1),
            lambda y: (y / 1.01).softmax(-1),
            "number",
            "1.01; with 1 the result is correct",
        ),
    ],
    ids=[
        "cumsum",
        "flip",
        "triu",
        "topk",
        "ignored",
        "summed",
        "product",
        "norm",
        "argmax",
        "log",
        "comparison",
        "divisor",
    ],
)
def test_the_wrong_number_is_named(right: Function, wrong: Function, kind: str, told: str, tmp_path: Path) -> None:
    fault = only_fault(right, wrong, tmp_path)
    assert fault.kind == kind
    assert told in fault.cause


def test_a_product_that_the_model_lacks_is_added(tmp_path: Path) -> None:
    assert only_fault(lambda y: y.softmax(-1), lambda y: (y * 1.01).softmax(-1), tmp_path).kind == "added"


def test_an_epsilon_that_the_type_holds_has_not_vanished(tmp_path: Path) -> None:
    fault = only_fault(lambda y: y.clamp(min=0.01), lambda y: y.clamp(min=0), tmp_path)
    assert "epsilon 0, but the model has 0.01" in fault.cause
    assert "vanished" not in fault.cause
