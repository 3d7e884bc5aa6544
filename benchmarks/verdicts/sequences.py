"""Nets for text, sound and time series, and nets that branch and loop."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from models.case import Input

from .nets import BATCH, LENGTH, Net, floats, ids


class Bert(nn.Module):
    """Two layers of an encoder with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(50, 16), nn.Embedding(48, 16), nn.LayerNorm(16, 1e-12)
        layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
        self.layers = nn.ModuleList([layer, nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.places(places))
        for layer in self.layers:
            x = layer(x)
        return x


class MaskedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mix, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        hidden = (1.0 - mask.to(x.dtype))[:, None, None, :] * -10000.0
        weights = (q @ k.transpose(-1, -2) / 2 + hidden).softmax(-1)
        return self.norm(x + self.mix((weights @ v).transpose(1, 2).flatten(2)))


class Llama(nn.Module):
    """One block with rotary positions, grouped queries and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(16, 1e-5), nn.RMSNorm(16, 1e-5)
        self.q, self.k, self.v, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 16)
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Apply rotary positions.

        Returns:
            like x.
        """
        angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        q = self.turned(self.q(y).unflatten(-1, (4, 4)).transpose(1, 2))
        k = self.turned(self.k(y).unflatten(-1, (2, 4)).transpose(1, 2)).repeat_interleave(2, 1)
        v = self.v(y).unflatten(-1, (2, 4)).transpose(1, 2).repeat_interleave(2, 1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class RelativeBias(nn.Module):
    """Attend with a learned bias for each distance, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.qkv, self.mix = nn.Embedding(9, 2), nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        places = torch.arange(x.shape[1], device=x.device)
        distance = (places[None, :] - places[:, None]).clamp(-4, 4) + 4
        scores = q @ k.transpose(-1, -2) + self.bias(distance).permute(2, 0, 1)
        return x + self.mix((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(16, 2, batch_first=True), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.attention(x, memory, memory, need_weights=False)[0])


class TwoTowers(nn.Module):
    """Compare unit vectors of two inputs, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.scale = nn.Linear(16, 8), nn.Linear(12, 8), nn.Parameter(torch.tensor(1.5))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        return self.scale.exp() * (a * b).sum(-1)


class CausalConv(nn.Module):
    """Two dilated causal convolutions with a residual (TCN)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(8, 8, 3), nn.Conv1d(8, 8, 3, dilation=2)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.first(F.pad(x, (2, 0)))))
        return x + torch.tanh(self.second(F.pad(y, (4, 0))))


class WaveFeatures(nn.Module):
    """Read a wave as wav2vec does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(1, 8, 10, 5, bias=False), nn.GroupNorm(8, 8)
        self.second, self.last, self.head = nn.Conv1d(8, 8, 3, 2, bias=False), nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm(self.first(wave[:, None])))
        return self.head(self.last(F.gelu(self.second(x)).transpose(1, 2)))


class Spectrogram(nn.Module):
    """Take the log of a mel spectrogram computed with torch.stft."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))
        self.register_buffer("mel", torch.rand(33, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        parts = torch.stft(wave, 64, 32, window=self.window, center=False, return_complex=True)
        power = torch.view_as_real(parts).pow(2).sum(-1)
        return self.head((power.transpose(1, 2) @ self.mel + 1e-6).log())


class ConvSpectrogram(nn.Module):
    """Compute a spectrogram by a convolution with a Fourier basis, then apply a GRU, as voice detectors do."""

    def __init__(self) -> None:
        super().__init__()
        angles = 2 * math.pi * torch.arange(17)[:, None] * torch.arange(32) / 32
        self.register_buffer("basis", torch.cat([angles.cos(), angles.sin()])[:, None] * torch.hann_window(32))
        self.cell, self.head = nn.GRU(17, 12, batch_first=True), nn.Linear(12, 1)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        real, imaginary = F.conv1d(F.pad(wave[:, None], (16, 16)), self.basis, stride=16).chunk(2, 1)
        # With 1e-8 the pair would be wrong: torch's exporter takes x + 1e-8 for x + 0, and drops it.
        x = (real**2 + imaginary**2 + 1e-6).sqrt().transpose(1, 2)
        return self.head(self.cell(x)[0]).sigmoid().mean(1)


class BothWays(nn.Module):
    """Read a sequence in both directions, then score its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(16, 6, 2, batch_first=True, bidirectional=True)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.cells(x)[0])).log_softmax(-1)


