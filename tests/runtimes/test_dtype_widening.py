"""Graphs in float64 whose kernels order their results in memory in another way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from normdeploy.errors import NormdeployError
from normdeploy.loading import from_module
from normdeploy.runtimes.rounding_noise import RoundingRunner


class Heads(nn.Module):
    """Attention that views its result without a copy: fused kernels write the heads beside each other."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(x.shape[0], 5, 4, 8).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return seen.permute(0, 2, 1, 3).view(x.shape[0], 5, 32)


class Written(nn.Module):
    """A view of such a result that is written: a copy would lose the write."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(x.shape[0], 5, 4, 8).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads).permute(0, 2, 1, 3)
        seen.view(x.shape[0], 5, 32).mul_(3.0)
        return seen


def test_view_of_a_result_with_other_strides_in_float64() -> None:
    x = torch.randn(3, 5, 32)
    model = from_module(Heads().eval(), (x,))
    (given,) = RoundingRunner(model).infer({model.inputs[0].name: x.numpy()}).values()
    # The outputs are averages of numbers below 5, and float32 rounds each of a few dozen operations by 3e-7 at most.
    np.testing.assert_allclose(given, Heads()(x).numpy(), atol=1e-5)
    assert given.dtype == np.float64


def test_view_that_is_written_is_not_copied() -> None:
    x = torch.randn(3, 5, 32)
    model = from_module(Written().eval(), (x,))
    with pytest.raises(NormdeployError, match="view size is not compatible"):
        RoundingRunner(model).infer({model.inputs[0].name: x.numpy()})
