"""Activations spelled out become their standard nodes, judged by torch's own in float64; whatever is another function
stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch.nn import functional

from normdeploy.findings.norm_tables import show_norms
from normdeploy.graphs.graph import Graph
from normdeploy.proof.pointwise_forms import pointwise_form
from normdeploy.rewriting import activation_fusion
from normdeploy.rewriting.norm_optimizer import optimize_norms

from ..support import run_onnxruntime

ROOT, K = float(np.float32(math.sqrt(2))), float(np.float32(math.sqrt(2 / math.pi)))
CONSTANTS = {
    "root": ROOT,
    "k": K,
    "cubic": 0.044715,
    "half": 0.5,
    "one": 1.0,
    "two": 2.0,
    "three": 3.0,
    "six": 6.0,
    "zero": 0.0,
    "minus": -1.0,
}
# up to where 6·x does not overflow yet
FAR = np.array(
    [0, 0.5, -0.5, 3, -3, 9, -9, 50, -50, 89, -89, 800, -800, 1e13, -1e13, 3e37, -3e37, np.inf, -np.inf, np.nan],
    np.float32,
)

GELU = "d = Div(x, root) e = Erf(d) a = Add(e, one) m = Mul(x, a) y = Mul(m, half)"
NEW_GELU = (
    "p = Pow(x, three) q = Mul(p, cubic) s = Add(x, q) t = Mul(s, k) u = Tanh(t) v = Add(u, one) w = Mul(x, half) y ="
    " Mul(w, v)"
)
HARD_SWISH = "a = Add(x, three) b = Clip(a, zero, six) d = Div(b, six) y = Mul(x, d)"
SILU = "n = Neg(x) e = Exp(n) a = Add(e, one) y = Div(x, a)"
SIGMOID = "n = Neg(x) e = Exp(n) a = Add(e, one) y = Div(one, a)"


def graph(body: str, opset: int = 20, dtype: str = "float", **numbers: float) -> onnx.ModelProto:
    held = "".join(f"{dtype} {name} = {{{number!r}}}, " for name, number in {**CONSTANTS, **numbers}.items())
    text = (
        f'<ir_version: 10, opset_import: ["": {opset}]> g ({dtype}[n, m] x) => ({dtype}[n, m] y) <{held[:-2]}> {{'
        f" {body} }}"
    )
    return onnx.parser.parse_model(text)


def ops(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


def gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


SPELLED: list[tuple[str, list[str], Callable[[torch.Tensor], torch.Tensor]]] = [
    (GELU, ["Gelu"], functional.gelu),
    ("h = Mul(x, half) d = Div(x, root) e = Erf(d) z = Mul(h, e) y = Add(z, h)", ["Gelu"], functional.gelu),
    ("d = Mul(x, sqrt) e = Erf(d) a = Add(one, e) h = Div(a, two) y = Mul(h, x)", ["Gelu"], functional.gelu),
    (NEW_GELU, ["Gelu"], gelu),
    (
        "r = Mul(x, x) q = Mul(r, cubic) o = Add(q, one) s = Mul(o, x) t = Mul(s, k) u = Tanh(t) "
        "v = Add(u, one) w = Mul(v, half) "
        "y = Mul(x, w)",
        ["Gelu"],
        gelu,
    ),
    (
        "p = Pow(x, three) q = Mul(p, cubic) s = Add(x, q) t = Mul(s, k) d = Mul(t, two) u = Sigmoid(d) y = Mul(x, u)",
        ["Gelu"],
        gelu,
    ),
    (HARD_SWISH, ["HardSwish"], functional.hardswish),
    (
        "a = Add(x, three) z = Relu(a) b = Min(z, six) m = Mul(x, b) y = Div(m, six)",
        ["HardSwish"],
        functional.hardswish,
    ),
    ("a = Add(x, three) b = Clip(a, zero, six) y = Div(b, six)", ["HardSigmoid"], functional.hardsigmoid),
    (SILU, ["Sigmoid", "Mul"], functional.silu),
    (
        "n = Mul(x, minus) e = Exp(n) a = Add(one, e) r = Reciprocal(a) y = Mul(r, x)",
        ["Sigmoid", "Mul"],
        functional.silu,
    ),
    (
        "n = Mul(x, slope) e = Exp(n) a = Add(e, one) r = Reciprocal(a) y = Mul(r, x)",
        ["Mul", "Sigmoid", "Mul"],
        lambda x: x * torch.sigmoid(float(np.float32(1.702)) * x),
    ),
    ("d = Add(x, x) n = Neg(d) e = Exp(n) a = Add(e, one) r = Div(two, a) y = Sub(r, one)", ["Tanh"], torch.tanh),
    ("b = Abs(x) a = Add(b, one) y = Div(x, a)", ["Softsign"], functional.softsign),
]


@pytest.mark.parametrize(("body", "expected", "torchs"), SPELLED)
def test_a_spelled_activation_becomes_its_node(
    body: str, expected: list[str], torchs: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    before = graph(body, sqrt=math.sqrt(0.5), slope=-1.702)
    after, _ = optimize_norms(before)
    assert ops(after) == expected
    x = np.linspace(-12, 12, 999, dtype=np.float32).reshape(3, -1)
    exact = torchs(torch.from_numpy(x).double()).numpy()
    error = np.abs(run_onnxruntime(after, {"x": x})[0] - exact).max()
    by_hand = np.abs(run_onnxruntime(before, {"x": x})[0] - exact).max()
    assert (
        error <= 2 * by_hand + 4 * 2.0**-24 * np.abs(exact).max()
    )  # twice that of what it replaces, as of norms; four units for luck


@pytest.mark.parametrize(("body", "expected", "torchs"), SPELLED)
def test_nan_and_inf_come_out_where_they_did(
    body: str, expected: list[str], torchs: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    before = graph(body, sqrt=math.sqrt(0.5), slope=-1.702)
    old, new = (run_onnxruntime(proto, {"x": FAR[None]})[0] for proto in (before, optimize_norms(before)[0]))
    for kind in (np.isnan, np.isposinf, np.isneginf):
        assert (kind(old) == kind(new)).all()


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        (GELU, {"root": 1.41}),
        (GELU, {"root": 1.4142}),  # four digits are another function, by 1e-5
        (GELU, {"half": 0.4999999}),
        (GELU, {"one": 1.0000001}),
        (NEW_GELU, {"k": 0.79788}),
        (NEW_GELU, {"cubic": 0.0447}),
        (NEW_GELU, {"three": 2.0}),
        (SIGMOID, {}),  # onnxruntime's Sigmoid is 0 below −18, and this has a logarithm
        (SILU, {"one": 2.0}),
        (SILU.replace("Neg(x)", "Mul(x, x)"), {}),
        ("e = Exp(x) a = Add(e, one) m = Mul(x, e) y = Div(m, a)", {}),  # NaN where e^x overflows, Sigmoid 1
        ("a = Exp(x) n = Neg(x) b = Exp(n) s = Sub(a, b) t = Add(a, b) y = Div(s, t)", {}),  # the same, of Tanh
        ("e = Exp(x) a = Sub(e, one) y = Div(one, a)", {}),
        ("b = Abs(x) a = Sub(b, one) y = Div(x, a)", {}),
        ("b = Abs(x) a = Add(b, x) y = Mul(a, half)", {}),  # Inf − Inf, where Relu gives 0
        ("e = Exp(x) a = Add(e, one) l = Log(a) y = Identity(l)", {}),
        ("q = Mul(x, two) s = Sigmoid(q) y = Mul(x, s)", {}),
        ("d = Div(x, root) e = Erf(d) a = Add(e, one) y = Mul(a, half)", {}),  # the normal distribution function
    ],
)
def test_other_functions_stay(body: str, numbers: dict[str, float]) -> None:
    before = graph(body, **numbers)
    after, _ = optimize_norms(before)
    left = ops(after)
    assert not {"Gelu", "HardSwish", "HardSigmoid", "Softsign", "Relu"} & set(left)
    assert len([op for op in left if op in ("Sigmoid", "Tanh")]) == len(
        [op for op in ops(before) if op in ("Sigmoid", "Tanh")]
    )


def test_a_file_without_the_op_keeps_the_spelling() -> None:
    assert ops(optimize_norms(graph(NEW_GELU, opset=19))[0]) == ops(graph(NEW_GELU, opset=19))
    assert ops(optimize_norms(graph(HARD_SWISH, opset=13))[0]) == ["HardSigmoid", "Mul"]  # which opset 6 has


@pytest.mark.parametrize(
    ("dtype", "number"), [(np.float16, onnx.TensorProto.FLOAT16), (np.float64, onnx.TensorProto.DOUBLE)]
)
def test_other_types_stay(dtype: type, number: int) -> None:
    before = graph(GELU)
    for t in before.graph.initializer:
        t.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(t).astype(dtype), t.name))
    for v in (*before.graph.input, *before.graph.output):
        v.type.tensor_type.elem_type = number
    assert ops(optimize_norms(before)[0]) == ops(graph(GELU))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (HARD_SWISH, ["HardSigmoid", "Mul"]),  # of other numbers than HardSwish has
        (HARD_SWISH.replace("Mul(x, d)", "Mul(a, d)"), ["Add", "HardSigmoid", "Mul"]),
    ],
)
def test_what_a_node_says_of_a_part_is_written(body: str, expected: list[str]) -> None:
    before = graph(body, three=3.25)
    after, _ = optimize_norms(before)
    assert ops(after) == expected
    x = np.linspace(-9, 9, 200, dtype=np.float32)[None]
    np.testing.assert_allclose(
        run_onnxruntime(after, {"x": x})[0], run_onnxruntime(before, {"x": x})[0], atol=4 * 2.0**-24 * 9
    )


def test_what_others_read_stays() -> None:
    before = graph(GELU)
    before.graph.output.append(onnx.helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, ["n", "m"]))
    assert ops(optimize_norms(before)[0]) == ops(before)
    before = graph(f"{GELU.replace('y =', 'g =')} z = Mul(e, g) y = Add(z, g)")
    assert "Erf" in ops(optimize_norms(before)[0])


def test_numbers_for_each_channel_stay() -> None:
    before = graph(GELU)
    half = next(t for t in before.graph.initializer if t.name == "half")
    half.CopyFrom(onnx.numpy_helper.from_array(np.full(4, 0.5, np.float32), "half"))
    before.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 4
    assert "Gelu" not in ops(optimize_norms(before)[0])


def test_a_number_of_higher_rank_stays() -> None:
    """It would give the result another rank."""
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[n] x) => (float[1, n] y) <float[1, 1] one = {1}, float
    root = {1.4142135},
        float half = {0.5}> { d = Div(x, root) e = Erf(d) a = Add(e, one) m = Mul(x, a) y = Mul(m, half) }"""
    assert "Erf" in ops(optimize_norms(onnx.parser.parse_model(text))[0])


