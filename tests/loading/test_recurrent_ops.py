"""LSTM, GRU and RNN at lengths other than the example's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.errors import NormdeployError
from tests.support import run_onnxruntime

KINDS = {
    "LSTM": (nn.LSTM, {}),
    "GRU": (nn.GRU, {}),
    "RNN": (nn.RNN, {}),
    "RNN of relu": (nn.RNN, {"nonlinearity": "relu"}),
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "two ways, two layers": {"bidirectional": True, "num_layers": 2, "batch_first": True},
    "without bias": {"bias": False},
}


@pytest.mark.parametrize("form", [*FORMS])
@pytest.mark.parametrize("kind", [*KINDS])
def test_export_length_may_change(kind: str, form: str) -> None:
    torch.manual_seed(0)
    make, options = KINDS[kind]
    net = make(4, 5, **options, **FORMS[form]).eval()
    batch_first = FORMS[form].get("batch_first", False)
    shape = "x[b,t,4]" if batch_first else "x[t,b,4]"
    result = normdeploy.export(net, torch.randn(2, 16, 4), inputs=shape, dims=["b=1:2:16", "t=2:16:24"])
    assert result.proto is not None
    for length in (2, 7, 24):
        x = torch.randn((3, length, 4) if batch_first else (length, 3, 4))
        with torch.no_grad():
            y, last = net(x)
            expected = [y, *(last if isinstance(last, tuple) else [last])]
        got = run_onnxruntime(result.proto, {"x": x.numpy()})
        # Sums of at most ten products of numbers around one, over up to 24 steps: 240 roundings of float32 at most.
        for value, want in zip(got, expected, strict=True):
            np.testing.assert_allclose(value, want.numpy(), rtol=0, atol=240 * 2.0**-24 * 4)
    assert normdeploy.verify(result)


class Tagger(nn.Module):
    """As for speech: features, a norm, a recurrent layer with its own first state, a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rnn, self.out = nn.LayerNorm(8), nn.GRU(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(self.norm(x), state)[0])


def test_export_length_may_change_inside_a_model() -> None:
    torch.manual_seed(0)
    example = (torch.randn(2, 12, 8), torch.randn(1, 2, 6))
    inputs = ["x[b,t,8]", "state[1,b,6]"]
    result = normdeploy.export(Tagger().eval(), example, inputs=inputs, dims=["b=1:2:4", "t=1:12:40"])
    assert [f.status for f in result.summary.findings] == ["kept"]
    assert normdeploy.verify(result)


@pytest.mark.parametrize("dims", [["b=1:2:4", "t=8:16:24"], []])
def test_export_projection_is_refused_by_name(dims: list[str]) -> None:
    net = nn.LSTM(4, 6, proj_size=3, batch_first=True).eval()
    with pytest.raises(NormdeployError, match="an LSTM with proj_size, but ONNX has no projection"):
        normdeploy.export(net, torch.randn(2, 16, 4), inputs=["x[b,t,4]"] if dims else [], dims=dims)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 6, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


@pytest.mark.parametrize("dims", [["b=1:2:4", "t=8:16:24"], []])
def test_export_packed_sequences_are_refused_by_name(dims: list[str]) -> None:
    inputs = ["x[b,t,4]", "lengths:int64[b]"] if dims else []
    with pytest.raises(NormdeployError, match=r"packs sequences by their lengths in .*ONNX has no packed sequences"):
        normdeploy.export(Packed().eval(), (torch.randn(2, 16, 4), torch.tensor([16, 9])), inputs=inputs, dims=dims)
