"""Define a hand-written batch norm (row S1b, and part of S1e).

In training mode it uses the statistics of the batch. In eval mode it uses the running statistics.

Source: Ioffe, Szegedy, "Batch Normalization", arXiv 1502.03167, algorithms 1 and 2.
"""

from __future__ import annotations

import torch
from torch import nn


class BatchNorm2d(nn.Module):
    """Batch norm S1b of NCHW, with statistics over (N, H, W).

    The variance is biased, for the output and for the running value. ``nn.BatchNorm2d`` stores an unbiased running
    value.

    ``momentum`` is the weight of the new value: running = (1 − momentum)·running + momentum·batch.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(num_features))
        self.beta = nn.Parameter(torch.zeros(num_features))
        self.running_mean: torch.Tensor
        self.running_var: torch.Tensor
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        self.eps = eps
        self.momentum = momentum

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean = x.mean((0, 2, 3))
            var = ((x - mean.view(1, -1, 1, 1)) ** 2).mean((0, 2, 3))
            with torch.no_grad():
                self.running_mean.mul_(1 - self.momentum).add_(mean, alpha=self.momentum)
                self.running_var.mul_(1 - self.momentum).add_(var, alpha=self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        channel = (1, x.shape[1], 1, 1)
        x_hat = (x - mean.view(channel)) / torch.sqrt(var.view(channel) + self.eps)
        return self.gamma.view(channel) * x_hat + self.beta.view(channel)
