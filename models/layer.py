"""Define hand-written layer norms (rows S0a, S0b, S1a, S2a, S2b, S3a).

All of these norms compute x̂ = (x − mean) / sqrt(var + eps) with statistics per sample. They differ in dims, ddof and
epsilon.

Source: Ba, Kiros, Hinton, "Layer Normalization", arXiv 1607.06450, equation 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Norm(nn.Module):
    """Layer norm S0a and S0b as in BERT, over any single dim, with biased variance and epsilon inside the root.

    ``num_features`` is the size of the last dim. Gamma and beta vary along the last dim, whatever ``dim`` is.
    """

    def __init__(self, num_features: int, eps: float = 1e-12) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(num_features))
        self.beta = nn.Parameter(torch.zeros(num_features))
        self.eps = eps

    def forward(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        u = x.mean(dim, keepdim=True)
        s = (x - u).pow(2).mean(dim, keepdim=True)
        return self.gamma * ((x - u) / torch.sqrt(s + self.eps)) + self.beta


class NormOverBatch(nn.Module):
    """Layer norm S0b: ``Norm`` with dim 0 on (B, H, W, C).

    Each output depends on the whole batch, even at inference.
    """

    def __init__(self, num_features: int, eps: float = 1e-12) -> None:
        super().__init__()
        self.norm = Norm(num_features, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x, dim=0)


class UnbiasedLayerNorm(nn.Module):
    """Layer norm S1a of (..., H) over the embedding.

    The variance is unbiased, as ``x.var(-1)`` computes it by default.
    """

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(num_features))
        self.beta = nn.Parameter(torch.zeros(num_features))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1).unsqueeze(-1)
        var = x.var(-1).unsqueeze(-1)
        return self.gamma * (x - mean) / torch.sqrt(var + self.eps) + self.beta


class LayerNorm(nn.Module):
    """Layer norm over the last ``len(normalized_shape)`` dims, with biased variance.

    For the shape [D], it is the row S2a (one mean per token). For [S, D], it is S2b (one mean per sample). For [C, H,
    W], it is the layer norm of S1e.
    """

    def __init__(self, normalized_shape: Sequence[int], eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(*normalized_shape)) if affine else None
        self.beta = nn.Parameter(torch.zeros(*normalized_shape)) if affine else None
        self.dims = tuple(range(-len(normalized_shape), 0))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(self.dims, keepdim=True)
        var = x.var(self.dims, unbiased=False, keepdim=True)
        x_hat = (x - mean) / torch.sqrt(var + self.eps)
        return x_hat if self.gamma is None or self.beta is None else x_hat * self.gamma + self.beta


class FlatLayerNorm(nn.Module):
    """Layer norm S3a of (m, ...), over the whole flattened sample of K elements.

    Gamma and beta have one value per element of a sample.
    """

    def __init__(self, num_elements: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(num_elements))
        self.beta = nn.Parameter(torch.zeros(num_elements))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = x.flatten(1)
        mean = z.mean(1, keepdim=True)
        var = ((z - mean) ** 2).mean(1, keepdim=True)
        z = self.gamma * (z - mean) / torch.sqrt(var + self.eps) + self.beta
        return z.view(x.shape)
