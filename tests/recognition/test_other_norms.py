"""Normalizations that no node expresses are listed, and what only looks like one is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normdeploy


class MaskedLayerNorm(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        count = mask.sum(-1, keepdim=True).clamp(min=1)
        mean = (x * mask).sum(-1, keepdim=True) / count
        variance = (((x - mean) * mask) ** 2).sum(-1, keepdim=True) / count
        return (x - mean) / torch.sqrt(variance + 1e-5)


class CumulativeNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[-1] + 1) * x.shape[1]
        mean = (x.sum(1).cumsum(-1) / count).unsqueeze(1)
        variance = ((x - mean) ** 2).sum(1).cumsum(-1) / count
        return (x - mean) * torch.rsqrt(variance.unsqueeze(1) + 1e-6)


class MeanScaler(nn.Module):
    """The scaler of a time series transformer."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().mean(-1, keepdim=True).clamp(min=1e-10)


class Length(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, p=self.p, dim=-1)


class DivisiveNorm(nn.Module):
    """GDN: Ballé, Laparra, Simoncelli, arXiv:1511.06281."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(4))
        self.gamma = nn.Parameter(torch.rand(4, 4, 1, 1) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(F.conv2d(x * x, self.gamma, self.beta))


class PartialNorm(nn.Module):
    """pRMSNorm: Zhang, Sennrich, arXiv:1910.07467, section 4.2."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x[..., :3].pow(2).mean(-1, keepdim=True) + 1e-6)


class RescaledByOther(nn.Module):
    """The magnitude of one stream given to another, as in Gemma 3n's AltUp."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        target = x.pow(2).mean(-1, keepdim=True).sqrt()
        return other * target / other.pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-5)


class Activated(nn.Module):
    """Dynamic Tanh or Derf before a layer."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.weight, self.bias = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.alpha * x
        y = torch.tanh(inner) if self.op == "tanh" else torch.erf(inner + 0.1)
        return self.layer(y * self.weight + self.bias)


class Formula(nn.Module):
    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x)


