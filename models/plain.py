"""Define norms that are plain Python classes (rows S4a, S4b), and modules that contain them.

``nn.Module`` ignores attributes that are plain objects. ``.eval()`` does not set their ``training`` flag, and their
tensors are not in the state_dict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class BatchNorm1d:
    """Batch norm S4a of (B, D) over dim 0.

    The variance is unbiased, for the output and for the running value. ``momentum`` is the weight of the new value.

    The running buffers have the shape (D,) at first, and (1, D) after the first update.
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
    """Layer norm S4b of (B, D) over dim 1, with unbiased variance."""

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
    """Module with an optional linear layer, followed by a plain norm that is stored as an attribute."""

    def __init__(self, norm: BatchNorm1d | LayerNorm1d, linear: nn.Linear | None = None) -> None:
        super().__init__()
        self.linear = linear
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x if self.linear is None else self.linear(x))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PlainHolder:
        # .half() ignores plain objects too. Convert their tensors here, or the output would stay float32.
        for name, value in vars(self.norm).items():
            if isinstance(value, torch.Tensor):
                setattr(self.norm, name, fn(value))
        return super()._apply(fn, recurse)


def trained_batch_norm(dim: int, linear: nn.Linear | None = None, training: bool = False) -> PlainHolder:
    """Make the norm S4a and update it three times, so that its buffers have the shape (1, D) and varying values.

    Args:
        training: True to leave the norm in training mode.

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
    """Make the norm S4b with random gamma and beta.

    Returns:
        the holder.
    """
    norm = LayerNorm1d(dim)
    norm.gamma, norm.beta = torch.randn(dim) * 0.4 + 1, torch.randn(dim) * 0.4
    return PlainHolder(norm)