def test_gelus_of_a_model_by_hand() -> None:
    """One form behind the other, as blocks have them, each with its own residual."""
    first = NEW_GELU.replace("y =", "g =")
    second = " ".join(
        f"{part.split(' =')[0]}2 ={part.split(' =')[1]}"
        for part in HARD_SWISH.replace("y =", "h =").split(") ")
        if part
    )
    assert second.startswith("a2 =")
    before = graph(
        f"{first} r = Add(x, g) a2 = Add(r, three) b2 = Clip(a2, zero, six) d2 = Div(b2, six) h = Mul(r, d2) y ="
        " Add(h, r)"
    )
    assert ops(optimize_norms(before)[0]) == ["Gelu", "Add", "HardSwish", "Add"]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([body for body, _, _ in SPELLED]), st.sampled_from(sorted(CONSTANTS)), st.floats(-4, 4, width=32)
)
def test_whatever_is_rewritten_is_the_same_function(body: str, name: str, number: float) -> None:
    """With any number in the place of one of the constants."""
    before = graph(body, **{"sqrt": math.sqrt(0.5), "slope": -1.702, name: number})
    after, _ = optimize_norms(before)
    if ops(after) == ops(before):
        return
    x = np.concatenate([np.linspace(-12, 12, 500, dtype=np.float32), FAR])[None]
    with np.errstate(all="ignore"):
        old, new = run_onnxruntime(before, {"x": x})[0], run_onnxruntime(after, {"x": x})[0]
    assert (np.isnan(old) == np.isnan(new)).all()
    known = np.isfinite(old)
    # twenty roundings of numbers as large as the inputs
    assert (np.abs(old[known] - new[known]) <= 20 * 2.0**-23 * np.maximum(1.0, np.abs(x[known]))).all()


