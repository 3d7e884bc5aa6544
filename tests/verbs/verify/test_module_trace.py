"""Live modules whose trace is another function, and those whose trace is theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import normdeploy


class Exporting(nn.Module):
    """Doubles its result where it is exported."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        return y * 2 if torch.compiler.is_exporting() else y


class Nested(nn.Module):
    """Keyword arguments, nested containers and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, pair: dict[str, torch.Tensor], *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.linear(pair["a"]) + pair["b"])
        return {"y": hidden * scale, "mean": hidden.mean(-1)}


class Counting(nn.Module):
    """Writes a buffer that its result does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(x)


def test_verify_module_that_differs_from_its_trace_fails(tmp_path: Path) -> None:
    net, x, file = Exporting().eval(), torch.randn(3, 8), tmp_path / "net.onnx"
    normdeploy.export(net, x, output=file, inputs="x[b,8]", dims="b=1:3:8")
    verdict = normdeploy.verify(net, file, x)
    assert not verdict
    assert verdict.outcome == "failed"
    assert "the model as it runs and its trace differ" in str(verdict)


@pytest.mark.parametrize(
    ("net", "args", "kwargs"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()), (torch.randn(3, 8),), {}),
        (Nested(), ({"a": torch.randn(3, 8), "b": torch.randn(3, 4)},), {"scale": torch.randn(4)}),
        (nn.MultiheadAttention(8, 2, batch_first=True), tuple(torch.randn(2, 5, 8) for _ in range(3)), {}),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (torch.randn(2, 3, 8, 8),), {}),
    ],
)
def test_verify_module_whose_trace_is_right_passes(net: nn.Module, args: Any, kwargs: Any, tmp_path: Path) -> None:
    normdeploy.export(net.eval(), args, kwargs, output=tmp_path / "net.onnx")
    verdict = normdeploy.verify(net, tmp_path / "net.onnx", args, kwargs)
    assert verdict, str(verdict)
    assert not any("was not run beside its trace" in note for note in verdict.notes)


def test_verify_leaves_the_state_of_the_module_alone(tmp_path: Path) -> None:
    net, x = Counting().eval(), torch.randn(3, 8)
    normdeploy.export(net, x, output=tmp_path / "net.onnx")
    assert normdeploy.verify(net, tmp_path / "net.onnx", x)
    assert net.calls == 0
