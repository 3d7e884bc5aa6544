"""atan2 gives PyTorch's values in all quadrants, on the axes, and at numbers that are not finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import normdeploy
from normdeploy.ort_sessions.session import open_session

EDGES = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e-30, -1e30, 0.3])
UNIT = 2.0**-24


class Angle(nn.Module):
    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return torch.atan2(y, x)


class Phase(nn.Module):
    """The phase of a spectrum, whose first and last bins are real."""

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        return torch.atan2(spectrum.imag, spectrum.real)


def test_atan2_is_pytorchs_at_every_pair_of_edges() -> None:
    y, x = (grid.reshape(-1) for grid in torch.meshgrid(EDGES, EDGES, indexing="ij"))
    made = normdeploy.export(Angle().eval(), (y, x))
    (given,) = open_session(made.proto.SerializeToString()).run(None, {"y": y.numpy(), "x": x.numpy()})
    right = torch.atan2(y.double(), x.double()).numpy()
    assert np.array_equal(np.isnan(given), np.isnan(right))
    numbers = ~np.isnan(right)
    # A quotient, an arctangent of two units and two differences of numbers up to pi.
    assert np.abs(given - right)[numbers].max() <= 4 * UNIT * np.pi
    assert np.array_equal(np.signbit(given[numbers]), np.signbit(right[numbers]))


def test_a_file_with_atan2_is_verified(tmp_path: Path) -> None:
    inputs = ["x[batch,16]"]
    normdeploy.export(Phase().eval(), inputs=inputs, output=tmp_path / "phase.onnx")
    comparison = normdeploy.verify(Phase().eval(), tmp_path / "phase.onnx", inputs=inputs, seeds=1)
    assert comparison, str(comparison)
