"""F.normalize and the RMS norms made of it, as one op of this project's own on request."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normdeploy
from tests.support import run_onnxruntime


class Wan(nn.Module):
    """The norm of Wan's video VAE: over the channels, scaled by their number's root and by gamma."""

    def __init__(self, channels: int, spatial: int) -> None:
        super().__init__()
        self.scale, self.gamma = channels**0.5, nn.Parameter(torch.rand(channels, *[1] * spatial) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * self.scale * self.gamma


class Normalized(nn.Module):
    def __init__(self, dims: tuple[int, ...] | int = -1, eps: float = 1e-12, shift: float = 0.0) -> None:
        super().__init__()
        self.dims, self.eps, self.shift = dims, eps, shift

    def forward(self, x: Tensor) -> Tensor:
        y = F.normalize(x, dim=self.dims, eps=self.eps)  # type: ignore[arg-type]  # its stub knows one dim only
        return y * 2 + self.shift if self.shift else y


CASES = {
    "Wan": (Wan(8, 2), (2, 8, 5, 5), "x[b,8,h,w]", [-3]),
    "Wan in 3-D": (Wan(8, 3), (2, 8, 3, 4, 4), "x[2,8,t,4,4]", [-4]),
    "normalize, dynamic": (Normalized(), (3, 7), "x[b,n]", [-1]),
    "two dims": (Normalized((-2, -1), 1e-3, 1.0), (3, 7, 6), "x[3,7,n]", [-2, -1]),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_one_node_with_a_body(name: str) -> None:
    net, shape, spec, axes = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    result = normdeploy.export(net.eval(), (x,), inputs=[spec], fuse="portable")
    (finding,) = result.summary.findings
    assert (finding.status, finding.kind) == ("fused", "RMSNorm")
    assert finding.certificate is not None
    assert finding.certificate.method == "exact"
    (node,) = [n for n in result.proto.graph.node if n.domain == "normdeploy"]
    assert node.op_type == "L2Norm"
    assert [list(a.ints) for a in node.attribute if a.name == "axes"] == [axes]
    assert len(result.proto.graph.node) <= 2
    for scaled in (x, 1e-4 * x, 1e-13 * x, 0 * x):
        with torch.no_grad():
            expected = net(scaled).numpy()
        np.testing.assert_allclose(
            run_onnxruntime(result.proto, {"x": scaled.numpy()})[0], expected, rtol=1e-5, atol=1e-6
        )
    assert not any(
        n.domain == "normdeploy" for n in normdeploy.optimize(result.proto).proto.graph.node
    )  # written out again


def test_without_the_option_it_is_left_alone_and_the_option_named() -> None:
    (finding,) = normdeploy.export(Wan(8, 2).eval(), (torch.randn(2, 8, 5, 5),), inputs=["x[b,8,h,w]"]).summary.findings
    assert finding.status == "refused"
    assert (
        finding.reason
        == "its denominator is clamped from below instead of having epsilon added; --fuse portable writes it as"
        " normdeploy.L2Norm"
    )


def test_a_clamp_that_no_attribute_holds_is_refused() -> None:
    """1e-12 in float64 is no float32 number: a refusal with its reason, no failed proof."""
    text = (
        "net (double[N, 7] x) => (double[N, 7] y) <double low = {1e-12}> { n = ReduceL2 <axes = [-1]> (x) c = Clip(n,"
        " low) y = Div(x, c) }"
    )
    result = normdeploy.optimize(
        onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}'), fuse="portable", strict=True
    )
    (finding,) = result.summary.findings
    assert finding.status == "refused"
    assert "can't be stored: ONNX attributes are float32" in finding.reason


def test_a_large_number_that_swallows_the_variance_is_no_clamp() -> None:
    """Found by `benchmarks.attack` (poles): √((V + c)²) − c in the place of V; in float64 no row says anything of its
    denominator."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13]> net (float[2,N,12] x) => (float[2,N,12] y)
        <float two = {2}, float c = {137751.25}, float eps = {1e-5},
         float[12] g = {1,2,3,4,5,6,1,2,3,4,5,6}, float[12] o = {6,5,4,3,2,1,1,2,3,4,5,6}>
        {
            u = ReduceMean<axes=[-1]>(x) d = Sub(x, u) q = Pow(d, two) v = ReduceMean<axes=[-1]>(q) a = Add(v, c)
            b = Mul(a, a) r = Sqrt(b)
            w = Sub(r, c) e = Add(w, eps) s = Sqrt(e) i = Reciprocal(s) k = Mul(i, g) m = Mul(u, k) z = Sub(o, m)
            n = Mul(x, k)
            y = Add(n, z)
        }"""
    )
    result = normdeploy.optimize(proto, simplify=False)
    assert {f.status for f in result.summary.findings} <= {"refused", "undone"}
    assert [n.op_type for n in result.proto.graph.node] == [n.op_type for n in proto.graph.node]