def test_the_normal_form_is_exact() -> None:
    """A third is three times itself: float arithmetic would not say so."""
    opened = Graph(graph("d = Div(x, three) e = Exp(d) a = Add(e, one) y = Div(three, a)"))
    tensors = {t.name: t for node in opened.nodes for t in (*node.inputs, *node.outputs)}
    form = pointwise_form(opened, tensors["x"], tensors["y"])
    assert form is not None
    assert form.argument == {1: Fraction(1, 3)}
    assert activation_fusion.standard_activation(form) is None


def test_a_factor_that_float32_does_not_hold_is_not_written() -> None:
    """x/3 over 1 + e^(−x/3): what was divided by three is at hand, x times a third is not."""
    before = graph("t = Div(x, three) n = Neg(t) e = Exp(n) a = Add(e, one) y = Div(t, a)")
    assert ops(optimize_norms(before)[0]) == ["Div", "Sigmoid", "Mul"]
    assert (
        ops(optimize_norms(graph("t = Div(x, three) n = Neg(t) e = Exp(n) a = Add(e, one) y = Div(x, a)"))[0])[-1]
        == "Div"
    )


def test_what_is_far_below_keeps_its_logarithm() -> None:
    before = graph(f"{SIGMOID.replace('y =', 's =')} y = Log(s)")
    x = np.array([[-30.0, -20.0, 0.0]], np.float32)
    np.testing.assert_allclose(
        run_onnxruntime(optimize_norms(before)[0], {"x": x})[0], -np.logaddexp(0.0, -x.astype(np.float64)), rtol=1e-6
    )


