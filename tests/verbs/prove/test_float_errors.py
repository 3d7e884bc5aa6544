"""Bounds of rounding errors against float32 and fractions, and constants that another program folded."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from normdeploy.verbs.prove.float_errors import UNITS, Approx
from normdeploy.verbs.prove.proof_result import Verdict

from .graphs import model, prove


def stored(x: np.ndarray) -> Approx:
    wide = np.asarray(x, np.float32).astype(np.float64)
    return Approx(wide, np.zeros(wide.shape), UNITS[1])


def test_bound_of_a_folded_norm_covers_both_orders_of_float32() -> None:
    rng = np.random.default_rng(0)
    gamma, variance, weight = (rng.uniform(0.5, 2, 4000).astype(np.float32) for _ in range(3))
    exact = stored(variance).plus(stored(np.full(4000, 1e-5))).inverse_root().times(stored(gamma)).times(stored(weight))
    root = np.sqrt(variance + np.float32(1e-5))
    for made in (weight * (gamma / root), weight * (gamma * (1 / root)), weight * gamma / root):
        error = np.abs(made.astype(np.float64) - exact.numbers)
        assert (error <= exact.error).all()
        # Half an ulp for each of five roundings, of which the first counts half
        assert (exact.error <= 4.51 * 2.0**-24 * np.abs(exact.numbers)).all()


def test_bound_of_a_sum_covers_float32() -> None:
    x = np.random.default_rng(0).standard_normal((50, 300)).astype(np.float32)
    total = np.zeros(50, np.float32)
    for column in x.T:
        total = total + column
    made = stored(x).sum((1,), keepdims=False)
    exact = np.array([float(sum(map(Fraction, row.tolist()))) for row in x])
    assert (np.abs(made.numbers - exact) <= 2.0**-45).all()
    assert (np.abs(total - exact) <= made.error).all()


def test_bound_is_infinite_where_an_error_reaches_a_pole() -> None:
    tiny = stored(np.array([1.0])).plus(stored(np.array([1e-9]))).minus(stored(np.array([1.0])))
    assert np.isinf(tiny.inverse().error).all()


FOLDS = {
    "sum of two": ("c = Add(a, b) y = Mul(x, c)", lambda a, b: a + b),
    "difference of equal numbers": ("c = Sub(a, a) y = Add(x, c)", lambda a, b: a - a),
    "product": ("c = Mul(a, b) y = Add(x, c)", lambda a, b: a * b),
    "quotient": ("c = Div(a, b) y = Add(x, c)", lambda a, b: a / b),
}


@pytest.mark.parametrize("name", FOLDS)
def test_prove_folded_constant_beyond_its_roundings_is_not_equal(name: str) -> None:
    text, fold = FOLDS[name]
    rng = np.random.default_rng(1)
    a, b = (rng.uniform(0.5, 2, 8).astype(np.float32) for _ in range(2))
    second = "y = Mul(x, k)" if "y = Mul" in text else "y = Add(x, k)"
    first = model(text, a=a, b=b)
    folded = fold(a, b)
    assert prove(first, model(second, k=folded))
    # Between 4 and 8 half ulps, which is more than the roundings of 1/b and of the product
    changed = folded.copy()
    changed[3] = changed[3] * (1 + 2.0**-21) + np.float32(1e-8)
    assert prove(first, model(second, k=changed)).verdict is not Verdict.ROUNDED
