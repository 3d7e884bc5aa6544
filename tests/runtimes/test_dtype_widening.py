"""Graphs in float64 whose kernels order their results in memory in another way."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from normdeploy.loading import from_module
from normdeploy.runtimes.rounding_noise import RoundingRunner


class Heads(nn.Module):
    """Attention that views its result without a copy: fused kernels write the heads beside each other."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(x.shape[0], 5, 4, 8).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return seen.permute(0, 2, 1, 3).view(x.shape[0], 5, 32)


class Written(nn.Module):
    """A view that is written: the write must reach the tensor behind it."""

    def forward(self, x: Tensor) -> Tensor:
        copied = x * 2.0
        copied.view(x.shape[0], -1).mul_(3.0)
        return copied


def test_view_of_a_result_with_other_strides_in_float64() -> None:
    x = torch.randn(3, 5, 32)
    model = from_module(Heads().eval(), (x,))
    (given,) = RoundingRunner(model).infer({model.inputs[0].name: x.numpy()}).values()
    # The outputs are averages of numbers below 5, and float32 rounds each of a few dozen operations by 3e-7 at most.
    np.testing.assert_allclose(given, Heads()(x).numpy(), atol=1e-5)
    assert given.dtype == np.float64


def test_view_that_is_written_stays_a_view() -> None:
    x = torch.randn(3, 4, 2)
    model = from_module(Written().eval(), (x,))
    (given,) = RoundingRunner(model).infer({model.inputs[0].name: x.numpy()}).values()
    np.testing.assert_array_equal(given, 6.0 * x.numpy().astype(np.float64))
