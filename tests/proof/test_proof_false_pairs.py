"""Pairs that were once proved although they are no identity, each with what the proof overlooked."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import onnx
import onnx.reference
import pytest

import normdeploy
from normdeploy.proof.proof_errors import NotProved

from .support import BY_HAND, judged, proved

VARIANCE = "u = ReduceMean(x, last) d = Sub(x, u) q = Mul(d, d) v = ReduceMean(q, last) "
ROWS = "mx = ReduceMax(x, last) mn = ReduceMin(x, last) e = Equal(mx, mn) "
COUNT = "many = Shape <start = 1, end = 2> (x) f = Cast <to = 1> (many) "
RAMP = np.linspace(1, 2, 16)
Y = ["y: B, S, 16"]


def at_1(number: float, others: float | np.ndarray = RAMP) -> np.ndarray:
    """16 numbers, of which the second, which no sample of an axis shows, is ``number``."""
    return np.where(np.arange(16) == 1, number, others)


def struck(body: str, **how: object) -> None:
    assert isinstance(judged(body, **how), NotProved), "it was proved"


# ------------------------------------------------------------------ |x| and log t are not x and t

LEAKS = {
    "times another": "before = Mul(a, x) after = Mul(w, x)",
    "reshaped": "before = Unsqueeze(a, last) after = Unsqueeze(w, last)",
    "negated": "before = Neg(a) after = Neg(w)",
    "its root": "r = Sqrt(a) before = Mul(r, r) after = Identity(w)",
}


@pytest.mark.parametrize("name", LEAKS)
def test_an_absolute_value_of_what_the_floats_show_positive(name: str) -> None:
    struck("w = Add(x, far) a = Abs(w) " + LEAKS[name], far=100.0)


def test_an_absolute_value_beside_what_is_large() -> None:
    struck("a = Abs(x) z = Mul(x, far) before = Add(a, z) after = Add(x, z)", far=1e9)


def test_a_logarithm_beside_what_is_large() -> None:
    struck(VARIANCE + "e = Add(v, eps) l = Log(e) z = Mul(x, far) before = Add(l, z) after = Add(e, z)", far=1e9)


def test_a_logarithm_times_a_vector_is_a_vector() -> None:
    struck(VARIANCE + "e = Add(v, eps) l = Log(e) m = Mul(l, k) before = Exp(m) after = Sqrt(e)", k=np.full(16, 0.5))


# ------------------------------------------------------------------ elements that no sample shows


def test_a_zero_that_is_divided_by() -> None:
    struck("a = Mul(x, c) before = Div(a, c) after = Identity(x)", c=at_1(0))


def test_a_negative_variance() -> None:
    """(x/√c)² is NaN where c is −1, and x²/c is not."""
    body = """n = BatchNormalization <epsilon = 0.0> (x, one, zero, zero, c) before = Mul(n, n)
        c1 = Unsqueeze(c, last) q = Mul(x, x) after = Div(q, c1)"""
    struck(body, shape="B, 16, S", one=np.ones(16), zero=np.zeros(16), c=at_1(-1))


def test_what_a_guard_chooses() -> None:
    struck(VARIANCE + ROWS + "before = Where(e, z, d) after = Identity(d)", z=at_1(5, 0.0))


@pytest.mark.parametrize("norm", ["Mul({x}, {g})", "LayerNormalization({x}, {g}, beta)"])
def test_another_gamma(norm: str) -> None:
    body = "before = " + norm.format(x="x", g="c") + " after = " + norm.format(x="x", g="k")
    struck(body, c=RAMP, k=at_1(5))


# ------------------------------------------------------------------ a scale and shift that nobody computed


def test_a_small_shift() -> None:
    struck("before = Add(x, h) after = Identity(x)", h=1e-12)


def test_a_scale_that_is_one_at_a_size() -> None:
    struck(COUNT + "s = Div(f, h) before = Mul(x, s) after = Identity(x)", h=7.0)


@pytest.mark.parametrize(("shape", "number"), [("3, 3200, 3200", 2.0**-24), ("B, S, 3", float(np.float16(1 / 3)))])
def test_a_float32_is_read_as_no_float16(shape: str, number: float) -> None:
    """2^-24 is the float16 nearest to 1/30720000, which is about half of it."""
    count = np.prod([int(n) for n in shape.split(", ") if n.isdigit()])
    struck("before = Mul(x, k) after = Div(x, count)", shape=shape, k=number, count=float(count))


def test_an_epsilon_that_is_right_at_a_size() -> None:
    body = COUNT + "s = Div(f, h) e0 = Mul(s, eps) " + BY_HAND.replace("Add(v, eps)", "Add(v, e0)")
    struck(body + "after = LayerNormalization <epsilon = 1e-5> (x, gamma, beta)", h=7.0)


@pytest.mark.parametrize(("far", "epsilon"), [(1e8, "1.125"), (1e12, "0.0")])
def test_an_epsilon_that_floats_do_not_show(far: float, epsilon: str) -> None:
    """In float64 little is left of 1 beside 1e16, and what was left was taken for it."""
    body = "w = Mul(y, far) " + BY_HAND.replace("x", "w").replace("before", "b") + " before = Add(b, x) "
    body += f"n2 = LayerNormalization <epsilon = {epsilon}> (w, gamma, beta) after = Add(n2, x)"
    struck(body, leaves=Y, far=far, eps=np.float32(1))


# ------------------------------------------------------------------ places


def test_a_high_degree_inside_of_an_unknown_function() -> None:
    """The orthogonal polynomial of degree 5 of a row's elements is zero at each of them where they are five."""
    body = "u = ReduceMean(x, last) p1 = Sub(x, u) s1 = Mul(p1, p1) n1 = ReduceMean(s1, last) "
    body += (
        "t1 = Mul(x, p1) c1 = Mul(t1, p1) a1 = ReduceMean(c1, last) y1 = Mul(n1, t1) z1 = Mul(a1, p1) o1 = Sub(y1, z1) "
    )
    body += "b1 = Mul(n1, n1) p2 = Sub(o1, b1) "
    for k in range(2, 5):
        body += f"""s{k} = Mul(p{k}, p{k}) n{k} = ReduceMean(s{k}, last) t{k} = Mul(x, p{k})
            c{k} = Mul(t{k}, p{k}) a{k} = ReduceMean(c{k}, last)
            e{k} = Mul(t{k}, p{k - 1}) b{k} = ReduceMean(e{k}, last) f{k} = Mul(n{k}, n{k - 1}) y{k} = Mul(f{k}, t{k})
            g{k} = Mul(n{k - 1}, a{k}) z{k} = Mul(g{k}, p{k}) h{k} = Mul(n{k}, b{k}) w{k} = Mul(h{k}, p{k - 1})
            o{k} = Sub(y{k}, z{k}) p{k + 1} = Sub(o{k}, w{k}) """
    struck(body + "v = Add(x, p5) before = Sigmoid(v) z = Sub(p1, p1) y = Add(x, z) after = Sigmoid(y)")


