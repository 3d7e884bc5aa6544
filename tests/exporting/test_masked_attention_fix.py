"""Rows of attention that a float mask hides whole, as eager has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import normdeploy
from tests.support import run_onnxruntime


class Attention(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        if self.how == "padding mask":
            return self.inner(x, x, x, key_padding_mask=~keep, need_weights=False)[0]
        mask = torch.zeros(x.shape[1], x.shape[1]).masked_fill(~keep[:, None], -torch.inf)
        rows = x[:, None]
        return nn.functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask[:, None])[:, 0]


@pytest.mark.parametrize("how", ["padding mask", "float mask"])
def test_a_row_hidden_by_minus_infinities_is_zero_as_in_eager(how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, keep = torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.bool)
    made = normdeploy.export(Attention(how).eval(), (x, keep), output=tmp_path / "m.onnx")
    shown = torch.tensor([[True, False, True, True, False], [False] * 5])
    found = run_onnxruntime(onnx.load(made.path), {"x": x.numpy(), "keep": shown.numpy()})[0]
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[1], np.broadcast_to(found[1, :1], found[1].shape))
    comparison = normdeploy.verify(made)
    assert comparison, comparison.table()
