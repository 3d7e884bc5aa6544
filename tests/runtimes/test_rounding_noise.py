"""Operators with a sigmoid inside: onnxruntime's is as exact as 1, not as its result near 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normdeploy import verify


class Gated(nn.Module):
    def __init__(self, gate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(6, 6), gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.layer(x))


@pytest.mark.parametrize(
    "gate",
    [F.glu, lambda y: F.glu(y, 0), torch.special.expit],
    ids=["glu", "glu of rows", "expit"],
)
def test_a_sigmoid_inside_an_operator_near_zero_passes(
    gate: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net, x = Gated(gate).eval(), torch.randn(2, 6)
    torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=True, verbose=False)
    assert verify(net, tmp_path / "net.onnx", (x,), seeds=1)


def test_another_half_of_a_glu_fails(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Gated(F.glu).eval(), torch.randn(2, 6)
    swapped = Gated(lambda y: F.glu(y.roll(3, -1)))
    swapped.load_state_dict(net.state_dict())
    torch.onnx.export(swapped.eval(), (x,), tmp_path / "net.onnx", dynamo=True, verbose=False)
    assert not verify(net, tmp_path / "net.onnx", (x,), seeds=1)