@pytest.mark.parametrize("shape", ["S", "5"])
def test_three_axes_of_one_size(shape: str) -> None:
    """(a − b)(b − c)(c − a) is zero wherever two of three places are one, which is everywhere among two points."""
    body = """a = Unsqueeze(x, a01) b = Unsqueeze(x, a02) c = Unsqueeze(x, a12) p = Sub(a, b) q = Sub(b, c) r = Sub(c,
    a)
        pq = Mul(p, q) before = Mul(pq, r) z = Mul(before, zero) after = Identity(z)"""
    struck(body, shape=shape, a01=np.array([0, 1]), a02=np.array([0, 2]), a12=np.array([1, 2]), zero=0.0)


def test_a_guard_laid_over_another_axis() -> None:
    body = """u = ReduceMean(x, last) d = Sub(x, u) mx = ReduceMax <keepdims = 0> (x, last) mn = ReduceMin <keepdims =
    0> (x, last)
        e = Equal(mx, mn) before = Where(e, zero, d) after = Identity(d)"""
    struck(body, shape="S, S", zero=0.0)


def test_a_guard_that_broadcasts() -> None:
    struck(VARIANCE + ROWS + "before = Where(e, z, d) after = Identity(d)", z=np.zeros((3, 1, 1, 1)))


def test_a_fixed_choice_of_higher_rank() -> None:
    struck("before = Where(c, x, z) after = Identity(x)", c=np.ones((1, 1, 1, 1), bool), z=np.zeros(()))


