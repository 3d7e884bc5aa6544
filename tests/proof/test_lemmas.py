"""Each lemma where it holds, and broken: the op is let in by its premise alone."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import normdeploy
from normdeploy.proof.lemmas.isometry import isometry_factor
from normdeploy.proof.proof_errors import NotProved, ProofFailure

from .support import BY_HAND, NODE, judged, proved, refused


def variance(clamp: str) -> str:
    """The norm by hand with E[x²] − E[x]², clamped."""
    return f"""
        u = ReduceMean(x, last)
        s = Mul(x, x)
        p = ReduceMean(s, last)
        w = Mul(u, u)
        v0 = Sub(p, w)
        v = {clamp}
        e = Add(v, eps)
        r = Sqrt(e)
        d = Sub(x, u)
        n = Div(d, r)
        g = Mul(n, gamma)
        before = Add(g, beta)
        {NODE}"""


@pytest.mark.parametrize(
    "clamp",
    ["Identity(v0)", "Relu(v0)", "Max(v0, zero)", "Max(zero, v0)", "Clip(v0, zero)", "Abs(v0)", "Max(v0, below)"],
)
def test_a_clamp_does_nothing_to_a_variance(clamp: str) -> None:
    proved(variance(clamp), zero=0.0, below=-1.0)


@pytest.mark.parametrize("clamp", ["Max(v0, tiny)", "Min(v0, huge)", "Clip(v0, zero, huge)", "Max(v0, u)"])
def test_another_clamp_is_refused(clamp: str) -> None:
    refused(variance(clamp), ProofFailure.OP, zero=0.0, tiny=1e-12, huge=1e30)


LENGTH = "z = ReduceL2(x, last) c = Clip(z, low) before = Div(x, c)"


def test_a_root_that_is_clamped_above_zero_stays_that() -> None:
    """F.normalize: max(‖x‖, c) is one function of ‖x‖, however that is spelled."""
    squared = "s = Mul(x, x) t = ReduceSum(s, last) r = Sqrt(t) k = Clip(r, low) after = Div(x, k)"
    proved(f"{LENGTH} {squared}", low=1e-12)
    proved(
        f"{LENGTH} after = normdeploy.L2Norm <axes = [-1], epsilon = 0.25, stash_type = 1> (x, one)", low=0.25, one=1.0
    )


@pytest.mark.parametrize(
    "after",
    [
        "k = Clip(z, other) after = Div(x, k)",
        "k = Max(z, low) after = Div(x, k)",
        "s = Mul(x, x) t = ReduceMean(s, last) r = Sqrt(t) k = Clip(r, low) after = Div(x, k)",
        "after = Div(x, z)",
        "k = Add(z, low) after = Div(x, k)",
        "after = normdeploy.L2Norm <axes = [-1], epsilon = 0.5, stash_type = 1> (x, one)",
    ],
)
def test_another_clamp_of_a_root_is_not_the_same(after: str) -> None:
    found = judged(f"{LENGTH} {after}", low=0.25, other=0.25000003, one=1.0)
    assert isinstance(found, NotProved)


def test_a_clamp_of_what_may_be_negative_is_refused() -> None:
    refused("before = Relu(x) after = Identity(x)", ProofFailure.OP)
    refused("u = ReduceMean(x, last) a = Relu(u) before = Sub(x, a) after = Sub(x, u)", ProofFailure.OP)


def test_the_square_of_an_absolute_value_is_the_square() -> None:
    for body in (
        "a = Abs(x) before = Mul(a, a)",
        "a = Abs(x) before = Pow(a, two)",
        "b = Abs(x) a = Cast<to = 11>(b) before = Mul(a, a)",
    ):
        proved(f"{body} after = Mul(x, x)", two=2.0)
    proved("a = Abs(x) before = ReduceSumSquare(a, last) s = Mul(x, x) after = ReduceSum(s, last)")


@pytest.mark.parametrize(
    "body",
    [
        "before = Abs(x)",
        "a = Abs(x) before = Mul(a, x)",
        "a = Abs(x) before = Pow(a, three)",
        "a = Abs(x) before = Add(a, x)",
    ],
)
def test_an_absolute_value_by_itself_is_refused(body: str) -> None:
    refused(f"{body} after = Identity(x)", ProofFailure.OP, three=3.0)


def test_an_exponential_of_a_logarithm_is_a_power() -> None:
    by_log = BY_HAND.replace("r = Sqrt(e)", "l = Log(e) h = Mul(l, half) r = Exp(h)").replace(
        "n = Div(d, r)", "n = Mul(d, r)"
    )
    proved(by_log + NODE, half=-0.5)
    proved(by_log.replace("h = Mul(l, half)", "h0 = Div(l, two) h = Neg(h0)") + NODE, two=2.0)


def test_a_logarithm_otherwise_is_refused() -> None:
    by_log = BY_HAND.replace("n = Div(d, r)", "n = Mul(d, r)")
    for made in (
        "l = Log(e) h = Mul(l, gamma) r = Exp(h)",
        "l = Log(e) h = Add(l, half) r = Exp(h)",
        "r = Exp(e)",
        "r = Log(e)",
    ):
        refused(by_log.replace("r = Sqrt(e)", made) + NODE, ProofFailure.OP, half=-0.5)
    refused(
        "l = Log(x) h = Mul(l, two) before = Exp(h) after = Mul(x, x)", ProofFailure.OP, two=2.0
    )  # NaN where x is negative


def test_a_pole_times_zero_is_refused() -> None:
    """x + 0·log|x + 12| is NaN at −12: no algebra lets a logarithm or an absolute value through."""
    refused(
        "a = Add(x, twelve) m = Abs(a) l = Log(m) z = Mul(l, zero) before = Add(x, z) after = Identity(x)",
        ProofFailure.OP,
        twelve=12.0,
        zero=0.0,
    )


def test_unknown_functions_of_equal_arguments_are_equal() -> None:
    proved(
        BY_HAND.replace("before", "y")
        + " s = Sigmoid(y) before = Mul(y, s) "
        + NODE.replace("after", "z")
        + " t = Sigmoid(z) after = Mul(t, z)"
    )


def test_unknown_functions_otherwise_are_refused() -> None:
    head = BY_HAND.replace("before", "y") + " s = Sigmoid(y) before = Mul(y, s) " + NODE.replace("after", "z")
    refused(head + " t = Tanh(z) after = Mul(t, z)", ProofFailure.DIFFERS)
    refused(head + " w = Neg(z) t = Sigmoid(w) after = Mul(t, z)", ProofFailure.DIFFERS)
    refused(
        "s = Sigmoid(x) t = Neg(x) u = Sigmoid(t) before = Add(s, u) after = Div(x, x)",
        ProofFailure.DIFFERS,
        ProofFailure.SIGN,
    )  # 1, but nobody says so


FLAX = """
    u = ReduceMean(x, last)
    d0 = Sub(x, u)
    low = ReduceMin(x, last)
    top = ReduceMax(x, last)
    flat = Equal(low, top)
    f = Sub(u, u)
    finite = Equal(f, zero)
    at = And(flat, finite)
    d = Where(at, zero, d0)
    q = Mul(d, d)
    v = ReduceMean(q, last)
    e = Add(v, eps)
    r = Sqrt(e)
    n = Div(d, r)
    g = Mul(n, gamma)
    before = Add(g, beta)
