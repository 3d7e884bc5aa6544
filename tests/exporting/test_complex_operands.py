"""Complex numbers with a new axis or times a real number: torch's exporter alone fails for them."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from normdeploy.exporting.exporter import export_to_proto
from normdeploy.loading import from_module


class Rotation(nn.Module):
    """Rotary positions as in Llama 4: pairs of values are complex numbers, which are multiplied by exp(i angle)."""

    def __init__(self, axis: int, scaling: float) -> None:
        super().__init__()
        self.axis = axis
        self.scaling = scaling

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        turn = torch.polar(torch.ones_like(angles), angles) * self.scaling
        values = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(values * turn.unsqueeze(self.axis)).flatten(3)


@pytest.mark.parametrize("axis", [2, -2])
def test_rotation_by_complex_numbers_is_that_of_torch(axis: int) -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(2, 3, 4, 6), torch.randn(2, 3, 3)
    module = Rotation(axis, 1.5).eval()
    model = from_module(module, (x, angles), inputs=["x[batch,3,4,6]", "angles[batch,3,3]"])
    before = str(model.program.graph)
    proto = export_to_proto(model)
    # The loaded model is as before.
    assert str(model.program.graph) == before
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    (made,) = session.run(None, {"x": x.numpy(), "angles": angles.numpy()})
    np.testing.assert_allclose(made, module(x, angles).numpy(), rtol=0, atol=1e-6)