def test_another_stride() -> None:
    kernel = np.random.default_rng(5).standard_normal((4, 3, 3))
    struck("before = Conv <strides = [2]> (x, k) after = Conv <strides = [3]> (x, k)", shape="B, 3, 6", k=kernel)


def test_another_dilation() -> None:
    kernel = np.random.default_rng(5).standard_normal((4, 3, 3))
    body = "before = Conv <strides = [4], dilations = [2]> (x, k) after = Conv <strides = [4], dilations = [3]> (x, k)"
    struck(body, shape="B, 3, 11", k=kernel)


@pytest.mark.parametrize("pads", [[0, 1], [1, 0], [0, 0]])
def test_a_shift_past_a_border_of_zeros(pads: list[int]) -> None:
    """Its tap times the shift is what it adds, but for places whose kernel reaches into the padding."""
    body = f"s = Add(x, c) before = Conv <pads = {pads}> (s, k) y = Conv <pads = {pads}> (x, k) after = Add(y, b)"
    found = judged(body, shape="B, 1, 6", k=np.full((1, 1, 1), 3.0), c=0.5, b=1.5)
    assert isinstance(found, NotProved) == any(pads), found


def test_three_taps_of_two_points() -> None:
    """det(Σ_t k_j[t]·x_t^i) is det k times Vandermonde's determinant of three neighbours, zero where two of them are
    one."""
    body, terms = "x2 = Mul(x, x) x3 = Mul(x2, x) ", {1: [], -1: []}
    for i, name in enumerate(["x", "x2", "x3"]):
        body += "".join(f"y{j}{i} = Conv({name}, k{j}) " for j in range(3))
    for n, order in enumerate(permutations(range(3))):
        sign = round(np.linalg.det(np.eye(3)[list(order)]))
        body += f"s{n} = Mul(y0{order[0]}, y1{order[1]}) t{n} = Mul(s{n}, y2{order[2]}) "
        terms[sign].append(f"t{n}")
    body += (
        f"p = Sum({', '.join(terms[1])}) m = Sum({', '.join(terms[-1])}) e = Sub(p, m) before = Add(e, y00) after ="
        " Identity(y00)"
    )
    kernels = np.random.default_rng(5).standard_normal((3, 1, 1, 3))
    struck(body, shape="B, 1, S", k0=kernels[0], k1=kernels[1], k2=kernels[2])


# ------------------------------------------------------------------ whole numbers


def test_a_power_of_a_whole_number_is_whole() -> None:
    body = COUNT + "k = Pow(many, h) g = Cast <to = 1> (k) before = Mul(x, g) r = Sqrt(f) after = Mul(x, r)"
    struck(body, h=0.5)


def test_a_dim_of_any_name() -> None:
    """A dim that is called True was taken for 1."""
    struck("n = Shape <end = 1> (x) f = Cast <to = 1> (n) before = Mul(x, f) after = Identity(x)", shape="True, 4")


def test_a_size_that_does_not_fit() -> None:
    struck(
        "n = Shape <start = 2> (x) k = Cast <to = 3> (n) f = Cast <to = 1> (k) before = Mul(x, f) after = Mul(x, h)",
        shape="B, S, 300",
        h=300.0,
    )
    struck(COUNT + "k = Cast <to = 2> (many) g = Cast <to = 1> (k) before = Mul(x, g) after = Mul(x, f)")