"""


def test_a_guard_of_constant_rows_does_nothing() -> None:
    proved(FLAX + NODE, zero=0.0)


def test_a_guard_that_takes_rows_of_inf_for_constant_gains_nan() -> None:
    """Without a look at what is finite, a whole row of Inf is 0 before, and NaN as a norm's node."""
    assert not proved(FLAX + NODE, zero=0.0).gains
    assert proved(FLAX.replace("at = And(flat, finite)", "at = Identity(flat)") + NODE, zero=0.0).gains


BROKEN = {
    "another number": FLAX.replace("Where(at, zero,", "Where(at, one,"),
    "another condition": FLAX.replace("flat = Equal(low, top)", "flat = Equal(low, zero)"),
    "other axes": FLAX.replace("top = ReduceMax(x, last)", "top = ReduceMax(x, middle)"),
    "the least twice": FLAX.replace("ReduceMax", "ReduceMin"),
    "either": FLAX.replace("And(flat, finite)", "Or(flat, finite)"),
    "not": FLAX.replace("at = And(flat, finite)", "off = Not(flat) at = And(off, finite)"),
    "of what is not centered": FLAX.replace("Where(at, zero, d0)", "Where(at, zero, x)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_another_guard_is_refused(name: str) -> None:
    refused(BROKEN[name] + NODE, ProofFailure.OP, ProofFailure.SIZE, zero=0.0, one=1.0, middle=np.array([1]))


def test_casts_of_elements_to_whole_numbers_are_refused() -> None:
    proved("a = Cast <to = 11> (x) before = Cast <to = 1> (a) after = Identity(x)")
    for kind in (6, 7, 9):
        refused(f"a = Cast <to = {kind}> (x) before = Cast <to = 1> (a) after = Identity(x)", ProofFailure.OP)


def test_numbers_that_are_roundings_are_read_as_what_they_are() -> None:
    """Σx · float32(1/16·3/3) is exact for 16; for 24 elements 1/24 is rounded, and the certificate says how it was
    read."""
    by_constant = """
        s = ReduceSum(x, last)
        u = Mul(s, part)
        d = Sub(x, u)
        q = Mul(d, d)
        t = ReduceSum(q, last)
        v = Mul(t, part)
        e = Add(v, eps)
        r = Sqrt(e)
        before = Div(d, r)
        after = LayerNormalization <axis = -1, epsilon = 1e-5> (x, one)"""
    found = proved(by_constant, shape="B, S, 24", part=np.float32(1 / 24), one=np.ones(24))
    assert [fraction for _, fraction in found.read] == ["1/24"]
    refused(
        by_constant,
        ProofFailure.DIFFERS,
        ProofFailure.SIGN,
        ProofFailure.LIMIT,
        shape="B, S, 24",
        part=np.float32(1 / 24 + 1e-6),
        one=np.ones(24),
    )
    assert (
        judged("before = Mul(x, third) after = Div(x, three)", shape="B, S, 24", third=np.float32(1 / 3), three=3.0)
        is not None
    )
    refused(
        "before = Mul(x, third) after = Div(x, three)",
        ProofFailure.DIFFERS,
        ProofFailure.STORED,
        shape="B, S, 24",
        third=np.float32(0.3333),
        three=3.0,
    )


@pytest.mark.parametrize(("kind", "holds"), [(6, True), (7, True), (12, False), (13, False), (5, False)])
def test_a_size_that_may_be_below_zero_or_large_is_cast_where_it_fits(kind: int, holds: bool) -> None:
    body = f"""n = Shape <start = 1, end = 2> (x) m = Sub(n, three) c = Cast <to = {kind}> (m) f = Cast <to = 1> (c)
        before = Mul(x, f) g = Cast <to = 1> (m) after = Mul(x, g)"""
    if holds:
        proved(body, three=np.array([3]))
    else:
        refused(body, ProofFailure.SIZE, three=np.array([3]))


def test_a_softmax_over_all_axes_behind_one_is_no_softmax_over_that_one() -> None:
    """Up to opset 12 it was over ``axis`` and all behind it."""
    turned = "t = Transpose <perm = [0, 2, 1]> (x) s = Softmax <axis = 2> (t) after = Transpose <perm = [0, 2, 1]> (s)"
    proved(f"before = Softmax <axis = 1> (x) {turned}", opset=13)
    refused(f"before = Softmax <axis = 1> (x) {turned}", ProofFailure.OP, opset=12)


@pytest.mark.parametrize(
    ("matrix", "k"),
    [
        ([[1, 1], [1, -1]], 2),
        ([[0, 1], [1, 0]], 1),
        ([[1, 1], [1, 1]], None),  # another sign
        ([[1, 1, 0], [1, -1, 0], [0, 0, 1]], None),  # rows of two lengths
        ([[0.5, 0.5], [0.5, -0.5]], None),  # no whole numbers
        ([[1, 1]], None),
        ([[0, 0], [0, 0]], None),
    ],
)
def test_an_isometry_is_seen_by_its_rows(matrix: list[list[float]], k: int | None) -> None:
    assert isometry_factor(np.array(matrix)) == k


def test_rms_norm_commutes_with_an_isometry_alone() -> None:
    """In float64, for Hadamard's matrix of order 4; with another sign it does not, nor with a gamma."""
    h = np.kron([[1, 1], [1, -1]], [[1, 1], [1, -1]])
    x = np.random.default_rng(0).standard_normal((5, 8))

    def rms(rows: np.ndarray, gamma: np.ndarray | float = 1.0) -> np.ndarray:
        return np.asarray(rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 0.1) * gamma)

    q = np.kron(np.eye(2), h) / 2
    np.testing.assert_allclose(rms(x @ q), rms(x) @ q, atol=1e-14)
    assert isometry_factor(h) == 4
    for other, gamma in ((np.where(np.arange(64).reshape(8, 8) == 9, -q, q), 1.0), (q, np.arange(8.0))):
        assert np.abs(rms(x @ other, gamma) - rms(x, gamma) @ other).max() > 1e-3


def test_a_clamped_variance_is_known_where_axes_are_equally_long() -> None:
    """Three axes of 2, which may be told apart, and a number of elements, 24, that holds only where they are 2."""
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[2, 8, 2, 3, 2] x) => (float[2, 8, 2, 3, 2] y)
        <int64[6] apart = {2, 4, 2, 2, 3, 2}, int64[5] whole = {2, 8, 2, 3, 2}, int64[4] axes = {2, 3, 4, 5},
         float count = {24}, float zero = {0}, float epsilon = {0.001}> {
            groups = Reshape (x, apart)
            mean = ReduceMean (groups, axes)
            centered = Sub (groups, mean)
            squares = Mul (groups, groups)
            sum = ReduceSum (squares, axes)
            mean_square = Div (sum, count)
            square_mean = Mul (mean, mean)
            difference = Sub (mean_square, square_mean)
            variance = Clip (difference, zero)
            guarded = Add (variance, epsilon)
            deviation = Sqrt (guarded)
            normal = Div (centered, deviation)
            y = Reshape (normal, whole)
        }"""
    made = normdeploy.optimize(onnx.parser.parse_model(text), runtime="onnxruntime")
    assert "Sqrt" not in [node.op_type for node in made.proto.graph.node]
