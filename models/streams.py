"""Define norms in less simple surroundings.

Examples are norms whose inner tensors have other readers, residual streams, flattened inputs, modulation, and
channels-first layer norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from .case import Case, Input
from .rms import RMS
from .rows import BATCH, BN, FOLDED, GN, HEIGHT, IMAGE, IN, LN, SEQ, TEXT, WIDTH, case

Pair = tuple[torch.Tensor, torch.Tensor]


class Reused(nn.Module):
    """Layer norm over the last dim that also returns an inner tensor: "centred" x − u, "hat" x̂, "mean" u, or "std"."""

    def __init__(self, hidden: int, what: str) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(hidden))
        self.beta = nn.Parameter(torch.zeros(hidden))
        self.what = what

    def forward(self, x: torch.Tensor) -> Pair:
        u = x.mean(-1, keepdim=True)
        centred = x - u
        std = torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
        hat = centred / std
        inner = {"centred": centred, "hat": hat, "mean": u, "std": std}[self.what]
        return hat * self.gamma + self.beta, torch.tanh(inner)


class ResidualStream(nn.Module):
    """Post-norm residual stream with two hand-written norms.

    The norm and the residual add read x, and the result of the first norm is the input of the second.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = Reused(hidden, "centred"), Reused(hidden, "hat")
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, centred = self.first(x)
        z, hat = self.second(x + self.linear(y))
        return x + z + centred * hat


class Flattened(nn.Module):
    """Layer norm of (B·S, H), between a view of (B, S, H) to this shape and a view back."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(hidden))
        self.beta = nn.Parameter(torch.zeros(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        centred = rows - rows.mean(1, keepdim=True)
        rows = self.gamma * centred * torch.rsqrt((centred * centred).mean(1, keepdim=True) + 1e-6) + self.beta
        return rows.view(x.shape)


class UpcastLayerNorm(nn.Module):
    """Layer norm that computes in float32, and casts back to x's type before gamma and beta."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.float32)
        y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * y.to(x.dtype) + self.bias


