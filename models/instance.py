"""Instance norm by hand (rows S1c, S3b) and torch's instance norm used as a layer norm (S2c): statistics of each
channel of each sample.

Source: Ulyanov, Vedaldi, Lempitsky, "Instance Normalization", arXiv 1607.08022.
"""

from __future__ import annotations

import torch
from torch import nn


class InstanceNorm2d(nn.Module):
    """S1c: NCHW, over (H, W), biased, the same in training and eval."""

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(num_features))
        self.beta = nn.Parameter(torch.zeros(num_features))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean((2, 3), keepdim=True)
        var = x.var((2, 3), unbiased=False, keepdim=True)
        x_hat = (x - mean) / torch.sqrt(var + self.eps)
        return self.gamma.view(1, -1, 1, 1) * x_hat + self.beta.view(1, -1, 1, 1)


class ChannelsLastInstanceNorm(nn.Module):
    """S3b: "layer norm for convolution outputs" of (m, H, W, C): every channel of every sample separately, over (H, W),
    biased.
    """

    def __init__(self, num_channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(num_channels))
        self.beta = nn.Parameter(torch.zeros(num_channels))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean((1, 2), keepdim=True)
        var = ((x - mean) ** 2).mean((1, 2), keepdim=True)
        return self.gamma * (x - mean) / torch.sqrt(var + self.eps) + self.beta


class TokenInstanceNorm(nn.Module):
    """S2c: ``nn.InstanceNorm2d`` with a channel for each of S positions, on (B, S, D, 1); equals S2a without affine. S
    can't be dynamic.
    """

    def __init__(self, num_positions: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(num_positions, eps=eps, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.unsqueeze(-1)).squeeze(-1)


class DummyChannelNorm(nn.Module):
    """S3c: instance norm with the whole sample as one channel: layer norm without affine over every dim but the
    batch.
    """

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.reshape(x.shape[0], 1, -1, 1)
        mean = image.mean((2, 3), keepdim=True)
        var = image.var((2, 3), unbiased=False, keepdim=True)
        return ((image - mean) / torch.sqrt(var + self.eps)).reshape(x.shape)