# ------------------------------------------------------------------ NaN


@pytest.mark.parametrize("square", ["w = Sub(x, h) q = Mul(w, w)", "q = Mul(y, y)"])
def test_a_root_that_cancels(square: str) -> None:
    """0/0 after, where x is h or where another leaf is zero, and not before."""
    body = f"{square} v = ReduceMean(q, last) r = Sqrt(v) a = Mul(x, r) after = Div(a, r) before = Identity(x)"
    struck(body, leaves=Y, h=0.3)


def test_a_root_that_is_divided_by_twice() -> None:
    """Where x is h, x·V/√V is 0/0 and x/(1/√V) is x/Inf."""
    body = """w = Sub(x, h) q = Mul(w, w) v = ReduceMean(q, last) r = Sqrt(v) i = Reciprocal(r) after = Div(x, i)
        y = Mul(x, v) before = Div(y, r)"""
    struck(body, h=0.3)


def test_a_pole_at_a_size() -> None:
    """Both divide by S − 1; at S = 1 one is 0/0, the other x/Inf."""
    body = (
        COUNT
        + """m = Sub(f, one) q = Mul(x, x) v = ReduceMean(q, last) e = Add(v, one) w = Div(e, m) r = Sqrt(w) a = Div(x,
        r)
        after = Div(a, r) b = Mul(x, m) b1 = Div(b, m) b2 = Mul(b1, m) before = Div(b2, e)"""
    )
    struck(body, one=1.0)


# ------------------------------------------------------------------ what was refused for no reason


@pytest.mark.parametrize("op", ["Add", "Mul"])
def test_a_norm_of_a_vector_and_data(op: str) -> None:
    body = (
        f"w = {op}(x, c) "
        + BY_HAND.replace("(x,", "(w,")
        + " after = LayerNormalization <epsilon = 1e-5> (w, gamma, beta)"
    )
    proved(body, c=RAMP)


# ------------------------------------------------------------------ through the front door


def optimized(body: str, x: np.ndarray, shape: str, **constants: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the model gives before and after, by onnx's reference evaluator."""
    text = f'<ir_version: 10, opset_import: ["" : 21]> g (float[{shape}] x) => (float[{shape}] out) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items())
    result = normdeploy.optimize(model)
    found = [onnx.reference.ReferenceEvaluator(m).run(None, {"x": x})[0] for m in (model, result.proto)]
    return found[0], found[1]


def test_front_door_what_a_guard_chooses() -> None:
    body = "u = ReduceMean(x, last) d0 = Sub(x, u) " + ROWS
    body += "d = Where(e, z, d0) q = Mul(d, d) v = ReduceMean(q, last) w = Add(v, eps) r = Sqrt(w) out = Div(d, r)"
    x = np.full((2, 5, 16), 0.5, np.float32)
    a, b = optimized(
        body, x, "B, S, 16", last=np.array([-1]), z=at_1(1e-3, 0.0).astype(np.float32), eps=np.float32(1e-5)
    )
    assert np.abs(a - b).max() < 1e-6


def test_front_door_a_size_that_does_not_fit() -> None:
    body = """t = Transpose <perm = [0, 2, 1]> (x) n = Shape <start = 1, end = 2> (x) k = Cast <to = 3> (n) f = Cast <to
    = 1> (k)
        s = ReduceSum(t, last) u = Div(s, f) d = Sub(t, u) q = Mul(d, d) s2 = ReduceSum(q, last) v = Div(s2, f)
        e = Add(v, eps)
        r = Sqrt(e) o = Div(d, r) out = Transpose <perm = [0, 2, 1]> (o)"""
    x = np.random.default_rng(1).standard_normal((2, 300, 16)).astype(np.float32)
    a, b = optimized(body, x, "B, S, 16", last=np.array([-1]), eps=np.float32(1e-5))
    assert np.abs(a - b).max() < 1e-4
