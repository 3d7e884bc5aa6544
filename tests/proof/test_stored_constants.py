"""What is stored is what is proved: mistakes that are planted between the proof's expressions and the bytes of the
file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from normdeploy.errors import ExportError
from normdeploy.findings.records import Finding
from normdeploy.forms import layer_norm
from normdeploy.forms.constant_linear import ConstantLinear
from normdeploy.graphs.graph import Graph
from normdeploy.proof.proof_errors import ProofFailure
from normdeploy.rewriting.norm_optimizer import optimize_norms

from .support import proved, refused

HEAD = '<ir_version: 10, opset_import: ["" : 21]>'
UNBIASED = (
    "u{i} = ReduceMean(t{i}, last) d{i} = Sub(t{i}, u{i}) q{i} = Mul(d{i}, d{i}) s{i} = ReduceSum(q{i}, last) v{i} ="
    " Div(s{i}, less)"
)
NORM = UNBIASED + " e{i} = Add(v{i}, eps) r{i} = Sqrt(e{i}) n{i} = Div(d{i}, r{i}) t{j} = Mul(n{i}, gamma{i})"


def norms(count: int) -> onnx.ModelProto:
    """Unbiased layer norms by hand, one behind the other: gamma and epsilon have to be computed."""
    body = " ".join(NORM.format(i=i, j=i + 1) for i in range(count))
    model = onnx.parser.parse_model(f"{HEAD} g (float[B, 16] t0) => (float[B, 16] t{count}) {{ {body} }}")
    rng = np.random.default_rng(5)
    held = {"last": np.array([-1]), "less": np.float32(15), "eps": np.float32(1e-5)}
    held |= {f"gamma{i}": rng.uniform(0.5, 1.5, 16).astype(np.float32) for i in range(count)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in held.items())
    return model


def convolution(channels: int = 6, spread: float = 0.0) -> onnx.ModelProto:
    """A convolution and a BatchNormalization, whose scales are spread over ``spread`` powers of ten."""
    text = (
        f"{HEAD} g (float[N, 3, H, W] x) => (float[N, {channels}, P, Q] y) {{ h = Conv(x, w) y = BatchNormalization(h,"
        " s, b, m, v) }"
    )
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(6)
    held = {"w": rng.standard_normal((channels, 3, 3, 3)), "s": np.logspace(-spread / 2, spread / 2, channels)}
    held |= {
        "b": rng.standard_normal(channels),
        "m": rng.standard_normal(channels),
        "v": rng.uniform(0.5, 1.5, channels),
    }
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v.astype(np.float32), k) for k, v in held.items())
    return model


def only(model: onnx.ModelProto) -> Finding:
    (finding,) = optimize_norms(model)[1].findings
    return finding


def reads(model: onnx.ModelProto, op: str) -> list[str]:
    """The initializers that nodes of an op read."""
    held = {t.name for t in model.graph.initializer}
    return [i for n in model.graph.node if n.op_type == op for i in n.input if i in held]


def test_both_are_rewritten_when_nothing_is_planted() -> None:
    found = only(norms(1))
    assert (found.status, found.certificate and found.certificate.method) == ("fused", "exact")
    assert reads(optimize_norms(norms(1))[0], "Mul") == []
    found = only(convolution(spread=10))
    assert (found.status, found.certificate and found.certificate.method) == ("folded", "exact")


def test_an_array_stored_in_another_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Graph.add_constant

    def permuted(self: Graph, name: str, exact: np.ndarray, dtype: Any) -> Any:
        made = real(self, name, exact, dtype)
        if made.values.size > 4:
            made.values = made.values[..., ::-1].copy()
        return made

    monkeypatch.setattr(Graph, "add_constant", permuted)
    found = only(convolution())
    assert found.status == "undone"
    assert "half an ulp" in found.reason
    assert reads(optimize_norms(norms(1))[0], "Mul") == ["gamma0"]  # the norm alone is one node, which holds no gamma


def test_an_element_one_ulp_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Graph.add_constant

    def off(self: Graph, name: str, exact: np.ndarray, dtype: Any) -> Any:
        made = real(self, name, exact, dtype)
        if made.values.size > 4:
            made.values = made.values.copy()
            made.values.flat[1] = np.nextafter(made.values.flat[1], np.float32(9))
        return made

    monkeypatch.setattr(Graph, "add_constant", off)
    assert only(convolution()).status == "undone"
    assert reads(optimize_norms(norms(1))[0], "Mul") == ["gamma0"]


PLANTED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "one weight off by 1e-5": lambda w: np.where(np.arange(w.size).reshape(w.shape) == 7, w * (1 + 1e-5), w),
    "the smallest channel is zero": lambda w: w * (np.arange(len(w)) > 0).reshape(-1, *[1] * (w.ndim - 1)),
    "two channels swapped": lambda w: w[[1, 0, *range(2, len(w))]],
    "negative": lambda w: -w,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_folded_weight_that_is_wrong_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ConstantLinear.scale_output

    def scale_wrongly(self: ConstantLinear, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weight, bias = real(self, a, b)
        return PLANTED[name](weight.compute()), bias

    monkeypatch.setattr(ConstantLinear, "scale_output", scale_wrongly)
    found = only(convolution(spread=10))
    assert found.status == "undone"
    assert found.certificate is not None
    assert found.certificate.why == ProofFailure.STORED.name


def test_the_ninth_norm_of_a_kind_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = layer_norm.write_layer_norm, []

    def wrong(graph: Graph, norm: Any, runtime: str) -> Any:
        made = real(graph, norm, runtime)
        calls.append(norm)
        if norm.y.name == "t9":
            constant = made.nodes[-1].inputs[1]
            graph.exact.store_exact(constant, graph.value(constant) * (1 + 1e-6 * (np.arange(16) == 3)))
            constant.values = graph.value(constant).astype(np.float32)
        return made

    monkeypatch.setattr("normdeploy.forms.FORMS", (wrong,))
    assert reads(optimize_norms(norms(9))[0], "Mul") == ["gamma8"]  # it was taken in by all but the ninth


def test_what_is_changed_after_the_proof_is_found_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Graph.replace

    def tampered(self: Graph, old: Any, nodes: Any, *args: Any, **kwargs: Any) -> None:
        for node in nodes:
            if "epsilon" in node.attrs:
                node.attrs["epsilon"] *= 2
        real(self, old, nodes, *args, **kwargs)

    monkeypatch.setattr(Graph, "replace", tampered)
    with pytest.raises(ExportError, match="'t1"):
        optimize_norms(norms(1))


WRONG_CONVOLUTIONS = {
    "above height 5": "low = Slice(x, zeros, five, two) after = Conv <pads = [1, 1, 1, 1]> (low, w)",
    "without pads": "after = Conv(x, w)",
    "with another stride": "after = Conv <pads = [1, 1, 1, 1], strides = [1, 2]> (x, w)",
    "with another dilation": "after = Conv <pads = [2, 2, 2, 2], dilations = [2, 2]> (x, w)",
    "in groups": "a = Reshape(x, whole) after = Conv <pads = [1, 1, 1, 1], group = 3> (a, few)",
    "clipped": "a = Conv <pads = [1, 1, 1, 1]> (x, w) after = Clip(a, lowest, highest)",
}


@pytest.mark.parametrize("name", WRONG_CONVOLUTIONS)
def test_another_convolution_is_refused(name: str) -> None:
    rng = np.random.default_rng(8)
    constants = {
        "w": rng.standard_normal((6, 3, 3, 3)),
        "few": rng.standard_normal((6, 1, 3, 3)),
        "whole": np.array([0, 0, 0, 0]),
    }
    constants |= {
        "zeros": np.array([0]),
        "five": np.array([5]),
        "two": np.array([2]),
        "lowest": np.array(-5e4),
        "highest": np.array(5e4),
    }
    body = f"before = Conv <pads = [1, 1, 1, 1]> (x, w) {WRONG_CONVOLUTIONS[name]}"
    refused(
        body,
        ProofFailure.OP,
        ProofFailure.SIZE,
        ProofFailure.DIFFERS,
        ProofFailure.LAYOUT,
        shape="N, 3, H, W",
        **constants,
    )


BESIDE = float(np.float32(0.3)) / float(np.float32(0.77)) ** 0.5


@pytest.mark.parametrize(("epsilon", "right"), [(BESIDE, True), (BESIDE * (1 + 2.0**-23), False), (0.3, False)])
def test_an_epsilon_beside_the_root_is_half_an_ulp_from_the_exact_one(epsilon: float, right: bool) -> None:
    """d/(√(f·v) + e) is StdNorm with gamma/√f and e/√f, which no float32 is."""
    gamma = np.linspace(0.5, 1.5, 16)
    node = f"after = normdeploy.StdNorm <axes = [-1], epsilon = {epsilon!r}, ddof = 0, stash_type = 1> (x, wide, beta)"
    body = f"""u = ReduceMean(x, last) d = Sub(x, u) q = Mul(d, d) v = ReduceMean(q, last) fv = Mul(v, f) r = Sqrt(fv)
        s = Add(r, eps) n = Div(d, s) g = Mul(n, gamma) before = Add(g, beta) {node}"""
    held = {"gamma": gamma, "eps": 0.3, "f": 0.77, "wide": gamma.astype(np.float32) / np.sqrt(float(np.float32(0.77)))}
    if right:
        assert proved(body, **held).epsilons
    else:
        refused(body, ProofFailure.STORED, **held)


FACTORED = float(np.float32(0.3)) / float(np.float32(0.77))


@pytest.mark.parametrize("inverse", ["a = Reciprocal(e) r = Sqrt(a)", "a = Sqrt(e) r = Reciprocal(a)"])
@pytest.mark.parametrize(("epsilon", "right"), [(FACTORED, True), (FACTORED * (1 + 2.0**-23), False), (0.3, False)])
def test_an_epsilon_of_a_scaled_variance_is_half_an_ulp_from_the_exact_one(
    inverse: str, epsilon: float, right: bool
) -> None:
    """d·√(1/(f·v + e)) is the norm with gamma/√f and e/f, which no float32 is."""
    gamma = np.linspace(0.5, 1.5, 16)
    body = f"""u = ReduceMean(x, last) d = Sub(x, u) q = Mul(d, d) v = ReduceMean(q, last) fv = Mul(v, f) e = Add(fv,
    eps) {inverse}
        n = Mul(d, r) g = Mul(n, gamma) before = Add(g, beta)
        after = LayerNormalization <axis = -1, epsilon = {epsilon!r}> (x, wide, beta)"""
    held = {"gamma": gamma, "eps": 0.3, "f": 0.77, "wide": gamma.astype(np.float32) / np.sqrt(float(np.float32(0.77)))}
    if right:
        assert proved(body, **held).epsilons
    else:
        refused(body, ProofFailure.STORED, **held)


def test_many_roots_are_looked_at_in_a_larger_field() -> None:
    """Seven axes beside that of the channels, of which two points each are looked at: each place has a root of its
    own."""
    body = """u = ReduceMean(x, one) d = Sub(x, u) q = Mul(d, d) v = ReduceMean(q, one) e = Add(v, eps) r = Sqrt(e)
    before = Div(d, r)
        t = Transpose <perm = [0, 2, 3, 4, 5, 6, 7, 1]> (x) n = LayerNormalization <axis = -1, epsilon = 1e-5> (t, wide)
        after = Transpose <perm = [0, 7, 1, 2, 3, 4, 5, 6]> (n)"""
    found = proved(body, shape="3, 4, 5, 5, 6, 6, 7, 7", one=np.array([1]), eps=1e-5, wide=np.ones(4))
    assert found.roots > 100
    assert found.security_bits >= 80
