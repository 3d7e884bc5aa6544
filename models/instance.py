"""Define hand-written instance norms (rows S1c, S3b), and torch's instance norm used as a layer norm (S2c).

An instance norm has statistics per channel and sample.

Source: Ulyanov, Vedaldi, Lempitsky, "Instance Normalization", arXiv 1607.08022.
"""

from __future__ import annotations

import torch
from torch import nn


class InstanceNorm2d(nn.Module):
    """Instance norm S1c of NCHW, over (H, W), with biased variance. Training and eval mode are the same."""

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
    """Instance norm S3b of (m, H, W, C), over (H, W), with biased variance.

    The source of this class calls it "layer norm for convolution outputs", but its statistics are per channel and
    sample.
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
    """Instance norm S2c: ``nn.InstanceNorm2d`` of (B, S, D, 1), with the S positions as channels.

    It equals the layer norm S2a without gamma and beta. S can't be dynamic.
    """

    def __init__(self, num_positions: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(num_positions, eps=eps, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.unsqueeze(-1)).squeeze(-1)


class DummyChannelNorm(nn.Module):
    """Instance norm S3c, with the whole sample as one channel.

    It equals a layer norm without gamma and beta, over all dims but the batch.
    """

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.reshape(x.shape[0], 1, -1, 1)
        mean = image.mean((2, 3), keepdim=True)
        var = image.var((2, 3), unbiased=False, keepdim=True)
        return ((image - mean) / torch.sqrt(var + self.eps)).reshape(x.shape)
