"""Models that hold the rounding of their quantization are compared as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import normdeploy
from normdeploy.runtimes.fake_quantize import on_grid


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.fake_quantize_per_tensor_affine(self.norm(x), 0.03, 0, -128, 127))


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_the_grid_in_float64_is_that_of_float32(axis: int | None) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    if axis is None:
        expected = torch.fake_quantize_per_tensor_affine(x, 0.03125, 3, -128, 127)
        found = on_grid("aten::fake_quantize_per_tensor_affine", (x.double(), 0.03125, 3, -128, 127))
    else:
        scale = torch.full((x.shape[axis],), 0.03125)
        zero = torch.arange(x.shape[axis], dtype=torch.int32)
        expected = torch.fake_quantize_per_channel_affine(x, scale, zero, axis, -128, 127)
        found = on_grid("aten::fake_quantize_per_channel_affine", (x.double(), scale.double(), zero, axis, -128, 127))
    assert found is not None
    np.testing.assert_array_equal(found.numpy(), expected.double().numpy())


def test_a_model_that_rounds_itself_is_verified_and_another_scale_is_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Rounding().eval()
    made = normdeploy.export(module, torch.randn(3, 8), output=tmp_path / "m.onnx")
    comparison = normdeploy.verify(made)
    assert comparison, comparison.table()

    proto = onnx.load(made.path)
    quantizers = [n for n in proto.graph.node if n.op_type == "QuantizeLinear"]
    scale = next(t for t in proto.graph.initializer if t.name == quantizers[0].input[1])
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * np.float32(1.02), scale.name))
    onnx.save(proto, tmp_path / "wrong.onnx")
    assert not normdeploy.verify(module, tmp_path / "wrong.onnx", inputs=["x[3,8]"])
