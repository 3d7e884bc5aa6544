"""Norms written as plain Python classes (rows S4a, S4b), and modules that hold them.

``nn.Module`` does not see a plain object: ``.eval()`` does not set its ``training`` flag, and its tensors are in no
state_dict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class BatchNorm1d:
    """S4a: batch norm of (B, D) over dim 0, UNBIASED for output and running value; ``momentum`` weighs the NEW value.

    The running buffers start as (D,) and become (1, D) with the first update.
    """

    def __init__(self, dim: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        self.eps = eps
        self.momentum = momentum
        self.training = True
        self.gamma = torch.ones(dim)
        self.beta = torch.zeros(dim)
        self.running_mean = torch.zeros(dim)
        self.running_var = torch.ones(dim)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean = x.mean(0, keepdim=True)
            var = x.var(0, keepdim=True)
            with torch.no_grad():
                self.running_mean = (1 - self.momentum) * self.running_mean + self.momentum * mean
                self.running_var = (1 - self.momentum) * self.running_var + self.momentum * var
        else:
            mean, var = self.running_mean, self.running_var
        return self.gamma * (x - mean) / torch.sqrt(var + self.eps) + self.beta

    def parameters(self) -> list[torch.Tensor]:
        """List the parameters.

        Returns:
            gamma and beta.
        """
        return [self.gamma, self.beta]


class LayerNorm1d:
    """S4b: layer norm of (B, D) over dim 1, UNBIASED."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        self.eps = eps
        self.gamma = torch.ones(dim)
        self.beta = torch.zeros(dim)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(1, keepdim=True)
        var = x.var(1, keepdim=True)
        return self.gamma * (x - mean) / torch.sqrt(var + self.eps) + self.beta

    def parameters(self) -> list[torch.Tensor]:
        """List the parameters.

        Returns:
            gamma and beta.
        """
        return [self.gamma, self.beta]


class PlainHolder(nn.Module):
    """Module that holds a plain norm as an attribute, after an optional linear layer."""

    def __init__(self, norm: BatchNorm1d | LayerNorm1d, linear: nn.Linear | None = None) -> None:
        super().__init__()
        self.linear = linear
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x if self.linear is None else self.linear(x))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PlainHolder:
        # .half() does not reach a plain object either. Its holder must convert the tensors, or the output stays
        # float32.
        for name, value in vars(self.norm).items():
            if isinstance(value, torch.Tensor):
                setattr(self.norm, name, fn(value))
        return super()._apply(fn, recurse)


def trained_batch_norm(dim: int, linear: nn.Linear | None = None, training: bool = False) -> PlainHolder:
    """Make S4a after three updates, so that its buffers are (1, D) and not constant.

    Args:
        training: leave the norm's own flag on.

    Returns:
        the holder.
    """
    norm = BatchNorm1d(dim)
    norm.gamma, norm.beta = torch.randn(dim) * 0.4 + 1, torch.randn(dim) * 0.4
    for _ in range(3):
        norm(torch.randn(16, dim) * 2 + 1)
    norm.training = training
    return PlainHolder(norm, linear)


def random_layer_norm(dim: int) -> PlainHolder:
    """Make S4b with random gamma and beta.

    Returns:
        the holder.
    """
    norm = LayerNorm1d(dim)
    norm.gamma, norm.beta = torch.randn(dim) * 0.4 + 1, torch.randn(dim) * 0.4
    return PlainHolder(norm)