class Modulated(nn.Module):
    """Adaptive layer norm of DiT (Peebles, Xie, arXiv 2212.09748): x̂·(1 + scale) + shift.

    Scale and shift are computed from a condition of (B, D).
    """

    def __init__(self, hidden: int, by_hand: bool) -> None:
        super().__init__()
        self.norm = None if by_hand else nn.LayerNorm(hidden, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Linear(hidden, 2 * hidden)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift, scale = self.modulation(nn.functional.silu(condition)).chunk(2, dim=-1)
        if self.norm is None:
            u = x.mean(-1, keepdim=True)
            x_hat = (x - u) / torch.sqrt((x - u).pow(2).mean(-1, keepdim=True) + 1e-6)
        else:
            x_hat = self.norm(x)
        return x_hat * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class ChannelLayerNorm(nn.Module):
    """Layer norm of ConvNeXt over C of NCHW (Liu et al., arXiv 2201.03545).

    It is hand-written, or torch's layer norm between two permutations.
    """

    def __init__(self, channels: int, by_hand: bool, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.by_hand, self.eps = by_hand, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.by_hand:
            y = nn.functional.layer_norm(x.permute(0, 2, 3, 1), self.weight.shape, self.weight, self.bias, self.eps)
            return y.permute(0, 3, 1, 2)
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Stack(nn.Module):
    """Sequence of ``depth`` norms with different parameters, with linear layers between them."""

    def __init__(self, hidden: int, depth: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(norm(hidden), nn.Linear(hidden, hidden)) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Unscaled(nn.Module):
    """Norm over the last dim without parameters."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def deviations(x: torch.Tensor) -> Pair:
    """Compute x − u over the last dim, and the sum of its squares.

    Returns:
        (x − u, Σ(x − u)²).
    """
    c = x - x.mean(-1, keepdim=True)
    return c, (c * c).sum(-1, keepdim=True)


def over_sum(x: torch.Tensor) -> torch.Tensor:
    """Compute c / sqrt(Σc² + ε): a layer norm with epsilon ε/n, scaled by 1/sqrt(n).

    Returns:
        like x.
    """
    c, total = deviations(x)
    return c / torch.sqrt(total + 1e-4)


def over_too_many(x: torch.Tensor) -> torch.Tensor:
    """Divide Σc² by n + 1 instead of n: a layer norm with epsilon ε·(n + 1)/n, scaled by sqrt((n + 1)/n).

    Returns:
        like x.
    """
    c, total = deviations(x)
    return c / torch.sqrt(total / (x.shape[-1] + 1) + 1e-4)


EQUALS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "over_sum": (over_sum, LN),
    "over_too_many": (over_too_many, LN),
    "unit_length": (lambda x: x / x.norm(dim=-1, keepdim=True), RMS),
}
"""Not meant as these norms by whoever wrote them, but equal by an identity."""


def streams() -> Iterator[Case]:
    """Yield a case for each class and function above.

    Yields:
        cases.
    """
    for what in ("centred", "hat", "mean", "std"):
        yield case(f"reused_{what}", lambda what=what: Reused(24, what), TEXT, LN, row="S0a")  # type: ignore[misc]
    yield case("residual_stream", lambda: ResidualStream(24), TEXT, LN, LN, row="S0a")
    yield case("flattened", lambda: Flattened(24), TEXT, LN, row="S0a")
    yield case("upcast", lambda: UpcastLayerNorm(24), TEXT, LN, row="S0a")
    yield case("stack", lambda: Stack(16, 8, Flattened), (BATCH, SEQ, 16), *(LN,) * 8, row="S0a")
    condition = Input("condition", "float32", (BATCH, 24))
    yield case("modulated", lambda: Modulated(24, by_hand=True), TEXT, LN, row="modulation", more=(condition,))
    yield case(
        "modulated_torch",
        lambda: Modulated(24, by_hand=False),
        TEXT,
        LN,
        row="modulation",
        handwritten=False,
        more=(condition,),
    )
    yield case("channel_ln", lambda: ChannelLayerNorm(8, by_hand=True), IMAGE, LN, row="channel LN")
    yield case(
        "channel_ln_torch", lambda: ChannelLayerNorm(8, by_hand=False), IMAGE, LN, row="channel LN", handwritten=False
    )
    for name, (function, op) in EQUALS.items():
        yield case(f"equal_{name}", lambda function=function: Unscaled(function), TEXT, op, row="S2a")  # type: ignore[misc]


def torch_layers() -> Iterator[Case]:
    """Yield torch's norm layers. BatchNorm follows a convolution or has no linear op next to it.

    Yields:
        cases.
    """
    volume = (BATCH, 8, 3, HEIGHT, WIDTH)
    yield case(
        "BatchNorm1d",
        lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)),
        (BATCH, 5),
        FOLDED,
        row="S1b",
        handwritten=False,
    )
    yield case(
        "BatchNorm2d",
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)),
        (BATCH, 8, 6, 7),
        FOLDED,
        row="S1b",
        handwritten=False,
    )
    yield case("BatchNorm2d_alone", lambda: nn.BatchNorm2d(8), IMAGE, BN, row="S1b", handwritten=False)
    yield case("BatchNorm3d", lambda: nn.BatchNorm3d(8), volume, BN, row="S1b", handwritten=False)
    yield case("BatchNorm_no_affine", lambda: nn.BatchNorm2d(8, affine=False), IMAGE, BN, row="S1b", handwritten=False)
    yield case(
        "InstanceNorm1d", lambda: nn.InstanceNorm1d(8, affine=True), (BATCH, 8, SEQ), IN, row="S1c", handwritten=False
    )
    yield case("InstanceNorm2d", lambda: nn.InstanceNorm2d(8, affine=True), IMAGE, IN, row="S1c", handwritten=False)
    yield case("InstanceNorm3d", lambda: nn.InstanceNorm3d(8, affine=True), volume, IN, row="S1c", handwritten=False)
    yield case(
        "InstanceNorm2d_no_affine", lambda: nn.InstanceNorm2d(8), IMAGE, f"{IN}|{LN}", row="S1c", handwritten=False
    )
    for count, op in ((1, LN), (2, GN), (8, f"{IN}|{GN}")):
        yield case(
            f"GroupNorm_{count}", lambda count=count: nn.GroupNorm(count, 8), IMAGE, op, row="S1d", handwritten=False
        )  # type: ignore[misc]
    yield case("GroupNorm_3d", lambda: nn.GroupNorm(2, 8), (BATCH, 8, SEQ), GN, row="S1d", handwritten=False)
    yield case(
        "GroupNorm_no_affine",
        lambda: nn.GroupNorm(2, 8, affine=False),
        IMAGE,
        f"{GN}|{IN}|{LN}",
        row="S1d",
        handwritten=False,
    )
