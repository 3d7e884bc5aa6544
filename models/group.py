"""Define a hand-written group norm (row S1d), and a module with four norms of one feature map (S1e).

Source: Wu, He, "Group Normalization", arXiv 1803.08494, figure 2 (the four norms) and equation 1.
"""

from __future__ import annotations

import torch
from torch import nn

from .batch import BatchNorm2d
from .instance import InstanceNorm2d
from .layer import LayerNorm


class GroupNorm(nn.Module):
    """Group norm S1d of NCHW, over (C/G, H, W) of each group of each sample.

    The variance is biased, and gamma and beta have one value per channel.

    Raises:
        ValueError: the number of channels is not a multiple of the number of groups.
    """

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(
                f"num_channels ({num_channels}) must divide by num_groups ({num_groups}): choose a num_groups that"
                " divides it"
            )
        self.gamma = nn.Parameter(torch.ones(num_channels))
        self.beta = nn.Parameter(torch.zeros(num_channels))
        self.num_groups = num_groups
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.view(x.shape[0], self.num_groups, -1)
        mean = groups.mean(-1, keepdim=True)
        var = groups.var(-1, unbiased=False, keepdim=True)
        x_hat = ((groups - mean) / torch.sqrt(var + self.eps)).view(x.shape)
        return self.gamma.view(1, -1, 1, 1) * x_hat + self.beta.view(1, -1, 1, 1)


class FourNorms(nn.Module):
    """Module S1e: the batch, layer, instance and group norm of one (N, C, H, W) input, as four outputs."""

    def __init__(self, shape: tuple[int, int, int], num_groups: int) -> None:
        super().__init__()
        channels = shape[0]
        self.bn = BatchNorm2d(channels)
        self.ln = LayerNorm(shape)
        self.norm_in = InstanceNorm2d(channels)
        self.gn = GroupNorm(num_groups, channels)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.bn(x), self.ln(x), self.norm_in(x), self.gn(x)
