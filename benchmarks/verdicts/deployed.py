"""Nets in the forms in which they are deployed: decoders with a cache, doubles, pixels, int32 ids, loops of unknown
length.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from models.case import Input

from .nets import BATCH, LENGTH, Net, floats

_PAST = ("past", 2, 5, 12)


class Decoder(nn.Module):
    """Attend to a cache of keys and values, and return it with the new ones (the names are those of optimum)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.last = nn.Embedding(50, 16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.mix, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 50, bias=False)

    def forward(self, ids: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.words(ids)
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        k, v = torch.cat([key, k], 2), torch.cat([value, v], 2)
        rows = torch.arange(q.shape[2], device=ids.device)[:, None] + key.shape[2]
        hidden = torch.arange(k.shape[2], device=ids.device)[None, :] > rows
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(hidden, float("-inf"))
        x = x + self.mix((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.head(self.last(x)), k, v


class Normalized(nn.Module):
    """Compute in float64, as models of physics do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 24), nn.LayerNorm(24, 1e-9), nn.Linear(24, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


class Pixels(nn.Module):
    """Take bytes with channels last, as cameras produce them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]))
        self.register_buffer("deviation", torch.tensor([0.229, 0.224, 0.225]))
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = (image.to(self.mean.dtype) / 255 - self.mean) / self.deviation
        x = F.relu(self.norm(self.first(x.permute(0, 3, 1, 2))))
        return self.last(x.mean((2, 3))).softmax(-1)


class Sentences(nn.Module):
    """Read int32 ids, as converters from TensorFlow write them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(self.norm(self.words(ids))).amax(1))


@torch.jit.script
def _halved(x: torch.Tensor, weight: torch.Tensor, most: int) -> torch.Tensor:
    """Mix until the values are small."""
    y, count = x, 0
    while bool(y.abs().max() > 0.25) and count < most:
        y, count = torch.tanh(y @ weight) * 0.75, count + 1
    return y


class Settling(nn.Module):
    """Run a loop whose length depends on its values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight, self.norm = nn.Linear(16, 8), nn.Parameter(torch.rand(8, 8) - 0.5), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(_halved(self.first(x), self.weight, 9))
        return y


def _named(name: str) -> Input:
    return Input(f"past_key_values.0.{name}", "float32", (BATCH, 2, _PAST, 8))


DECODER = Net(
    "decoder with a cache", Decoder, (Input("input_ids", "int64", (BATCH, LENGTH), 50), _named("key"), _named("value"))
)
DOUBLES = Net("doubles, LayerNorm", Normalized, (Input("x", "float64", (BATCH, 16)),))
PIXELS = Net("bytes of an image", Pixels, (Input("image", "uint8", (BATCH, 16, 16, 3), 256),))
SENTENCES = Net("int32 ids", Sentences, (Input("ids", "int32", (BATCH, LENGTH), 50),))
SETTLING = Net("loop of unknown length", Settling, floats(BATCH, 5, 16), routes="torchscript")
