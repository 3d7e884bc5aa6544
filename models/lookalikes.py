"""Define lookalikes of the table's norms. Deployment must leave lookalikes unchanged, and report them with a reason.

A case with ``expect`` is a trap: it may be rewritten, but only to the expected node, and a careless recognition would
write another node. ``reason`` is a keyword of the reason that the report must give. It is empty for a trap that may be
rewritten.

Cases with a dynamic dim are lookalikes only if that dim is exported as dynamic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from .batch import BatchNorm2d
from .case import Case, Size
from .rows import FOLDED, GN, IN, LN, case

EPS = 1e-5
TOKENS: tuple[Size, ...] = (3, 5, 24)
Forward = Callable[[torch.Tensor], torch.Tensor]


class Pure(nn.Module):
    """Module that applies a function to x."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Affine(nn.Module):
    """Module that computes gamma · function(x) + beta, with gamma and beta of ``shape``."""

    def __init__(self, function: Forward, *shape: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(*shape))
        self.beta = nn.Parameter(torch.zeros(*shape))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gamma * self.function(x) + self.beta


def centred(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Subtract the mean along ``dim``.

    Returns:
        x − mean.
    """
    return x - x.mean(dim, keepdim=True)


def second(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Compute the biased variance along ``dim``.

    Returns:
        the variance, with the dim kept as 1.
    """
    return centred(x, dim).pow(2).mean(dim, keepdim=True)


def halved_statistics(x: torch.Tensor) -> torch.Tensor:
    """Normalize with float16 statistics. Their variance overflows, although a float32 variance would not.

    Returns:
        like x.
    """
    variance = centred(x).pow(2).to(torch.float16).mean(-1, keepdim=True).float()
    return centred(x) / torch.sqrt(variance + EPS)


def interleaved_groups(x: torch.Tensor) -> torch.Tensor:
    """Apply a group norm with two groups: the even channels and the odd channels.

    A GroupNormalization without a Transpose would be wrong.

    Returns:
        like x.
    """
    y = x.unflatten(1, (4, 2))
    c = y - y.mean((1, 3, 4), keepdim=True)
    return (c / torch.sqrt(c.pow(2).mean((1, 3, 4), keepdim=True) + EPS)).flatten(1, 2)


class ResponseNorm(nn.Module):
    """GRN of ConvNeXt V2 on NHWC (Woo et al., arXiv 2301.00808).

    It divides the L2 norm of each channel by the mean of these norms over the channels.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        g = x.norm(p=2, dim=(1, 2), keepdim=True)
        n = g / (g.mean(dim=-1, keepdim=True) + 1e-6)
        return self.gamma * (x * n) + self.beta + x


class StandardizedConv2d(nn.Conv2d):
    """Convolution with weight standardization as in timm (Qiao et al., arXiv 1903.10520).

    The weight passes through a batch norm in training mode.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = functional.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding)


class EpsilonForEach(nn.Module):
    """Norm with one learned epsilon per feature, which no node supports."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.epsilon = nn.Parameter(torch.linspace(0.01, 1.0, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return centred(x) / torch.sqrt(second(x) + self.epsilon)


class TwoConsumers(nn.Module):
    """Convolution whose result a batch norm and another node read, so its weight must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.bn(y) + torch.tanh(y)