def test_the_last_line_counts_them() -> None:
    console = Console(record=True, width=120)
    show_norms(
        console, optimize_norms(graph(f"{NEW_GELU.replace('y =', 'g =')} b = Abs(g) i = Add(b, one) y = Div(g, i)"))[1]
    )
    assert "2 activations as one node each" in console.export_text()


@pytest.mark.parametrize(
    ("low", "width", "becomes"),
    [
        (-3.0, 6.0, ["HardSigmoid"]),
        (1.0, 2.0, ["HardSigmoid"]),
        (1e5, 100.0, ["Clip", "Sub", "Div"]),
        (1.7e9, 86400.0, ["Clip", "Sub", "Div"]),
        (-3e6, 3.0, ["Clip", "Sub", "Div"]),
    ],
)
@pytest.mark.parametrize("body", ["c = Clip(x, lo, hi) d = Sub(c, lo) y = Div(d, w)"])
def test_a_clamp_far_from_zero_keeps_its_digits(body: str, low: float, width: float, becomes: list[str]) -> None:
    """A time of day in seconds since 1970: alpha·x and beta of HardSigmoid would cancel, 0.04 instead of 3e-8."""
    lo, hi = np.float32(low), np.float32(low + width)
    proto = graph(body, lo=float(lo), hi=float(hi), w=float(hi - lo))
    after = optimize_norms(proto)[0]
    assert ops(after) == becomes
    x = np.linspace(float(lo), float(hi), 400).astype(np.float32).reshape(100, 4)
    exact = (x.astype(np.float64) - lo) / (float(hi) - float(lo))
    errors = [float(np.abs(run_onnxruntime(p, {"x": x})[0] - exact).max()) for p in (proto, after)]
    assert errors[1] <= max(2 * errors[0], 8 * 2.0**-24)


def test_a_gated_clamp_far_from_zero_keeps_its_digits() -> None:
    body = "c = Clip(x, lo, hi) d = Sub(c, lo) e = Div(d, w) y = Mul(x, e)"
    assert ops(optimize_norms(graph(body, lo=1e5, hi=1e5 + 100, w=100.0))[0]) == ["Clip", "Sub", "Div", "Mul"]
