"""What may be divided by: V + ε is not zero where ε is positive, however it is written. No root is near that would say
it too."""

from __future__ import annotations

import numpy as np
import pytest

from normdeploy.proof.proof_errors import ProofFailure

from .support import proved, refused

VARIANCE = "u = ReduceMean(x, last) d = Sub(x, u) q = Mul(d, d) v = ReduceMean(q, last)"
INVERSE = "i = Div(one, w) before = Mul(d, i) after = Mul(i, d)"
ONE, BELOW = np.float32(1), np.float32(-1e-5)


@pytest.mark.parametrize(
    "sum_",
    [
        "w = Add(v, eps)",
        "w = Sub(v, below)",
        "m = Neg(below) w = Add(v, m)",
        "m = Neg(v) w = Sub(eps, m)",
    ],
)
def test_a_sum_of_what_is_positive_is_divided_by(sum_: str) -> None:
    proved(f"{VARIANCE} {sum_} {INVERSE}", one=ONE, below=BELOW, eps=-BELOW)


@pytest.mark.parametrize(
    "sum_",
    [
        "w = Add(v, below)",
        "w = Sub(v, eps)",
        "m = Neg(v) w = Add(m, eps)",
        "m = Neg(v) w = Sub(m, below)",
        "m = Abs(below) w = Sub(v, m)",
        "m = Max(eps, zero) w = Sub(v, m)",
    ],
)
def test_a_difference_is_not(sum_: str) -> None:
    refused(f"{VARIANCE} {sum_} {INVERSE}", ProofFailure.SIGN, one=ONE, below=BELOW, zero=np.float32(0))


@pytest.mark.parametrize("w", ["w = Mul(d, two)", "w = Mul(two, d)", "r = Div(one, e) w = Mul(d, r)"])
def test_a_product_is_not_where_one_factor_may_be_zero(w: str) -> None:
    refused(f"{VARIANCE} e = Add(v, eps) {w} {INVERSE}", ProofFailure.SIGN, one=ONE, two=np.float32(2))
