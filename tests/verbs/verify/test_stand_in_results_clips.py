"""Files whose Clip leaves out a bound: onnxruntime makes the type's largest number of Inf there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.loading import from_module
from normdeploy.verbs.verify.file_comparison import compare_files

INPUT = "x:float32[3,6]"
NOTE = "has a Clip without one of its bounds"


class Bounded(nn.Module):
    def __init__(self, bound: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.bound = nn.Linear(6, 6), bound

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bound(self.layer(x))


def exported(net: nn.Module, path: Path) -> Path:
    torch.onnx.export(net.eval(), (torch.zeros(3, 6),), path, dynamo=True, verbose=False)
    return path


@pytest.mark.parametrize(
    "bound",
    [
        lambda y: y.clamp(min=0.01),
        lambda y: y.clamp(max=0.5),
        lambda y: y.clamp(min=0.1).softmax(-1),
    ],
    ids=["min", "max", "softmax"],
)
def test_verify_clip_with_one_bound_passes_and_tells_why(
    bound: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    net = Bounded(bound)
    path = exported(net, tmp_path / "net.onnx")
    assert "Clip" in [node.op_type for node in onnx.load(path).graph.node]
    result = compare_files(from_module(net.eval(), inputs=[INPUT]), path)
    assert result
    assert any(NOTE in note for note in result.notes)


def test_verify_clip_with_a_finite_bound_too_many_fails_at_infinity(tmp_path: Path) -> None:
    net = Bounded(lambda y: y.clamp(min=0.01))
    path = exported(Bounded(lambda y: y.clamp(min=0.01, max=1e30)), tmp_path / "net.onnx")
    result = compare_files(from_module(net.eval(), inputs=[INPUT]), path)
    assert not result
    assert not any(NOTE in note for note in result.notes)


def test_export_relu_with_a_lower_bound_passes_its_own_verify(tmp_path: Path) -> None:
    net = Bounded(lambda y: y.relu().clamp(min=0.1)).eval()
    normdeploy.export(net, torch.zeros(3, 6), output=str(tmp_path / "net.onnx"))
    assert normdeploy.verify(net, str(tmp_path / "net.onnx"), torch.zeros(3, 6))
