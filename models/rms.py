"""Define RMS norms as current models write them: x / sqrt(mean(x²) + eps) · weight, without subtracting the mean.

Source: Zhang, Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467, equation 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from .case import Case
from .parts import OUTERS, ROOTS, Outer, Root, pairwise
from .rows import BATCH, SEQ, TEXT, case

RMS = "RMSNormalization"

SQUARES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pow": lambda x: x.pow(2).mean(-1, keepdim=True),
    "product": lambda x: (x * x).mean(-1).unsqueeze(-1),
    "sum": lambda x: x.square().sum(-1, keepdim=True) / x.shape[-1],
    "norm": lambda x: x.norm(2, -1, keepdim=True) ** 2 / x.shape[-1],
}


class SpelledRMSNorm(nn.Module):
    """RMS norm over the last dim in a given spelling."""

    def __init__(self, hidden: int, square: str, root: Root, outer: Outer, eps: float, upcast: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.square, self.root, self.outer, self.eps, self.upcast = SQUARES[square], root, outer, eps, upcast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float() if self.upcast else x
        return self.outer(self.root(y, self.square(y) + self.eps).to(x.dtype), self.weight, self.bias)


class LlamaRMSNorm(nn.Module):
    """RMS norm that casts to float32, normalizes, casts back, and then multiplies by the weight in the model's type."""

    def __init__(self, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class GemmaRMSNorm(nn.Module):
    """RMS norm whose parameter is weight − 1. It multiplies by the weight in float32, before it casts back."""

    def __init__(self, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class T5LayerNorm(nn.Module):
    """RMS norm that T5 calls a layer norm. Only the variance is computed in float32; the input keeps its type."""

    def __init__(self, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        y = x * torch.rsqrt(variance + self.eps)
        return self.weight * y.to(self.weight.dtype)


class L2RMSNorm(nn.Module):
    """RMS norm that divides x by (L2 norm of x)/sqrt(n), as in the first public implementation, without an epsilon."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rms = x.norm(2, -1, keepdim=True) / x.shape[-1] ** 0.5
        return x / rms * self.weight


def rms_norms() -> Iterator[Case]:
    """Yield the forms of known models, then combinations of square, root, weight and upcast.

    Yields:
        cases.
    """
    for name, build in {"llama": LlamaRMSNorm, "gemma": GemmaRMSNorm, "t5": T5LayerNorm, "l2": L2RMSNorm}.items():
        yield case(f"rms_{name}", partial(build, 24), TEXT, RMS, row="RMSNorm")
    yield case("rms_torch", partial(nn.RMSNorm, 24, eps=1e-6), (BATCH, SEQ, 24), RMS, row="RMSNorm", handwritten=False)
    outers = ("only_gamma", "absent", "one_plus", "after", "element")
    for square, root, outer, eps, style in pairwise(
        tuple(SQUARES), tuple(ROOTS), outers, ("1e-06", "1e-05", "1e-12"), ("plain", "upcast")
    ):
        build_one = partial(SpelledRMSNorm, 24, square, ROOTS[root], OUTERS[outer], float(eps), style == "upcast")
        yield case("_".join(("rms", square, root, outer, eps, style)), build_one, TEXT, RMS, row="RMSNorm")
