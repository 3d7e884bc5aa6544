"""Recurrent layers with a state that is given: gates are as exact as 1, and multiply it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import normdeploy

SAMPLE = (torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 1, 16))
INPUTS = ["x[1,6,8]", "h[1,1,16]"]


class Stateful(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = kind(8, 16, batch_first=True)
        for parameter in self.layer.parameters():
            nn.init.normal_(parameter, std=0.25)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        state = (h, h * 0.5) if isinstance(self.layer, nn.LSTM) else h
        return self.layer(x, state)[0]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.cell = nn.Linear(8, 8), nn.LSTMCell(8, 16)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.cell(self.project(x[:, 0]), (h[0], h[0] * 0.5))[0]


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_right_layer_with_a_state_is_verified(kind: Callable[..., nn.RNNBase], seed: int, tmp_path: Path) -> None:
    net = Stateful(kind, seed).eval()
    made = normdeploy.export(net, SAMPLE, output=tmp_path / "net.onnx")
    of_model = normdeploy.verify(net, made.path, SAMPLE, inputs=INPUTS)
    assert of_model, of_model.table()
    of_file = normdeploy.verify(made.path, made.path)
    assert of_file, of_file.table()


def test_a_right_cell_is_verified(tmp_path: Path) -> None:
    net = Cell().eval()
    made = normdeploy.export(net, SAMPLE, output=tmp_path / "net.onnx")
    comparison = normdeploy.verify(net, made.path, SAMPLE, inputs=INPUTS)
    assert comparison, comparison.table()


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_recurrent_weight_off_by_a_thousandth_is_found(kind: Callable[..., nn.RNNBase], tmp_path: Path) -> None:
    net = Stateful(kind, 0).eval()
    made = normdeploy.export(net, SAMPLE, output=tmp_path / "net.onnx")
    proto = onnx.load(made.path)
    (node,) = [n for n in proto.graph.node if n.op_type in ("GRU", "LSTM")]
    (weight,) = [t for t in proto.graph.initializer if t.name == node.input[2]]
    values = numpy_helper.to_array(weight).copy()
    values[np.unravel_index(np.abs(values).argmax(), values.shape)] *= 1.001
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(proto, tmp_path / "wrong.onnx")
    comparison = normdeploy.verify(net, tmp_path / "wrong.onnx", SAMPLE, inputs=INPUTS)
    assert not comparison
    assert any(result.verdict == "fail" for result in comparison.results), comparison.table()
