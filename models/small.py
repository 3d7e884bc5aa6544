"""Define small nets that use norms as current models do, with random weights."""

from __future__ import annotations

import math

import torch
from torch import nn

from .batch import BatchNorm2d
from .case import Case, Input
from .group import GroupNorm
from .rms import RMS, LlamaRMSNorm
from .rows import BATCH, FOLDED, GN, LN, SEQ, Size, case
from .streams import ChannelLayerNorm, Modulated


class BasicBlock(nn.Module):
    """ResNet's block (He et al., arXiv 1512.03385) with hand-written batch norms and a projected shortcut."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False), BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), BatchNorm2d(out)
        self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride=2, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class SeparableConv(nn.Module):
    """Depthwise and pointwise convolution of MobileNet (Howard et al., arXiv 1704.04861), each with a batch norm."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.pointwise = nn.Conv2d(channels, out, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu6(self.bn2(self.pointwise(nn.functional.relu6(self.bn1(self.depthwise(x))))))


class ConvNeXtBlock(nn.Module):
    """Depthwise 7×7, layer norm over the channels, two pointwise layers, layer scale (arXiv 2201.03545)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = ChannelLayerNorm(channels, by_hand=True)
        self.up, self.down = nn.Conv2d(channels, 4 * channels, 1), nn.Conv2d(4 * channels, channels, 1)
        self.layer_scale = nn.Parameter(torch.full((channels, 1, 1), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(nn.functional.gelu(self.up(self.norm(self.depthwise(x)))))
        return x + self.layer_scale * y


class SelfAttention(nn.Module):
    """Multi-head self-attention with torch's fused function. ``causal`` is set for decoders."""

    def __init__(self, hidden: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.out(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        )


class LlamaBlock(nn.Module):
    """Pre-norm decoder block with RMS norms and a gated feed-forward (Touvron et al., arXiv 2302.13971).

    It has no rotary embedding.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.input_norm, self.post_norm = LlamaRMSNorm(hidden), LlamaRMSNorm(hidden)
        self.attention = SelfAttention(hidden, heads, causal=True)
        self.gate, self.up, self.down = nn.Linear(hidden, 64), nn.Linear(hidden, 64), nn.Linear(64, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x))
        y = self.post_norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class ResnetBlock(nn.Module):
    """Block of a diffusion UNet (Ho et al., arXiv 2006.11239).

    Its ops are GroupNorm, SiLU, convolution, the bias of the timestep, and then GroupNorm, SiLU and convolution again.
    """

    def __init__(self, channels: int, out: int, time: int, by_hand: bool) -> None:
        super().__init__()
        norm = GroupNorm if by_hand else nn.GroupNorm
        self.norm1, self.conv1 = norm(2, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.conv2 = norm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.time, self.shortcut = nn.Linear(time, out), nn.Conv2d(channels, out, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(nn.functional.silu(self.norm1(x))) + self.time(nn.functional.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(nn.functional.silu(self.norm2(y)))


class DiTBlock(nn.Module):
    """Two modulated layer norms around attention and feed-forward (arXiv 2212.09748)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = Modulated(hidden, by_hand=True), Modulated(hidden, by_hand=False)
        self.attention = SelfAttention(hidden, heads)
        self.mlp = nn.Sequential(nn.Linear(hidden, 64), nn.GELU(approximate="tanh"), nn.Linear(64, hidden))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x, condition))
        return x + self.mlp(self.norm2(x, condition))


class LinearNorm(nn.Module):
    """Linear and BatchNorm1d of LeViT, applied to (B, S, D) as (B·S, D) (Graham et al., arXiv 2104.01136)."""

    def __init__(self, hidden: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, out, bias=False)
        self.bn = nn.BatchNorm1d(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return self.bn(y.flatten(0, 1)).reshape_as(y)


class LeViTBlock(nn.Module):
    """Attention and feed-forward of LeViT, made of `LinearNorm` and without layer norms."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out = LinearNorm(hidden, 3 * hidden), LinearNorm(hidden, hidden)
        self.up, self.down = LinearNorm(hidden, 2 * hidden), LinearNorm(2 * hidden, hidden)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        attention = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + self.out(nn.functional.hardswish((attention @ v).transpose(1, 2).flatten(2)))
        return x + self.down(nn.functional.hardswish(self.up(x)))


HIDDEN: tuple[Size, ...] = (BATCH, SEQ, 32)
PICTURE: tuple[Size, ...] = (BATCH, 8, ("height", 4, 8, 16), ("width", 4, 8, 16))

TIME, CONDITION = Input("time", "float32", (BATCH, 16)), Input("condition", "float32", (BATCH, 32))

SMALL: tuple[Case, ...] = (
    case("resnet_block", lambda: BasicBlock(8, 12), PICTURE, FOLDED, FOLDED, FOLDED, row="net", handwritten=False),
    case("mobilenet_block", lambda: SeparableConv(8, 12), PICTURE, FOLDED, FOLDED, row="net", handwritten=False),
    case("convnext_block", lambda: ConvNeXtBlock(8), PICTURE, LN, row="net"),
    case("llama_block", lambda: LlamaBlock(32, 4), HIDDEN, RMS, RMS, row="net"),
    case("unet_block", lambda: ResnetBlock(8, 12, 16, by_hand=True), PICTURE, GN, GN, row="net", more=(TIME,)),
    case(
        "unet_block_torch",
        lambda: ResnetBlock(8, 12, 16, by_hand=False),
        PICTURE,
        GN,
        GN,
        row="net",
        handwritten=False,
        more=(TIME,),
    ),
    case("dit_block", lambda: DiTBlock(32, 4), HIDDEN, LN, LN, row="net", handwritten=False, more=(CONDITION,)),
    case("levit_block", lambda: LeViTBlock(32, 4), HIDDEN, *(FOLDED,) * 4, row="net", handwritten=False),
)
