"""Identities that hold only at some sizes or values must not be proved."""

from __future__ import annotations

import numpy as np
import pytest

from normdeploy.verbs.prove.equality_proof import compare_files
from normdeploy.verbs.prove.file_pair import OpenFile, pair_files
from normdeploy.verbs.prove.proof_result import Verdict

from .graphs import model, prove

ROWS = "b, s, 8"
FIRST = np.array([1])


def test_mean_over_open_size_divided_by_a_number_is_not_equal() -> None:
    text = "t = ReduceSum(x, one) m = Div(t, n) y = Sub(x, m)"
    first = model("m = ReduceMean(x, one) y = Sub(x, m)", ROWS, ROWS, one=FIRST)
    for n in (1.0, 5.0, 7.0):
        assert prove(first, model(text, ROWS, ROWS, one=FIRST, n=np.float32(n))).verdict is Verdict.DIFFERENT


def test_mean_over_fixed_size_divided_by_this_size_is_equal() -> None:
    text = "t = ReduceSum(x, one) m = Div(t, n) y = Sub(x, m)"
    first = model("m = ReduceMean(x, one) y = Sub(x, m)", one=FIRST)
    assert prove(first, model(text, one=FIRST, n=np.float32(3))).verdict is Verdict.EQUAL


def test_mean_over_open_size_divided_by_its_shape_is_equal() -> None:
    text = """
        t = ReduceSum(x, one)
        s = Shape <start = 1, end = 2> (x)
        n = Cast <to = 1> (s)
        m = Div(t, n)
        y = Sub(x, m)"""
    first = model("m = ReduceMean(x, one) y = Sub(x, m)", ROWS, ROWS, one=FIRST)
    assert prove(first, model(text, ROWS, ROWS, one=FIRST)).verdict is Verdict.EQUAL


def test_broadcast_that_agrees_only_at_size_one_is_not_equal() -> None:
    first = model("y = Add(x, x)", ROWS, ROWS)
    second = model("m = ReduceSum(x, one) y = Add(x, m)", ROWS, ROWS, one=FIRST)
    assert prove(first, second).verdict is Verdict.DIFFERENT


def test_product_over_equal_open_and_other_open_size_is_not_equal() -> None:
    # Both sides reduce a number that does not vary, over axes of different open sizes.
    first = model("o = Shape(x) c = Expand(k, o) p = ReduceProd(c, one) y = Mul(x, p)", ROWS, ROWS, one=FIRST, k=2.0)
    second = model(
        "o = Shape(x) c = Expand(k, o) p = ReduceProd(c, one) y = Mul(x, p)", ROWS, ROWS, one=np.array([0]), k=2.0
    )
    assert not prove(first, second)


def test_attention_of_open_length_is_equal_and_missing_scale_is_not() -> None:
    rng = np.random.default_rng(0)
    held = {name: rng.standard_normal((8, 8)) for name in ("q", "k", "v")}
    text = """
        a = MatMul(x, q) b = MatMul(x, k) c = MatMul(x, v)
        t = Transpose <perm = [0, 2, 1]> (b)
        s = MatMul(a, t)
        {scale}
        p = Softmax <axis = -1> (z)
        y = MatMul(p, c)"""
    first = model(text.format(scale="z = Mul(s, half)"), ROWS, ROWS, half=np.float32(0.5), **held)
    scaled = text.format(scale="z = Identity(s)").replace("a = MatMul(x, q)", "d = MatMul(x, q) a = Mul(d, half)")
    assert prove(first, model(scaled, ROWS, ROWS, half=np.float32(0.5), **held)).verdict is Verdict.EQUAL
    assert prove(first, model(text.format(scale="z = Identity(s)"), ROWS, ROWS, **held)).verdict is Verdict.DIFFERENT


def test_softmax_by_hand_over_other_axis_is_not_equal() -> None:
    text = "e = Exp(x) t = ReduceSum(e, axes) y = Div(e, t)"
    first = model("y = Softmax <axis = 1> (x)", ROWS, ROWS)
    assert prove(first, model(text, ROWS, ROWS, axes=np.array([1]))).verdict is Verdict.EQUAL
    assert prove(first, model(text, ROWS, ROWS, axes=np.array([2]))).verdict is Verdict.DIFFERENT


def test_infinite_constants_do_not_cancel() -> None:
    infinity = np.float32(np.inf)
    second = model("a = Add(x, c) y = Sub(a, c)", c=infinity)
    assert not prove(model("y = Identity(x)"), second)


def test_clamp_of_a_value_that_may_be_negative_stays() -> None:
    assert prove(model("y = Relu(x)"), model("y = Identity(x)")).verdict is Verdict.DIFFERENT