class StreamingLstm(nn.Module):
    """Take and return the cell's state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, (h, c) = self.cell(x, (h, c))
        return self.head(y), h, c


class Elman(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.RNN(16, 10, batch_first=True), nn.Linear(10, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Branch(nn.Module):
    """Select one of two layers by the sum of the input (torch.cond)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.left, self.right = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return torch.cond(x.sum() > 0, lambda t: self.left(t).relu(), lambda t: self.right(t).tanh(), (y,))


@torch.jit.script
def _repeated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Apply a layer once for each position of the input."""
    y = x
    for _ in range(x.size(1)):
        y = torch.tanh(y @ weight) + 0.5 * x
    return y


@torch.jit.script
def _chosen(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Select one of two formulas by the input's mean."""
    if bool(x.mean() > 0):
        y = torch.tanh(x @ weight)
    else:
        y = 0.5 * x
    return y


class Scripted(nn.Module):
    """Scripted function between plain layers."""

    def __init__(self, *, loops: bool) -> None:
        super().__init__()
        self.loops = loops
        self.first, self.weight, self.norm = nn.Linear(16, 8), nn.Parameter(torch.rand(8, 8) - 0.5), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = _repeated if self.loops else _chosen
        y: torch.Tensor = self.norm(part(self.first(x), self.weight))
        return y


class Gates(nn.Module):
    """Mix three experts by a softmax over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 3), nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        return torch.stack([e(x).relu() for e in self.experts], -1).mul(weights[..., None, :]).sum(-1)


class StateSpace(nn.Module):
    """Decay a running state by -exp(A_log), unrolled over four steps."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log, self.into, self.out = nn.Parameter(torch.rand(8)), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = F.softplus(self.into(x))
        decay = torch.exp(step * -torch.exp(self.A_log))
        state = torch.zeros_like(x[:, 0])
        kept = []
        for i in range(4):
            state = decay[:, i] * state + step[:, i] * x[:, i]
            kept.append(state)
        return self.out(torch.stack(kept, 1))


class Pooled(nn.Module):
    """Embed a sentence: the mean over the unmasked positions, scaled to unit length."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 12)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x, kept = self.norm(self.words(ids)), mask.float()[..., None].to(self.head.weight.dtype)
        x = (x * kept).sum(1) / kept.sum(1).clamp(min=1e-9)
        return F.normalize(self.head(x), dim=-1)


TOKENS = floats(BATCH, LENGTH, 16)
MASK = Input("mask", "int64", (BATCH, LENGTH), 2)

SEQUENCES = (
    Net("BERT with places", Bert, ids(BATCH, LENGTH, high=50)),
    Net("attention with a mask", MaskedAttention, (*TOKENS, MASK)),
    Net("Llama block", Llama, TOKENS),
    Net("relative bias", RelativeBias, TOKENS),
    Net("cross attention", CrossAttention, (*TOKENS, *floats(BATCH, 7, 16, name="memory"))),
    Net("two towers", TwoTowers, (*floats(BATCH, 16, name="a"), *floats(BATCH, 12, name="b"))),
    Net("causal convolutions", CausalConv, floats(BATCH, 8, 20)),
    Net("wave features", WaveFeatures, floats(BATCH, 200, name="wave")),
    Net("mel spectrogram", Spectrogram, floats(BATCH, 256, name="wave"), routes="dynamo"),
    Net("convolved spectrogram, GRU", ConvSpectrogram, floats(BATCH, 128, name="wave")),
    Net("LSTM both ways", BothWays, floats(BATCH, 6, 16)),
    Net(
        "streaming LSTM",
        StreamingLstm,
        (*floats(2, 4, 8), *floats(1, 2, 8, name="h"), *floats(1, 2, 8, name="c")),
    ),
    Net("RNN, last step", Elman, floats(BATCH, 6, 16)),
    Net("If (torch.cond)", Branch, floats(BATCH, 5, 16), routes="dynamo"),
    Net("Loop (scripted)", lambda: Scripted(loops=True), floats(BATCH, 5, 16), routes="torchscript"),
    Net("If (scripted)", lambda: Scripted(loops=False), floats(BATCH, 5, 16), routes="torchscript"),
    Net("three experts", Gates, TOKENS),
    Net("state space", StateSpace, floats(BATCH, 4, 8)),
    Net("sentence embedding", Pooled, (*ids(BATCH, LENGTH, high=50), MASK)),
)
