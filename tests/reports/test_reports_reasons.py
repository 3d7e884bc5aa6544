"""What is said of norms that remain: the true reason, and how many are left of those that were folded."""

from __future__ import annotations

import io

import torch
from rich.console import Console
from torch import nn

import normdeploy
from normdeploy.findings.norm_tables import show_norms
from normdeploy.verbs.arguments.export_result import ExportResult
from tests.recognition.test_affine_chains import norm


class EvoNorm(nn.Module):
    """EvoNorm-S0: x·sigmoid(v·x) over the deviation of its group."""

    def __init__(self, gated: bool = True, divided: bool = False) -> None:
        super().__init__()
        self.gated, self.divided, self.v = gated, divided, nn.Parameter(torch.randn(1, 8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(x.shape[0], 4, -1)
        deviation = (rows.var(2, keepdim=True, correction=0) + 1e-5).sqrt().expand(rows.shape).reshape(x.shape)
        if self.divided:
            return deviation / x.cos()
        return x * (x * self.v).sigmoid() / deviation if self.gated else deviation


def told(net: nn.Module, *shape: int) -> tuple[ExportResult, str]:
    made = normdeploy.export(net.eval(), (torch.randn(shape),))
    out = io.StringIO()
    show_norms(Console(file=out, width=200), made.summary)
    return made, out.getvalue()


def test_evonorm_is_told_by_what_it_divides() -> None:
    made, _ = told(nn.Sequential(nn.Conv2d(3, 8, 3), EvoNorm()), 1, 3, 6, 6)
    (finding,) = made.summary.findings
    assert finding.status == "refused"
    assert "its deviation divides the result of Sigmoid" in finding.reason
    assert "gamma" not in finding.reason
    made, _ = told(nn.Sequential(nn.Conv2d(3, 8, 3), EvoNorm(gated=False)), 1, 3, 6, 6)
    assert "the same result for x and −x" in made.summary.findings[0].reason


def test_what_divides_a_deviation_is_not_what_it_divides() -> None:
    made, _ = told(nn.Sequential(nn.Conv2d(3, 8, 3), EvoNorm(divided=True)), 1, 3, 6, 6)
    (finding,) = made.summary.findings
    assert "the same result for x and −x" in finding.reason


def test_what_is_left_of_folded_norms_is_counted() -> None:
    """A chain as in DenseNet: one batch norm goes into a convolution, one stands between two activations."""
    net = nn.Sequential(nn.Conv2d(3, 4, 1), norm(4, 4), nn.ReLU(), norm(4, 4), nn.ReLU(), nn.Conv2d(4, 4, 1))
    made, text = told(net, 1, 3, 6, 6)
    assert made.summary.ops_after["BatchNormalization"] == 1
    assert [f.remains for f in made.summary.findings] == ["", "BatchNormalization"]
    assert "2 folded (left: 1 × BatchNormalization); norm nodes 2 → 1," in text
    assert "no linear op precedes or follows it" in text
