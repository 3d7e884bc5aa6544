"""Choices between values: 0 instead of a centered row that is constant changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from normdeploy.verbs.prove.proof_result import Verdict

from .graphs import model, prove

FLAX = """
    u = ReduceMean(x, last)
    d = Sub(x, u)
    low = ReduceMin <keepdims = {keep}> (x, last)
    high = ReduceMax <keepdims = {keep}> ({of}, last)
    same = Equal(low, high)
    z = Sub(u, u)
    finite = Equal(z, zero)
    both = {condition}
    y = Where(both, {value}, {other})"""
HELD = {"last": np.array([-1]), "zero": np.float32(0), "one": np.float32(1)}
PLAIN = "u = ReduceMean(x, last) y = Sub(x, u)"
CUBE = "5, 5, 5"


def flax(shape: str, **changes: str) -> str:
    parts = {"keep": "1", "of": "x", "condition": "And(same, finite)", "value": "zero", "other": "d"}
    return FLAX.format(**(parts | changes))


@pytest.mark.parametrize("shape", ["b, s, 8", "2, 3, 8"])
def test_prove_zero_for_a_constant_row_is_equal(shape: str) -> None:
    first, second = (model(body, shape, shape, **HELD) for body in (PLAIN, flax(shape)))
    assert prove(first, second).verdict is Verdict.EQUAL


CHANGES = {
    "other value": {"value": "one"},
    "other rows": {"of": "d"},
    "or": {"condition": "Or(same, finite)"},
    "row itself": {"other": "x"},
    # The condition of the row (i, j) decides about the elements (·, i, j).
    "other axes": {"keep": "0", "condition": "Identity(same)"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_prove_other_choice_for_constant_rows_is_not_equal(name: str) -> None:
    changes = CHANGES[name]
    plain = "y = Identity(x)" if name == "row itself" else PLAIN
    first, second = (model(body, CUBE, CUBE, **HELD) for body in (plain, flax(CUBE, **changes)))
    assert not prove(first, second)
