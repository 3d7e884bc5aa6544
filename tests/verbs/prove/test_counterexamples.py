"""Differences in float64 that ``prove`` shows, and those that rounding explains."""

from __future__ import annotations

import numpy as np

from normdeploy.verbs.prove.counterexamples import find_difference
from normdeploy.verbs.prove.file_pair import OpenFile, pair_files

from .graphs import model

# Both products are the same number in exact arithmetic, and round differently in float64.
ONE_ORDER = "a = Mul(x, p)\n a2 = Mul(a, q)\n p1 = Mul(a2, r)"
OTHER_ORDER = "b = Mul(x, r)\n b2 = Mul(b, q)\n p2 = Mul(b2, p)"


def difference(first: str, second: str, **constants: float):
    values = {name: np.array(value) for name, value in constants.items()}
    pair = pair_files(OpenFile(model(first, **values), "A"), OpenFile(model(second, **values), "B"), {})
    return find_difference(pair, [{}])


def test_a_result_that_cancels_shows_no_difference() -> None:
    zero = f"{OTHER_ORDER}\n y = Sub(p2, p2)"
    noise = f"{ONE_ORDER}\n {OTHER_ORDER}\n y = Sub(p1, p2)"
    assert difference(zero, noise, p=1.1, q=1.3, r=1.7).shown is None
    assert difference(noise, zero, p=1.1, q=1.3, r=1.7).shown is None


def test_a_change_beside_a_result_that_cancels_is_shown() -> None:
    zero = f"{OTHER_ORDER}\n y = Sub(p2, p2)"
    changed = f"{ONE_ORDER}\n {OTHER_ORDER}\n p3 = Mul(p2, near)\n y = Sub(p1, p3)"
    assert difference(zero, changed, p=1.1, q=1.3, r=1.7, near=1.0 + 2.0**-23).shown is not None


def test_a_float_that_holds_a_size_is_not_moved() -> None:
    body = "s = Shape(x)\n n = Cast <to = 1> (s)\n k = Floor(n)\n i = Cast <to = 7> (k)\n t = Cast <to = 1> (i)\n"
    first = f"{body} m = ReduceSum <keepdims = 0> (t)\n y = Mul(x, m)"
    second = f"{body} m = ReduceSum <keepdims = 0> (t)\n w = Mul(m, near)\n y = Mul(x, w)"
    assert difference(first, second, near=1.0 + 2.0**-23).shown is not None