class Joined(nn.Module):
    """The norm of a joined tensor: what joins it is not a part of the statistic."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return F.normalize(torch.cat([x, other], -1), p=3.0, dim=-1)


class MaskedByProduct(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x * mask) @ COLUMN + 1e-5)


COLUMN = torch.full((8, 1), 0.125)
BLOCKS = torch.kron(torch.eye(2), torch.full((4, 4), 0.25))
ROWS = torch.randn(2, 5, 8)
IMAGES = torch.randn(2, 4, 6, 6)
LISTED = {
    "masked": (MaskedLayerNorm(), (ROWS, (ROWS > 0).float()), "masked norm", "masks or weights"),
    "cumulative": (CumulativeNorm(), (ROWS,), "cumulative norm", "cumulative"),
    "mean scaler": (MeanScaler(), (ROWS,), "lookalike", "a mean or sum of magnitudes"),
    "L1": (Length(1.0), (ROWS,), "lookalike", "a mean or sum of magnitudes"),
    "L3": (Length(3.0), (ROWS,), "Lp norm", "exponent other than 2"),
    "local response": (nn.LocalResponseNorm(3), (IMAGES,), "local norm", "neighborhood"),
    "divisive": (DivisiveNorm(), (IMAGES,), "local norm", "neighborhood"),
    "partial": (PartialNorm(), (ROWS,), "partial norm", "a part of its input"),
    "sums by a matrix product": (
        Formula(lambda x: (x - x @ COLUMN) / torch.sqrt(((x - x @ COLUMN) ** 2) @ COLUMN + 1e-5)),
        (ROWS,),
        "matrix-product norm",
        "sums or means over an axis",
    ),
    "sums by a layer": (
        Formula(lambda x: x * torch.rsqrt(F.linear(x * x, COLUMN.T, torch.tensor([1e-5])))),
        (ROWS[0],),
        "matrix-product norm",
        "sums or means over an axis",
    ),
    "a product with itself": (
        Formula(lambda x: x * torch.rsqrt((x.unsqueeze(-2) @ x.unsqueeze(-1)).squeeze(-1) / 8 + 1e-5)),
        (ROWS,),
        "matrix-product norm",
        "sums or means over an axis",
    ),
    "sums by a pointwise convolution": (
        Formula(lambda x: x * torch.rsqrt(F.conv2d(x * x, torch.full((1, 4, 1, 1), 0.25)) + 1e-5)),
        (IMAGES,),
        "matrix-product norm",
        "sums or means over an axis",
    ),
    "a root by a logarithm": (
        Formula(lambda x: x * torch.exp(-0.5 * torch.log(x.pow(2).mean(-1, keepdim=True) + 1e-5))),
        (ROWS,),
        "logarithmic norm",
        "a square root can be recognized",
    ),
    "a root by a logarithm below a quotient": (
        Formula(lambda x: x / torch.exp(0.5 * torch.log(x.pow(2).mean(-1, keepdim=True) + 1e-5))),
        (ROWS,),
        "logarithmic norm",
        "a square root can be recognized",
    ),
    "a root by a negated logarithm": (
        Formula(lambda x: x * torch.exp(-(0.5 * torch.log(x.pow(2).mean(-1, keepdim=True) + 1e-5)))),
        (ROWS,),
        "logarithmic norm",
        "a square root can be recognized",
    ),
    "sums of groups by a matrix": (
        Formula(lambda x: x * torch.rsqrt((x * x) @ BLOCKS + 1e-5)),
        (ROWS,),
        "matrix-product norm",
        "sums or means over an axis",
    ),
    "sums by a large matrix": (
        Formula(lambda x: x * torch.rsqrt((x * x) @ torch.full((1200, 1200), 1 / 1200) + 1e-5)),
        (torch.randn(2, 1200),),
        "matrix-product norm",
        "sums or means over an axis",
    ),
    "a mask, and sums by a matrix product": (
        MaskedByProduct(),
        (ROWS, (ROWS > 0).float()),
        "masked norm",
        "masks or weights",
    ),
    "a power of a joined input": (
        Joined(),
        (ROWS, ROWS + 1),
        "Lp norm",
        "exponent other than 2",
    ),
    # Pre-CRMSNorm: Jiang et al., arXiv:2305.14858, whose last element is minus the sum of the others.
    "joined": (
        Formula(
            lambda x: (
                x / torch.sqrt(torch.cat([x, -x.sum(-1, keepdim=True)], -1).pow(2).sum(-1, keepdim=True) / 9 + 1e-5)
            )
        ),
        (ROWS,),
        "joined norm",
        "and other values together",
    ),
    "rescaled": (RescaledByOther(), (ROWS, ROWS + 1), "unknown", "a statistic of its own input"),
}


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("fuse", ["standard", "portable"])
def test_it_is_listed_with_its_reason(name: str, fuse: str) -> None:
    net, given, kind, reason = LISTED[name]
    result = normdeploy.export(net.eval(), given, fuse=fuse)
    (finding,) = result.summary.findings
    assert (finding.kind, finding.status) == (kind, "refused")
    assert reason in finding.reason
    assert finding.tensor in {o for n in result.proto.graph.node for o in n.output}


@pytest.mark.parametrize(("op", "kind"), [("tanh", "DynamicTanh"), ("erf", "Derf")])
def test_an_activation_in_place_of_a_norm_is_listed(op: str, kind: str) -> None:
    findings = normdeploy.export(Activated(op).eval(), (ROWS,)).summary.findings
    (finding,) = [f for f in findings if f.kind == kind]
    assert finding.status == "kept"
    assert "no statistics" in finding.reason
    assert [f.status for f in findings if f is not finding] == ["folded"]


class Lambda(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = UNLISTED[self.name](self.layer(x))
        return y


def attend(x: Tensor) -> Tensor:
    return F.softmax(x @ x.transpose(-1, -2) / 8**0.5, dim=-1) @ x


def route(x: Tensor) -> Tensor:
    """Weights of experts, renormalized to a sum of 1."""
    weights = torch.topk(F.softmax(x, -1), 2).values
    return weights / weights.sum(-1, keepdim=True)


def quantize(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / scale) * scale


WEIGHT = torch.linspace(-1, 1, 64).reshape(8, 8)
UNLISTED = {
    "attention": attend,
    "softmax by hand": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
    "experts": route,
    "rounding": quantize,
    "GELU": F.gelu,
    "GELU by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "cap of logits": lambda x: torch.tanh(x / 30.0) * 30.0,
    "SiLU": F.silu,
    "weighted mean": lambda x: (x * x.sigmoid()).sum(1, keepdim=True) / x.sigmoid().sum(1, keepdim=True),
    "gate": lambda x: x * x.mean(1, keepdim=True).sigmoid(),
    "Gaussian": lambda x: x * torch.exp(-0.5 * x.pow(2).sum(-1, keepdim=True)),
    "divided by a layer of squares": lambda x: x / (1.0 + (x * x) @ torch.arange(64.0).reshape(8, 8)),
    "linear attention": lambda x: (F.elu(x) + 1) / ((F.elu(x) + 1) @ (F.elu(2 * x @ WEIGHT) + 1).sum(1)[:, :, None]),
    "a softmax of logarithms": lambda x: torch.exp(x - torch.logsumexp(x, -1, keepdim=True)),
    "ratio of means": lambda x: x.abs().mean(-1) / (x.pow(2).mean(-1) + 1.0),
}


@pytest.mark.parametrize("name", UNLISTED)
def test_other_quotients_are_no_norms(name: str) -> None:
    assert normdeploy.export(Lambda(name).eval(), (ROWS,)).summary.findings == ()