@pytest.mark.parametrize("moments", [True, False])
def test_clamp_of_a_variance_changes_nothing(moments: bool) -> None:
    variance = "d = Sub(x, u) q = Mul(d, d) v = ReduceMean(q, last)"
    if moments:
        variance = "q = Mul(x, x) w = ReduceMean(q, last) z = Mul(u, u) v = Sub(w, z) d = Sub(x, u)"
    text = "u = ReduceMean(x, last) {variance} {clamp} e = Add(c, eps) r = Sqrt(e) y = Div(d, r)"
    held = {"last": np.array([-1]), "eps": np.float32(1e-5), "zero": np.float32(0)}
    first = model(text.format(variance=variance, clamp="c = Max(v, zero)"), ROWS, ROWS, **held)
    second = model(text.format(variance=variance, clamp="c = Identity(v)"), ROWS, ROWS, **held)
    assert prove(first, second).verdict is Verdict.EQUAL
    # A bound above zero changes small variances.
    third = model(text.format(variance=variance, clamp="c = Max(v, eps)"), ROWS, ROWS, **held)
    assert not prove(first, third)


def test_root_of_a_square_is_the_magnitude_and_not_the_number() -> None:
    first = model("q = Mul(x, x) y = Sqrt(q)")
    assert not prove(first, model("y = Identity(x)"))


def test_integer_ids_pick_equal_rows_and_other_rows_differ() -> None:
    table = np.random.default_rng(0).standard_normal((6, 8))
    text = "i = Cast <to = 7> (x) r = Gather(t, i) y = ReduceSum(r, last)"
    first = model(text, t=table, last=np.array([-1]), out="2, 3, 8, 1")
    second = model(text, t=table[::-1].copy(), last=np.array([-1]), out="2, 3, 8, 1")
    assert prove(first, first).verdict is Verdict.EQUAL
    assert not prove(first, second)


def test_broadcast_of_opset_6_aligns_with_its_axis() -> None:
    exponents = np.arange(1, 9, dtype=np.float32)
    old = model("y = Pow <broadcast = 1, axis = 0> (x, e)", "8, 8", "8, 8", opset=6, e=exponents)
    last = model("y = Pow(x, e)", "8, 8", "8, 8", e=exponents)
    assert not prove(old, last)
    assert prove(old, old)


def test_pad_with_large_integers_keeps_all_digits() -> None:
    text = "i = Cast <to = 7> (x) p = Pad(i, pads, value) q = Cast <to = 11> (p) y = Cast <to = 1> (q)"
    pads = np.array([0, 0, 0, 0, 0, 1])
    first, second = (model(text, out="2, 3, 9", pads=pads, value=np.array(2**53 + i)) for i in (0, 1))
    assert prove(first, first)
    assert not prove(first, second)


def test_convolutions_over_an_open_size_need_a_point_for_each_sum() -> None:
    # Each convolution is a sum over places, and no op between them makes a new unknown.
    weight = np.random.default_rng(0).standard_normal((8, 8, 3))
    chain = " ".join(f"a{i + 1} = Conv <pads = [1, 1]> (a{i}, w)" for i in range(5)).replace("a0,", "x,")
    first, second = (model(f"{chain} y = Add({pair})", "b, 8, s", "b, 8, s", w=weight) for pair in ("a5, x", "x, a5"))
    assert prove(first, second).verdict is Verdict.EQUAL
    assert compare_files(pair_files(OpenFile(first, "A"), OpenFile(second, "B"), {})).point.required_points >= 7


def test_neutral_number_beside_an_unknown_value_changes_nothing() -> None:
    # The number of results of NonZero depends on values, so only their term is known.
    unknown = "k = NonZero(x) c = Cast <to = 1> (k)"
    first = model(f"{unknown} m = Mul(c, unit) y = Add(none, m)", ROWS, "n, m", unit=1.0, none=0.0)
    assert prove(first, model(f"{unknown} y = Identity(c)", ROWS, "n, m")).verdict is Verdict.EQUAL


@pytest.mark.parametrize(
    "text",
    ["y = Sub(none, c)", "y = Div(unit, c)", "y = Mul(none, c)", "y = Add(c, unit)", "y = Mul(c, wide)"],
)
def test_other_number_beside_an_unknown_value_is_not_neutral(text: str) -> None:
    numbers = {"unit": 1.0, "none": 0.0, "wide": np.ones((1, 1, 1))}
    unknown = "k = NonZero(x) c = Cast <to = 1> (k)"
    first = model(f"{unknown} y = Identity(c)", ROWS, "n, m")
    shape = "h, n, m" if "wide" in text else "n, m"
    second = model(f"{unknown} {text}", ROWS, shape, **{name: v for name, v in numbers.items() if name in text})
    assert prove(first, second).verdict is not Verdict.EQUAL
