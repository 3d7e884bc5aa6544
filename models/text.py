"""Define norms of text, (B, S, ·): batch norms (rows S0c, S2e), and encoder layers with torch's layer norm (S2d)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn


class PositionBatchNorm(nn.Module):
    """Batch norm S0c of (B, S, H) over dim 0, with one statistic per pair of position and feature.

    The variance is biased, for the output and for the running value.

    ``momentum``, called k here, is the weight of the old value. ``update`` selects one of two spellings of the same
    moving average: "blend" is m = m·k + batch·(1 − k), and "step" is m −= (m − batch)·(1 − k).
    """

    def __init__(
        self,
        num_positions: int,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.99,
        update: Literal["blend", "step"] = "blend",
    ) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(num_features))
        self.beta = nn.Parameter(torch.zeros(num_features))
        self.running_mean: torch.Tensor
        self.running_var: torch.Tensor
        self.register_buffer("running_mean", torch.zeros(num_positions, num_features))
        self.register_buffer("running_var", torch.ones(num_positions, num_features))
        self.eps = eps
        self.momentum = momentum
        self.update = update

    def track(self, running: torch.Tensor, batch: torch.Tensor) -> None:
        """Move a running statistic toward the statistic of the batch, in place."""
        k = self.momentum
        if self.update == "blend":
            running.copy_(running * k + batch * (1 - k))
        else:
            running -= (running - batch) * (1 - k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean = x.mean(0)
            var = ((x - mean) ** 2).mean(0)
            with torch.no_grad():
                self.track(self.running_mean, mean)
                self.track(self.running_var, var)
        else:
            mean, var = self.running_mean, self.running_var
        return self.gamma * (x - mean) / torch.sqrt(var + self.eps) + self.beta


class TextBatchNorm(nn.Module):
    """Batch norm S2e of (B, S, D): a BatchNorm1d with the S positions as channels.

    Each position has one mean, over the batch and the features.
    """

    def __init__(self, num_positions: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(num_positions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class TextBatchNormByHand(nn.Module):
    """Hand-written batch norm S2e.

    The variance is biased for the output, and unbiased for the running value. ``momentum`` is the weight of the new
    value.
    """

    def __init__(self, num_positions: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(num_positions))
        self.beta = nn.Parameter(torch.zeros(num_positions))
        self.running_mean: torch.Tensor
        self.running_var: torch.Tensor
        self.register_buffer("running_mean", torch.zeros(num_positions))
        self.register_buffer("running_var", torch.ones(num_positions))
        self.eps = eps
        self.momentum = momentum

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean, var = x.mean((0, 2)), x.var((0, 2), unbiased=False)
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(x.var((0, 2)), self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        x_hat = (x - mean[:, None]) / torch.sqrt(var[:, None] + self.eps)
        return self.gamma[:, None] * x_hat + self.beta[:, None]


class BertSelfAttention(nn.Module):
    """Multi-head self-attention as in BERT: three projections, scores divided by sqrt(head size), an additive mask."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.heads = heads

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.query(x), self.key(x), self.value(x))
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class BertLayer(nn.Module):
    """Encoder layer S2d: attention and feed-forward, with ``nn.LayerNorm`` after each residual add (post-norm)."""

    def __init__(self, hidden: int, heads: int, eps: float = 1e-12) -> None:
        super().__init__()
        self.attention = BertSelfAttention(hidden, heads)
        self.attention_output = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden, eps=eps)
        self.intermediate = nn.Linear(hidden, 4 * hidden)
        self.output = nn.Linear(4 * hidden, hidden)
        self.output_norm = nn.LayerNorm(hidden, eps=eps)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(self.attention_output(self.attention(x, mask)) + x)
        return self.output_norm(self.output(nn.functional.gelu(self.intermediate(x))) + x)


class Bert(nn.Module):
    """Encoder S2d: BERT of Devlin et al. (arXiv 1810.04805) in Hugging Face's layout.

    It maps (B, S) ids and a mask of 0 and 1 to (B, S, hidden).
    """

    def __init__(self, vocabulary: int, hidden: int, heads: int, layers: int, positions: int = 64) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, hidden)
        self.position_embeddings = nn.Embedding(positions, hidden)
        self.embeddings_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(hidden, heads) for _ in range(layers))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.word_embeddings(ids) + self.position_embeddings(torch.arange(ids.shape[1], device=ids.device))
        x = self.embeddings_norm(x)
        # Use the most negative finite value of the type, as Hugging Face does, because -inf would turn a fully masked
        # row into NaN.
        additive = (1 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, additive)
        return x


class EncoderLayer(nn.Module):
    """Encoder layer S2d: PyTorch's encoder layer, on (B, S, D)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)
