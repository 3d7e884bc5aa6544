"""Attention over any number of leading dims gives PyTorch's values in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import normdeploy
from normdeploy.ort_sessions.session import open_session

LENGTH, WIDTH = 6, 8


class Attention(nn.Module):
    """Attention of x to itself after a projection; ``mask`` is "none", "causal", "bool" or "float"."""

    def __init__(self, mask: str, scale: float | None = None) -> None:
        super().__init__()
        self.mask = mask
        self.scale = scale
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projection(x).chunk(3, dim=-1)
        visible = x[..., 0].unsqueeze(-2) > 0
        masks = {"bool": visible, "float": visible.to(x.dtype) * 3}
        return functional.scaled_dot_product_attention(
            query, key, value, masks.get(self.mask), is_causal=self.mask == "causal", scale=self.scale
        )


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("leading", [(), (3,), (3, 2, 2)])
def test_attention_of_other_rank_is_pytorchs(mask: str, leading: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = Attention(mask).eval()
    x = torch.randn(*leading, LENGTH, WIDTH)
    if mask == "bool":
        # The mask hides every key of this row, so that its result is 0.
        x[..., 0] = x[..., 0].abs()
        x.view(-1, LENGTH, WIDTH)[0, :, 0] *= -1
    made = normdeploy.export(module, (x,))
    (given,) = open_session(made.proto.SerializeToString()).run(None, {"x": x.numpy()})
    right = module.double()(x.double()).detach().numpy()
    # Each element is a sum of at most LENGTH products of weights of at most 1, after two sums of WIDTH products.
    bound = 16 * (2 * WIDTH + LENGTH) * 2.0**-24 * np.abs(x.numpy()).max() ** 2
    assert np.abs(given - right).max() <= bound


def test_attention_of_windows_with_dynamic_sizes_is_verified(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = [f"x[batch,windows,2,length,{WIDTH}]"]
    module = Attention("none", scale=0.3).eval()
    normdeploy.export(module, inputs=inputs, output=tmp_path / "windows.onnx")
    comparison = normdeploy.verify(module, tmp_path / "windows.onnx", inputs=inputs, seeds=1)
    assert comparison, str(comparison)


def test_attention_of_four_dims_stays_the_exporters_own() -> None:
    made = normdeploy.export(Attention("none").eval(), (torch.randn(2, 2, LENGTH, WIDTH),), opset=23)
    assert "Attention" in {node.op_type for node in made.proto.graph.node}