class SharedWeight(nn.Module):
    """Two convolutions that share a weight, with a batch norm after the first only.

    The second convolution must keep the original weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.conv(x)) + torch.tanh(self.conv(x.flip(-1)))


def looks(name: str, function: Forward, reason: str, shape: tuple[Size, ...] = TOKENS, *expect: str) -> Case:
    """Make a lookalike without parameters.

    Returns:
        the case.
    """
    return case(name, lambda: Pure(function), shape, *expect, row="lookalike", reason=reason)


IMAGE: tuple[Size, ...] = (3, 8, 6, 7)
DYNAMIC_HIDDEN: tuple[Size, ...] = (3, 5, ("hidden", 2, 24, 64))
DYNAMIC_IMAGE: tuple[Size, ...] = (3, 8, ("height", 2, 6, 16), ("width", 2, 7, 16))

LOOKALIKES: tuple[Case, ...] = (
    # Another root, or another use of epsilon
    looks("normalize", lambda x: functional.normalize(x, dim=-1), "clamp"),
    looks("clamp_for_eps", lambda x: centred(x) * torch.rsqrt(second(x).clamp_min(EPS)), "clamp"),
    looks("max_with_eps", lambda x: centred(x) / torch.maximum(second(x).sqrt(), torch.tensor(EPS)), "clamp"),
    case(
        "std_plus_eps",
        lambda: Affine(lambda x: centred(x) / (x.std(-1, keepdim=True) + 1e-6), 24),
        TOKENS,
        row="lookalike",
        reason="outside the root",
    ),
    looks(
        "biased_std_plus_eps",
        lambda x: centred(x) / (x.std(-1, unbiased=False, keepdim=True) + 1e-3),
        "outside the root",
    ),
    looks("eps_after_rsqrt", lambda x: centred(x) * (torch.rsqrt(second(x) + EPS) + 1e-2), "root"),
    looks("variance_for_std", lambda x: centred(x) / (second(x) + EPS), "root"),
    looks("fourth_root", lambda x: centred(x) / (second(x) + EPS).sqrt().sqrt(), "root"),
    case("eps_for_each", lambda: EpsilonForEach(24), TOKENS, row="lookalike", reason="epsilon"),
    # Another dividend, or another value under the root
    looks("other_axis", lambda x: centred(x, -1) / torch.sqrt(second(x, 1) + EPS), "other axes"),
    looks(
        "mean_all_var_last", lambda x: (x - x.mean((1, 2), keepdim=True)) / torch.sqrt(second(x) + EPS), "other axes"
    ),
    looks("other_tensor", lambda x: centred(x) / torch.sqrt(second(torch.tanh(x)) + EPS), "another tensor"),
    looks("other_numerator", lambda x: torch.tanh(centred(x)) / torch.sqrt(second(x) + EPS), "another tensor"),
    looks("half_centred", lambda x: (x - 0.5 * x.mean(-1, keepdim=True)) / torch.sqrt(second(x) + EPS), "another mean"),
    looks("uncentred_numerator", lambda x: x / torch.sqrt(second(x) + EPS), "keeps the mean"),
    looks(
        "uncentred_variance", lambda x: centred(x) / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS), "another mean"
    ),
    looks("median", lambda x: (x - x.topk(12).values[..., -1:]) / torch.sqrt(second(x) + EPS), "another mean"),
    looks("maximum", lambda x: (x - x.amax(-1, keepdim=True)) / torch.sqrt(second(x) + EPS), "another mean"),
    looks(
        "softmax",
        lambda x: (x - x.amax(-1, keepdim=True)).exp() / (x - x.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True),
        "exponential",
    ),
    looks("mean_deviation", lambda x: centred(x) / (centred(x).abs().mean(-1, keepdim=True) + EPS), "root"),
    looks(
        "sum_of_moments",
        lambda x: centred(x) / torch.sqrt((x * x).mean(-1, keepdim=True) + x.mean(-1, keepdim=True) ** 2 + EPS),
        "another mean",
    ),
    looks("halved_statistics", halved_statistics, "narrows its statistics"),
    case("response_norm", lambda: ResponseNorm(5), (3, 6, 7, 5), row="lookalike", reason="its own deviation"),
    # These are norms only for a known number of elements.
    looks(
        "unbiased_dynamic", lambda x: centred(x) / torch.sqrt(x.var(-1, keepdim=True) + EPS), "dynamic", DYNAMIC_HIDDEN
    ),
    looks(
        "unbiased_instance_dynamic",
        lambda x: (x - x.mean((2, 3), keepdim=True)) / torch.sqrt(x.var((2, 3), keepdim=True) + EPS),
        "dynamic",
        DYNAMIC_IMAGE,
    ),
    # Batch norms that can't be folded into the neighboring linear op
    case(
        "weight_standardization", lambda: StandardizedConv2d(3, 8, 3), (3, 3, 6, 7), row="lookalike", reason="training"
    ),
    case("two_consumers", TwoConsumers, (3, 3, 6, 7), FOLDED, row="lookalike", reason="other nodes also read"),
    case("shared_weight", SharedWeight, (3, 3, 6, 7), FOLDED, row="trap"),
    case(
        "before_padded_conv",
        lambda: nn.Sequential(BatchNorm2d(3), nn.Conv2d(3, 8, 3, padding=1)),
        (3, 3, 6, 7),
        FOLDED,
        row="trap",
    ),
    case(
        "relu_between",
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), BatchNorm2d(8)),
        (3, 3, 6, 7),
        FOLDED,
        row="trap",
    ),
    # Norms that look like another kind of norm. Their inputs have axes of equal sizes, so that no check of shapes
    # detects the difference.
    case(
        "gamma_of_another_axis",
        lambda: Affine(lambda x: centred(x, 1) / torch.sqrt(second(x, 1) + EPS), 8),
        (3, 8, 8),
        f"{IN}|{LN}",
        row="trap",
    ),
    case(
        "gamma_across_the_norm",
        lambda: Affine(lambda x: centred(x) / torch.sqrt(second(x) + EPS), 8, 1),
        (3, 8, 8),
        f"{IN}|{LN}",
        row="trap",
    ),
    looks("interleaved_groups", interleaved_groups, "", IMAGE, f"{GN}|{IN}|{LN}"),
)
