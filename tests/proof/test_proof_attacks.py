"""What an attack on the prover found proved that is another function: each with the cause that was mended."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from normdeploy.graphs.dims import dim_size
from normdeploy.graphs.graph import Graph
from normdeploy.graphs.region import Region, compile_region
from normdeploy.graphs.symbolic_sizes import Size
from normdeploy.proof.axis_plan import AxisPlan
from normdeploy.proof.proof_errors import ProofFailure
from normdeploy.proof.prover import ProofMemo
from normdeploy.proof.sample_points import equivalence_classes, representative_places
from normdeploy.rewriting.certification import Rewrite, certify_rewrites
from normdeploy.rewriting.norm_optimizer import optimize_norms
from tests.support import run_onnxruntime

from .support import graph_of, proved, refused

SQUARES = {"16, 16": "1, 0", "n, n": "1, 0", "N, 16, 16": "0, 2, 1", "b, n, n": "0, 2, 1", "N, 3, 8, 8": "0, 1, 3, 2"}


@pytest.mark.parametrize("shape", SQUARES)
def test_a_nan_off_the_diagonal_of_a_square_is_seen(shape: str) -> None:
    """x + (xᵀ − xᵀ): a NaN at [0, 1] makes one at [1, 0], and one on the diagonal shows nothing."""
    refused(
        f"t = Transpose<perm = [{SQUARES[shape]}]>(x) z = Sub(t, t) before = Add(x, z) after = Identity(x)",
        ProofFailure.HIDDEN,
        shape=shape,
    )


def test_a_norm_beside_a_transposed_difference_stays() -> None:
    parts = """t = Transpose<perm = [0, 2, 1]>(x) z = Sub(t, t) u = ReduceMean(x, last) e0 = Sub(x, u) d = Add(e0, z) q
    = Mul(d, d)
        v = ReduceMean(q, last) e = Add(v, eps) r = Sqrt(e) n = Div(d, r) after = Mul(n, gamma)
        before = Identity(after)"""
    proto = graph_of(parts, shape="N, 16, 16").proto
    out, _ = optimize_norms(proto)
    x = np.random.default_rng(0).standard_normal((2, 16, 16)).astype(np.float32)
    x[0, 1, 2] = np.nan
    for one, other in zip(run_onnxruntime(proto, {"x": x}), run_onnxruntime(out, {"x": x}), strict=True):
        assert np.array_equal(np.isnan(one), np.isnan(other))
    assert np.isnan(one).any(-1).sum() == 2


APART = "Conv<dilations = [2, 2], pads = [1, 1, 1, 1]>"  # of two taps: the places beside the output's, never its own
NEAR = "Conv<pads = [1, 1, 1, 1]>"


@pytest.mark.parametrize("shape", ["N, 4, 9, 9", "N, 4, h, w"])
@pytest.mark.parametrize(
    "body",
    [
        f"c = {APART}(x, two) z = Sub(x, x) before = Add(c, z) after = Identity(c)",
        f"c = {APART}(x, two) z = Sub(c, c) before = Add(x, z) after = Identity(x)",
        f"c = {APART}(x, two) e = {NEAR}(x, three) z = Sub(e, e) before = Add(c, z) after = Identity(c)",
        f"c = {NEAR}(x, three) e = {NEAR}(c, three) z = Sub(e, e) before = Add(c, z) after = Identity(c)",
    ],
    ids=["past", "through", "another", "twice"],
)
def test_a_nan_that_comes_by_another_way_than_a_convolution_is_seen(body: str, shape: str) -> None:
    rng = np.random.default_rng(0)
    weights = {"two": rng.standard_normal((4, 4, 2, 2)), "three": rng.standard_normal((4, 4, 3, 3))}
    for _ in range(3):
        refused(body, ProofFailure.HIDDEN, shape=shape, **weights)


def test_what_takes_the_same_ways_is_proved() -> None:
    weights = {"three": np.random.default_rng(0).standard_normal((4, 4, 3, 3)), "g": np.float32(2), "h": np.float32(4)}
    proved(f"c = {NEAR}(x, three) s = Mul(c, g) before = Add(s, s) after = Mul(c, h)", shape="N, 4, h, w", **weights)


def test_a_radicand_that_is_a_square_in_one_part_alone_is_seen() -> None:
    """√4W + 2√W is 4√W, and zero in the field where 2 is no square; the other part of the Concat has squares and
    others."""
    body = """xx = Mul(x, x) X = Add(xx, one) yy = Mul(y, y) Y = Add(yy, one) zz = Mul(z, z) Z = Add(zz, one) X4 =
    Mul(X, four)
        W1 = Concat<axis = 1>(X, Y) W2 = Concat<axis = 1>(X4, Z) r1 = Sqrt(W1) r2 = Sqrt(W2) t1 = Mul(r1, two)
        D = Add(r2, t1)
        y0 = Sub(y, y) mask = Concat<axis = 1>(x, y0) E = Mul(D, mask) F = Mul(E, tiny) S = Concat<axis = 1>(x, y)
        Q = Concat<axis = 1>(x, z) after = Add(S, Q) before = Add(after, F)"""
    numbers = {"one": np.float32(1), "four": np.float32(4), "two": np.float32(2), "tiny": np.float32(2**-24)}
    for _ in range(3):  # half of the primes showed it
        refused(
            body,
            ProofFailure.DIFFERS,
            ProofFailure.LIMIT,
            ProofFailure.SIGN,
            shape="N, 4",
            leaves=["y: N, 5", "z: N, 5"],
            **numbers,
        )


@pytest.mark.parametrize("epsilon", [4.6941126e-9, 8.52e-9])
def test_an_epsilon_that_is_a_mean_of_constants_is_none(epsilon: float) -> None:
    """x/√(mean(x² + g²)): the made-up weights of the places that are looked at decided which epsilon it was."""
    g = np.linspace(0, 1, 64).astype(np.float32) ** 4 * 2e-4
    body = f"""xx = Mul(x, x) s = Add(xx, gg) v = ReduceMean<keepdims = 1>(s, last) r = Sqrt(v) b0 = Div(x, r)
        a0 = RMSNormalization<axis = -1, epsilon = {epsilon!r}>(x, ones) h = ReduceMean<keepdims = 1>(x, last)
        h2 = Mul(h, h)
        h4 = Mul(h2, h2) h8 = Mul(h4, h4) h9 = Add(h8, one) before = Mul(b0, h9) after = Mul(a0, h9)"""
    numbers = {"gg": (g * g).astype(np.float32), "one": np.float32(1), "ones": np.ones(64, np.float32)}
    refused(body, ProofFailure.DIFFERS, shape="3, 64", opset=23, **numbers)


@pytest.mark.parametrize(
    ("body", "first", "second"),
    [
        (
            "y# = Mul(x, x) s# = Sub(y#, g#) before# = Abs(s#) after# = Identity(s#) ",
            -np.arange(1.0, 9.0),
            np.arange(8.0) - 3.5,
        ),
        ("y# = Mul(x, g#) before# = Div(y#, g#) after# = Identity(x) ", np.arange(8.0) - 3.5, np.arange(8.0) - 3.0),
    ],
    ids=["sign", "zero"],
)
def test_what_was_proved_of_one_constant_is_not_taken_over_for_one_of_another_sign(
    body: str, first: object, second: object
) -> None:
    both = body.replace("#", "1") + body.replace("#", "2")
    named = "before = Add(before1, before2) after = Add(after1, after2)"
    graph = graph_of(both + named, shape="N, 8", g1=first, g2=second)
    tensors = {t.name: t for n in graph.nodes for t in (*n.inputs, *n.outputs)}
    memo: ProofMemo = {}
    found = []
    for i in "12":
        sides = regions_between(graph, tensors[f"before{i}"], tensors[f"after{i}"])
        found.append(bool(certify_rewrites(memo, [sides])))
    assert found == [True, False]


def regions_between(graph: Graph, before: gs.Tensor, after: gs.Tensor) -> Rewrite:
    x = next(t for n in graph.nodes for t in n.inputs if t.name == "x")
    made = [compile_region(graph, t, [x]) for t in (before, after)]
    assert isinstance(made[0], Region)
    assert isinstance(made[1], Region)
    return Rewrite(made[0], made[1])


def dim(i: int, name: str) -> str:
    return f"s{name} = Shape<start = {i}, end = {i + 1}>(x) {name} = Cast<to = 1>(s{name}) "


ZEROS = {
    "two dims": (dim(0, "n") + dim(1, "k") + "p = Mul(n, k) n1 = Sub(p, c)", "n, k, 4", 64.0, ""),
    "two roots": (
        dim(0, "n") + "a = Sub(n, two) b = Sub(n, c) n1 = Mul(a, b)",
        "n, 4",
        100.0,
        "i = Div(unit, a) y = Mul(x, i) z = Mul(y, a)",
    ),
    "told apart": (dim(0, "n") + dim(2, "w") + "p = Mul(n, w) n1 = Sub(p, c)", "n, 32, 32", 64.0, ""),
}


@pytest.mark.parametrize("case", ZEROS)
def test_every_size_at_which_a_divisor_is_zero_is_looked_at(case: str) -> None:
    """x/v beside x/n₁·n₁/v with v = (1/n₁)² + 1: where n₁ is zero the first is 0, the second NaN."""
    made, shape, c, more = ZEROS[case]
    body = f"""{made} r = Div(unit, n1) rr = Mul(r, r) v = Add(rr, unit) {more or "z = Identity(x)"}
        before = Div(z, v) xs = Div(z, n1) xt = Mul(xs, n1) after = Div(xt, v)"""
    refused(body, ProofFailure.HIDDEN, shape=shape, unit=np.float32(1), two=np.float32(2), c=np.float32(c))


def test_a_divisor_of_two_sizes_that_may_be_equal_is_refused() -> None:
    body = (
        dim(0, "n") + dim(1, "k") + "p = Sub(n, k) y = Mul(x, p) before = Div(y, p) i = Reciprocal(p) after = Mul(y, i)"
    )
    refused(body, ProofFailure.SIZE, shape="n, k, 4")


def test_classes_of_places() -> None:
    plan, n, k = AxisPlan(), Size.symbol("n"), Size.symbol("k")
    plan.together[n] = 3
    assert len(np.unique(equivalence_classes(plan, [n, k]))) == 1
    assert representative_places(plan, [n, k]) == [0, 5]
    square = equivalence_classes(plan, [n, n])
    assert (square == np.where(np.eye(3, dtype=bool), square[0, 0], square[0, 1])).all()
    assert square[0, 0] != square[0, 1]
    assert len(np.unique(equivalence_classes(plan, [n, n, n]))) == 5  # partitions of three
    whole = Size.from_int(12)
    plan.joins[whole] = (Size.from_int(4),) * 3
    assert len(np.unique(equivalence_classes(plan, [whole]))) == 3
    assert len(representative_places(plan, [whole])) == 3


def test_a_square_image_is_normalized_over_any_of_its_axes() -> None:
    """Where three axes are equally long, each may be the one that gamma lies along: told apart, none takes a minute."""
    body = """u = ReduceMean(x, rows) d = Sub(x, u) q = Mul(d, d) v = ReduceMean(q, rows) e = Add(v, eps) r = Sqrt(e)
    before = Div(d, r)
        t = Transpose<perm = [0, 1, 3, 2]>(x) n = LayerNormalization<axis = -1, epsilon = 1e-5>(t, ones)
        after = Transpose<perm = [0, 1, 3, 2]>(n)"""
    assert proved(body, shape="N, 16, 16, 16", rows=np.array([-2]), ones=np.ones(16, np.float32)).points < 20_000


SIGNS = {
    "Max with a size": "before = Max(v, n1) after = Identity(v)",
    "Relu of a multiple by a size": "t = Mul(v, n1) before = Relu(t) after = Identity(t)",
    "root of a size": "s = Sqrt(n1) a = Add(v, s) before = Sub(a, s) after = Identity(v)",
    "root of a multiple by a size": (
        "t = Mul(v, n1) r = Sqrt(t) s = Sqrt(v) a = Add(s, r) before = Sub(a, r) after = Identity(s)"
    ),
    "Relu of a multiple by a sum": "t = Mul(v, total) before = Relu(t) after = Identity(t)",
    "root of a multiple by a sum": (
        "t = Mul(v, total) r = Sqrt(t) s = Sqrt(v) a = Add(s, r) before = Sub(a, r) after = Identity(s)"
    ),
}


@pytest.mark.parametrize("case", SIGNS)
def test_a_sign_is_not_read_off_one_size_or_some_places(case: str) -> None:
    """n − 5 is positive at 7; of g the places that are looked at are, and its sum is not."""
    g = np.full(64, -1.0)
    g[[0, 21, 42, 63]] = 5.0
    body = f"""{dim(0, "n")} n1 = Sub(n, five) total = ReduceSum<keepdims = 0>(g, first) q = Mul(x, x) u = ReduceMean(q,
    last)
        v = Add(u, eps) {SIGNS[case]}"""
    refused(body, ProofFailure.OP, ProofFailure.SIGN, shape="n, 8", g=g, first=np.array([0]), five=np.float32(5))


@pytest.mark.parametrize("scale", ["Mul(x, n)", "Div(x, n)"])
def test_a_scale_that_depends_on_a_size_is_not_folded(scale: str) -> None:
    rng = np.random.default_rng(0)
    body = f"""{dim(0, "n")} c = Conv(x, w) b = BatchNormalization(c, s, s, s, s) t = {scale.replace("x", "b")} before =
    Identity(t)
        after = Identity(before)"""
    graph = graph_of(body, shape="n, 3, 5, 5", w=rng.standard_normal((4, 3, 1, 1)), s=rng.uniform(0.5, 1.5, 4))
    out, _ = optimize_norms(graph.proto)
    for n in (1, 4, 9):
        x = rng.standard_normal((n, 3, 5, 5)).astype(np.float32)
        (one, *_), (other, *_) = run_onnxruntime(graph.proto, {"x": x}), run_onnxruntime(out, {"x": x})
        assert np.abs(one - other).max() <= 1e-5 * np.abs(one).max()


def test_two_divisors_that_are_zero_at_once_are_looked_at() -> None:
    """1/(n − 2) and 1/(k − 5), each of which alone hides nothing."""
    body = f"""{dim(0, "n")} {dim(1, "k")} a = Sub(n, two) b = Sub(k, five) i = Div(unit, a) j = Div(unit, b) p = Mul(i,
    j) q = Mul(p, p)
        v = Add(q, unit) xi = Mul(x, i) xj = Mul(xi, j) y = Mul(xj, a) z = Mul(y, b) before = Div(x, v) w = Div(z, v)
        after = Identity(w)"""
    refused(
        body,
        ProofFailure.HIDDEN,
        ProofFailure.SIZE,
        shape="n, k, 4",
        unit=np.float32(1),
        two=np.float32(2),
        five=np.float32(5),
    )


def test_dims_whose_names_python_reads_as_one_are_two() -> None:
    for one, other in (("n#1", "n#2"), ("n", "n "), ("n", "ｎ")):
        assert dim_size(one, "x:0") != dim_size(other, "x:1")
    assert dim_size("-1", "x:0").constant_value is None


def test_what_was_proved_of_large_constants_that_are_equal_is_not_taken_over_for_different_ones() -> None:
    rng = np.random.default_rng(0)
    w, v = rng.standard_normal((2, 260, 260))
    body = "".join(
        f"p{i} = MatMul(x, a{i}) q{i} = MatMul(x, b{i}) before{i} = Sub(p{i}, q{i}) after{i} = Sub(p{i}, p{i}) "
        for i in "12"
    )
    named = "before = Add(before1, before2) after = Add(after1, after2)"
    graph = graph_of(body + named, shape="N, 260", a1=w, b1=w, a2=w, b2=v)
    tensors = {t.name: t for n in graph.nodes for t in (*n.inputs, *n.outputs)}
    memo: ProofMemo = {}
    found = [
        bool(certify_rewrites(memo, [regions_between(graph, tensors[f"before{i}"], tensors[f"after{i}"])]))
        for i in "12"
    ]
    assert found == [True, False]
