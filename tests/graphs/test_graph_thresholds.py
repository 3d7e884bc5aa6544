"""Thresholds are taken along to the inputs, and inputs are drawn on both sides of them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from normdeploy.graphs.function_ops import attach_functions
from normdeploy.graphs.graph_thresholds import GraphThresholds, find_thresholds
from normdeploy.graphs.threshold_inputs import draw_special_values, draw_threshold_values
from normdeploy.model import Dim, InputSpec
from tests.support import parsed


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def spec(dtype: str, count: int = 400, name: str = "x", bounds: tuple[float, float] | None = None) -> InputSpec:
    return InputSpec(name, dtype, (Dim.from_size(count),), range=bounds)


def net(body: str, inputs: str = "float[4] x", outputs: str = "float[4] y", **constants: object) -> onnx.ModelProto:
    stored = {k: np.float32(v) if isinstance(v, float) else np.asarray(v) for k, v in constants.items()}
    return parsed(f"net ({inputs}) => ({outputs}) {{ {body} }}", **stored)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Clip(x, five, nine)", {5.0, 9.0}),
        ("d = Mul(x, two) e = Add(d, one) y = Clip(e, five, nine)", {2.0, 4.0}),
        ("d = Sub(one, x) y = Max(d, five)", {-4.0}),
        ("d = Exp(x) y = Min(d, one)", {0.0}),
        ("m = Greater(x, nine) y = Where(m, x, one)", {9.0}),
        ("d = Div(x, two) y = ThresholdedRelu <alpha = 5.0> (d)", {10.0}),
        ("t = Reshape(x, shape) y = Clip(t, five, nine)", {5.0, 9.0}),
        ("y = HardSigmoid <alpha = 0.5, beta = 1.0> (x)", {-2.0, 0.0}),
    ],
)
def test_edges_of_a_threshold_behind_arithmetic_is_one_of_the_input(body: str, expected: set[float]) -> None:
    constants = {"one": 1.0, "two": 2.0, "five": 5.0, "nine": 9.0, "shape": np.array([2, 2])}
    assert set(find_thresholds(net(body, **constants)).values["x"]) == expected


def test_edges_of_a_body_are_those_of_what_it_reads() -> None:
    proto = net(
        """y = If (c) <then_branch = a () => (float[4] t) { t = Clip(x, five, nine) },
                       else_branch = b () => (float[4] e) { e = Identity(x) }>""",
        "float[4] x, bool c",
        five=5.0,
        nine=9.0,
    )
    assert find_thresholds(proto).values["x"] == (5.0, 9.0)


@pytest.mark.parametrize("op", ["RMSNorm<axes = [-1], epsilon = 1e-5, stash_type = 1>(d, w)", "AdaGroupNorm"])
def test_edges_in_front_of_an_own_op_are_found(op: str) -> None:
    """The body reads its attributes from the call, so its constants have no value of their own."""
    if op == "AdaGroupNorm":
        op = "AdaGroupNorm<epsilon = 1e-5, num_groups = 2>(d, d, d)"
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21, "normdeploy": 1]> net (int64[2,4,1] i) => (float[2,4,8] y)'
        " <float[9,8] table, float[8] w, int64 four = {4}> {"
        f" c = Min(i, four) s = Squeeze(c) g = Gather(table, s) d = Identity(g) y = normdeploy.{op} }}"
    )
    attach_functions(proto, 21)
    assert 4.0 in find_thresholds(proto).values["i"]


def test_edges_of_an_input_that_is_a_size_are_noted() -> None:
    proto = net("k = Add(n, one) y = Expand(x, k)", "float[1] x, int64[1] n", one=np.array([1]))
    assert find_thresholds(proto).sized == {"n"}


def test_edge_values_reach_both_sides_of_a_threshold(rng: np.random.Generator) -> None:
    drawn = draw_threshold_values(spec("float32"), GraphThresholds(values={"x": (100.0,)}), rng, {})
    assert {np.float32(100), np.nextafter(np.float32(100), np.float32(0))} <= set(drawn)
    assert (drawn > 100).any()
    assert np.signbit(drawn[drawn == 0]).any()


@pytest.mark.parametrize(
    ("body", "summed"),
    [
        ("y = MatMul(x, w)", True),
        ("t = Transpose(x) y = MatMul(w, t)", True),
        ("s = Shape(x) t = Reshape(x, s) y = MatMul(t, w)", True),
        ("r = Relu(x) y = MatMul(r, w)", False),
        ("z = MatMul(x, w) y = Add(z, x)", False),
        ("t = Transpose(x) z = MatMul(w, t) y = Mul(z, t)", False),
        ("s = Sign(x) b = Identity(x) z = MatMul(b, w) y = Add(z, s)", False),
        ("y = Identity(x)", False),
    ],
)
def test_inputs_that_only_sums_read_get_no_subnormal_numbers(body: str, summed: bool, rng: np.random.Generator) -> None:
    proto = net(body, "float[4, 4] x", "float[4, 4] y", w=np.ones((4, 4), np.float32))
    edges = find_thresholds(proto)
    assert edges.summed == ({"x"} if summed else set())
    least = np.finfo(np.float32)
    drawn = draw_threshold_values(spec("float32"), edges, rng, {})
    assert ({least.smallest_normal, -least.smallest_normal} <= set(drawn)) == summed
    subnormal = (drawn != 0) & (np.abs(drawn) < least.smallest_normal)
    assert subnormal.any() != summed


def test_an_input_that_a_body_reads_gets_subnormal_numbers() -> None:
    proto = parsed(
        "net (float[4, 4] x, bool c) => (float[4, 4] y) { z = MatMul(x, w) y = If (c) <then_branch = a () => "
        "(float[4, 4] r) { r = Abs(x) }, else_branch = b () => (float[4, 4] s) { s = Identity(z) }> }",
        w=np.ones((4, 4), np.float32),
    )
    assert "x" not in find_thresholds(proto).summed


def test_edge_values_of_integers_reach_large_ones_unless_they_are_sizes(rng: np.random.Generator) -> None:
    free = draw_threshold_values(spec("int64"), GraphThresholds(), rng, {})
    assert {np.iinfo(np.int64).min, np.iinfo(np.int64).max, -1} <= set(free.tolist())
    sized = draw_threshold_values(spec("int64"), GraphThresholds(sized=frozenset({"x"})), rng, {})
    assert set(sized.tolist()) <= {0, 1}


def test_edge_values_keep_a_stated_range(rng: np.random.Generator) -> None:
    drawn = draw_threshold_values(spec("float32", bounds=(0, 1)), GraphThresholds(values={"x": (5.0, 0.5)}), rng, {})
    assert 0 <= drawn.min() <= drawn.max() <= 1
    assert 0.5 in drawn


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_special_values_hold_nan_inf_and_minus_zero(dtype: str, rng: np.random.Generator) -> None:
    drawn = draw_special_values(spec(dtype), rng, {}).astype(np.float64)
    assert np.isnan(drawn).any()
    assert np.isposinf(drawn).any()
    assert np.isneginf(drawn).any()
    assert np.signbit(drawn[drawn == 0]).any()


def test_special_values_of_a_stated_range_are_ordinary(rng: np.random.Generator) -> None:
    assert np.isfinite(draw_special_values(spec("float32", bounds=(0, 1)), rng, {})).all()
