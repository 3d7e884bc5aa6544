"""Norms like an RMS norm that no standard op computes: epsilon outside the root, a clamped root, a kept mean."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import normdeploy
from tests.norms.norm_formulas import norm_by_formula
from tests.support import run_onnxruntime

Axes = tuple[int, ...]


class Divided(nn.Module):
    """x / divisor(x, axes) · weight."""

    def __init__(self, divisor: Callable[[Tensor, Axes], Tensor], axes: Axes, *weight: int) -> None:
        super().__init__()
        self.divisor = divisor
        self.axes = axes
        self.weight = nn.Parameter(torch.rand(*weight) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x / self.divisor(x, self.axes) * self.weight


def root_plus_epsilon(x: Tensor, axes: Axes) -> Tensor:
    return x.pow(2).mean(axes, keepdim=True).sqrt() + 1e-3


def length_plus_epsilon(x: Tensor, axes: Axes) -> Tensor:
    """The spelling of the first RMSNorm: ‖x‖/√n + ε."""
    return x.norm(2, axes, keepdim=True) * 7**-0.5 + 1e-3


def clamped_root(x: Tensor, axes: Axes) -> Tensor:
    return x.pow(2).mean(axes, keepdim=True).sqrt().clamp(min=1e-3)


def deviation(x: Tensor, axes: Axes) -> Tensor:
    return torch.sqrt(torch.var(x, axes, keepdim=True) + 1e-3)


def biased_deviation(x: Tensor, axes: Axes) -> Tensor:
    return torch.sqrt(torch.var(x, axes, keepdim=True, correction=0) + 1e-3)


LAST = (-1,)
CASES = {
    "epsilon outside": (root_plus_epsilon, LAST, (7,), "x[b,s,7]", "OuterRMSNorm", 0),
    "epsilon outside, by the length": (length_plus_epsilon, LAST, (7,), "x[b,s,7]", "OuterRMSNorm", 0),
    "epsilon outside over channels": (root_plus_epsilon, (1,), (5, 1), "x[b,5,w]", "OuterRMSNorm", 0),
    "epsilon outside over a dynamic size": (root_plus_epsilon, LAST, (1,), "x[b,s,n]", "OuterRMSNorm", 0),
    "clamped": (clamped_root, LAST, (7,), "x[b,s,7]", "ClampedRMSNorm", 0),
    "clamped over two axes": (clamped_root, (-2, -1), (1,), "x[b,5,7]", "ClampedRMSNorm", 0),
    "clamped over a dynamic size": (clamped_root, LAST, (1,), "x[b,s,n]", "ClampedRMSNorm", 0),
    "timm's SimpleNorm": (deviation, LAST, (7,), "x[b,s,7]", "SimpleNorm", 1),
    "timm's SimpleNorm2d": (deviation, (1,), (5, 1), "x[b,5,w]", "SimpleNorm", 1),
    "biased SimpleNorm": (biased_deviation, LAST, (7,), "x[b,s,7]", "SimpleNorm", 0),
    "SimpleNorm over a dynamic size": (deviation, LAST, (1,), "x[b,s,n]", "SimpleNorm", 1),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_one_node_with_the_numbers_of_its_formula(name: str) -> None:
    divisor, axes, weight, spec, op, ddof = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(3, 5, 7)
    net = Divided(divisor, axes, *weight).eval()
    result = normdeploy.export(net, (x,), inputs=[spec], fuse="portable")
    (finding,) = result.summary.findings
    assert finding.status == "fused"
    assert finding.certificate is not None
    assert finding.certificate.method == "exact"
    (node,) = [n for n in result.proto.graph.node if n.domain == "normdeploy"]
    assert node.op_type == op
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert given["epsilon"] == np.float32(1e-3)
    assert given.get("ddof", 0) == ddof
    for scaled in (x, 1e-3 * x, 1e3 * x + 1e3, 1e-9 * x):
        expected = norm_by_formula(op, scaled.numpy(), net.weight.detach().numpy(), axes=axes, epsilon=1e-3, ddof=ddof)
        # A few roundings of the largest element, as far as a variance keeps them: offset²/variance is 1.
        np.testing.assert_allclose(
            run_onnxruntime(result.proto, {"x": scaled.numpy()})[0], expected, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("epsilon", [1e-8, 1e-13, 1e-20])
def test_an_epsilon_outside_the_root_is_found_at_any_size(epsilon: float) -> None:
    """At usual inputs float64 loses such an epsilon beside the root; the search has to go to smaller inputs."""

    def divisor(x: Tensor, axes: Axes) -> Tensor:
        return x.pow(2).mean(axes, keepdim=True).sqrt() + epsilon

    net = Divided(divisor, LAST, 7).eval()
    result = normdeploy.export(net, (torch.randn(2, 7),), inputs=["x[b,7]"], fuse="portable")
    (node,) = [n for n in result.proto.graph.node if n.domain == "normdeploy"]
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert node.op_type == "OuterRMSNorm"
    assert given["epsilon"] == np.float32(epsilon)


@pytest.mark.parametrize(
    ("divisor", "reason"),
    [
        (root_plus_epsilon, "outside the root; no standard op does this; --fuse portable writes it as"),
        (clamped_root, "clamped from below instead of having epsilon added; --fuse portable writes it as"),
        (deviation, "its numerator keeps the mean that its variance subtracts"),
    ],
)
def test_without_the_option_it_stays_and_the_option_is_named(divisor: Callable[..., Tensor], reason: str) -> None:
    net = Divided(divisor, LAST, 7).eval()
    (finding,) = normdeploy.export(net, (torch.randn(2, 7),), inputs=["x[b,7]"]).summary.findings
    assert finding.status == "refused"
    assert reason in finding.reason
    assert "--fuse portable" in finding.reason


def test_the_deviation_of_other_axes_is_no_simple_norm() -> None:
    class OtherAxes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            centered = x - x.mean(1, keepdim=True)
            return x / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-3)

    result = normdeploy.export(OtherAxes().eval(), (torch.randn(2, 5, 7),), inputs=["x[2,5,7]"], fuse="portable")
    assert [f.status for f in result.summary.findings] == ["refused"]
    assert not any(n.domain for n in result.proto.graph.node)
