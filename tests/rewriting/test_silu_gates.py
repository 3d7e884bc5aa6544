"""RMS norms that are multiplied by SiLU of a gate, in half precision and in Mamba-2's order (``--fuse portable``).

tests/rewriting/test_epilogue_fusion.py has the spellings in float32, and the lookalikes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser

import normdeploy
from normdeploy.rewriting.norm_optimizer import optimize_norms
from tests.support import run_onnxruntime

ROW = 64
EPSILON = 1e-3
RMS = f"RMSNormalization<epsilon = {EPSILON}>"
WIDE_GATE = "g32 = Cast<to = 1>(g) e = Sigmoid(g32) k = Mul(g32, e)"

# spelling -> body of a float16 file with the scale s in float16 and t in float32
HALF = {
    "all in half": f"n = {RMS}(x, s) e = Sigmoid(g) k = Mul(g, e) y = Mul(n, k)",
    "the product in float32 (Qwen3-Next)": (
        f"n = {RMS}(x, s) n32 = Cast<to = 1>(n) {WIDE_GATE} p = Mul(n32, k) y = Cast<to = 10>(p)"
    ),
    "SiLU in float32, the product in half": (f"n = {RMS}(x, s) {WIDE_GATE} k16 = Cast<to = 10>(k) y = Mul(k16, n)"),
    "all in float32": f"x32 = Cast<to = 1>(x) n = {RMS}(x32, t) {WIDE_GATE} p = Mul(n, k) y = Cast<to = 10>(p)",
    "factor by factor, in float32": (
        f"n = {RMS}(x, s) n32 = Cast<to = 1>(n) g32 = Cast<to = 1>(g) e = Sigmoid(g32) k = Mul(n32, g32) p = Mul(k, e)"
        " y = Cast<to = 10>(p)"
    ),
    "two Casts of the gate": (
        f"n = {RMS}(x, s) n32 = Cast<to = 1>(n) g1 = Cast<to = 1>(g) g2 = Cast<to = 1>(g) e = Sigmoid(g1)"
        " k = Mul(g2, e) p = Mul(n32, k) y = Cast<to = 10>(p)"
    ),
}
# spelling -> body of a float16 file that must keep its norm
KEPT = {
    "the product stays in float32": (
        f"n = {RMS}(x, s) n32 = Cast<to = 1>(n) {WIDE_GATE} p = Mul(n32, k) q = Exp(p) y = Cast<to = 10>(q)"
    ),
    "SiLU of the norm's input": (
        f"x32 = Cast<to = 1>(x) n = {RMS}(x32, t) e = Sigmoid(x32) k = Mul(x32, e) p = Mul(n, k) y = Cast<to = 10>(p)"
    ),
    "a gate that was rounded to integers": (
        f"n = {RMS}(x, s) i = Cast<to = 7>(g) f = Cast<to = 10>(i) e = Sigmoid(f) k = Mul(g, e) y = Mul(n, k)"
    ),
}


def half_model(body: str, opset: int = 23) -> onnx.ModelProto:
    proto = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> net (float16[N,4,{ROW}] x, float16[N,4,{ROW}] g) =>'
        f" (float16[N,4,{ROW}] y) {{ {body} }}"
    )
    scale = np.random.default_rng(1).uniform(0.5, 2, ROW).astype(np.float16)
    used = {name for node in proto.graph.node for name in node.input}
    for name, array in (("s", scale), ("t", scale.astype(np.float32))):
        if name in used:
            proto.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def half_inputs(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {name: (3 * rng.standard_normal((n, 4, ROW))).astype(np.float16) for name in ("x", "g")}


def gated_by_formula(x: np.ndarray, gate: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """RMSNorm(x) · scale · gate · sigmoid(gate) over the last axis in float64."""
    x, gate, scale = (a.astype(np.float64) for a in (x, gate, scale))
    normal = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float64(np.float32(EPSILON))) * scale
    return normal * gate / (1 + np.exp(-gate))


@pytest.mark.parametrize("spelling", HALF)
def test_gate_in_half_precision_becomes_one_node(spelling: str) -> None:
    before = half_model(HALF[spelling])
    out, summary = optimize_norms(before, fuse="portable")
    onnx.checker.check_model(out, full_check=True)
    (node,) = out.graph.node
    assert (node.domain, node.op_type) == ("normdeploy", "GatedRMSNorm")
    # A kernel takes both in one type.
    assert (node.input[0], node.input[2]) == ("x", "g")
    (finding,) = summary.findings
    assert finding.status == "fused"
    assert finding.certificate is not None
    assert finding.certificate.method == "exact"
    assert finding.proved == ("identity", "onnxruntime run")
    scale = numpy_helper.to_array(out.graph.initializer[0])
    for n in (1, 5):
        feeds = half_inputs(n)
        (was,), (now,) = run_onnxruntime(before, feeds), run_onnxruntime(out, feeds)
        assert now.dtype == np.float16
        expected = gated_by_formula(feeds["x"], feeds["g"], scale)
        # The body computes in float32 and rounds once; float32's own roundings are 2⁻¹⁰ of that.
        assert np.all(np.abs(now - expected) <= (1 + 2**-5) * 2.0**-11 * np.abs(expected) + 2.0**-24)
        assert np.abs(now - expected).max() <= np.abs(was - expected).max() * (1 + 2**-5)


def test_sigmoid_gate_in_half_precision_becomes_one_node() -> None:
    """The gate of Kimi Linear, with the product in float32."""
    body = (
        f"n = {RMS}(x, s) n32 = Cast<to = 1>(n) g32 = Cast<to = 1>(g) e = Sigmoid(g32) p = Mul(n32, e)"
        " y = Cast<to = 10>(p)"
    )
    before = half_model(body)
    out, summary = optimize_norms(before, fuse="portable")
    assert [(n.op_type, n.input[0], n.input[2]) for n in out.graph.node] == [("SigmoidGatedRMSNorm", "x", "g")]
    assert summary.findings[0].certificate is not None
    scale = numpy_helper.to_array(out.graph.initializer[0])
    feeds = half_inputs(5)
    (now,) = run_onnxruntime(out, feeds)
    gate = feeds["g"].astype(np.float64)
    expected = gated_by_formula(feeds["x"], feeds["g"], scale) / gate
    # The body computes in float32 and rounds once; float32's own roundings are 2⁻¹⁰ of that.
    assert np.all(np.abs(now - expected) <= (1 + 2**-5) * 2.0**-11 * np.abs(expected) + 2.0**-24)


@pytest.mark.parametrize("spelling", KEPT)
def test_other_product_in_half_precision_stays(spelling: str) -> None:
    before = half_model(KEPT[spelling])
    out, _ = optimize_norms(before, fuse="portable")
    assert "GatedRMSNorm" not in [n.op_type for n in out.graph.node]
    feeds = half_inputs(3)
    assert np.array_equal(run_onnxruntime(out, feeds)[0], run_onnxruntime(before, feeds)[0])


def test_swish_is_a_gate() -> None:
    out, _ = optimize_norms(half_model(f"n = {RMS}(x, s) k = Swish(g) y = Mul(n, k)", 24), fuse="portable")
    assert [n.op_type for n in out.graph.node] == ["GatedRMSNorm"]
    other = half_model(f"n = {RMS}(x, s) k = Swish<alpha = 2.0>(g) y = Mul(n, k)", 24)
    out, _ = optimize_norms(other, fuse="portable")
    assert "GatedRMSNorm" not in [n.op_type for n in out.graph.node]


class GatedNorm(torch.nn.Module):
    """The gated RMS norm of Qwen3-Next, or with ``gate_first`` that of Mamba-2, as transformers computes it."""

    def __init__(self, *, gate_first: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 2, ROW))
        self.gate_first = gate_first

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        silu = torch.nn.functional.silu(gate.to(torch.float32))
        if self.gate_first:
            hidden = hidden * silu
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + EPSILON)
        hidden = self.weight * hidden.to(dtype)
        if not self.gate_first:
            hidden = hidden * silu
        return hidden.to(dtype)


@pytest.mark.parametrize("gate_first", [False, True])
def test_orders_of_models(gate_first: bool, tmp_path: Path) -> None:
    """Norm before gate is one node; gate before norm stays the product and its norm."""
    model = GatedNorm(gate_first=gate_first).eval()
    rng = np.random.default_rng(3)
    x, gate = (rng.standard_normal((2, 3, ROW)).astype(np.float32) for _ in range(2))
    file = tmp_path / "gated.onnx"
    example = (torch.from_numpy(x), torch.from_numpy(gate))
    result = normdeploy.export(model, example, output=file, fuse="portable")
    (finding,) = result.summary.findings
    assert finding.status == "fused"
    named = ("the gate 'gate' comes before the norm, so its SiLU and product stay",)
    assert finding.notes == (named if gate_first else ())
    proto = onnx.load(file)
    ops = [n.op_type for n in proto.graph.node]
    assert ops == (["Sigmoid", "Mul", "Mul", "RMSNorm"] if gate_first else ["GatedRMSNorm"])
    weight = model.weight.detach().numpy()
    if gate_first:
        gated = x.astype(np.float64) * gate / (1 + np.exp(-gate.astype(np.float64)))
        expected = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + EPSILON) * weight
    else:
        expected = gated_by_formula(x, gate, weight)
    feeds = dict(zip([i.name for i in proto.graph.input], (x, gate), strict=True))
    # Eight roundings of float32, at most.
    np.testing.assert_allclose(run_onnxruntime(proto, feeds)[0], expected, rtol=8 * 2.0**-24, atol=2.0**-24)


def test_gate_of_a_norm_that_is_read_elsewhere_stays() -> None:
    """The norm would be computed twice."""
    body = f"n = {RMS}(x, s) e = Sigmoid(g) k = Mul(g, e) y0 = Mul(n, k) z = Relu(n) y = Add(y0, z)"
    out, _ = optimize_norms(half_model(body), fuse="portable")
    assert sorted(n.op_type for n in out.graph.node) == ["Add", "Mul", "Mul", "RMSNormalization", "Relu", "Sigmoid"]
