"""Rows without a root in the field are drawn again, and rows that have one stay."""

from __future__ import annotations

import numpy as np
import pytest

from normdeploy.proof import identity_check, prover
from normdeploy.proof.equivalence import equivalence_of_regions
from normdeploy.proof.proof_errors import ProofFailure

from .support import BY_HAND, NODE, graph_of, proved, refused, regions

BIAS = np.linspace(-1.0, 1.0, 16)


def test_a_constant_that_all_rows_share_does_not_undo_them() -> None:
    """A bias under the root: were it drawn again for one bad row, all of sixteen would have to be good at once."""
    body = "h = Add(x, bias)" + (BY_HAND + NODE).replace("(x,", "(h,")
    for _ in range(5):
        assert proved(body, bias=BIAS).security_bits >= 80


def test_another_leaf_whose_axes_are_as_long_does_not_undo_them() -> None:
    """The groups of x are as many as its places along another axis, and so are those of the skip that is added."""
    body = """
        s = Add(x, skip) h = Add(s, bias) t = Transpose <perm = [0, 2, 1]> (h) r = Reshape(t, groups)
        u = ReduceMean(r, last) d = Sub(r, u) q = Mul(d, d) v = ReduceMean(q, last) e = Add(v, eps) f = Sqrt(e)
        before = Div(d, f)
        after = LayerNormalization <axis = -1, epsilon = 1e-5> (r, one)"""
    constants = {"bias": BIAS[:8], "groups": np.array([2, 4, -1]), "one": np.ones(8)}
    for _ in range(5):
        assert proved(body, shape="2, 4, 8", leaves=["skip: 2, 4, 8"], **constants).security_bits >= 80


def test_a_bias_that_is_lost_is_refused() -> None:
    refused(
        "h = Add(x, bias)" + BY_HAND.replace("(x,", "(h,") + NODE, ProofFailure.DIFFERS, ProofFailure.LIMIT, bias=BIAS
    )


def test_an_element_under_a_root_is_drawn_as_a_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 64 elements plus an epsilon need a root each, half have none: drawn one after the other until all do, that
    takes seven draws. And floats alone show before what is summed over."""
    begun = []
    once = identity_check.evaluate_once
    monkeypatch.setattr(
        identity_check, "evaluate_once", lambda m, sides: (begun.append(m.plan.learning), once(m, sides))[1]
    )
    rng = np.random.default_rng(3)
    constants = {name: rng.uniform(0.5, 1.5, 64) for name in ("scale", "shift", "mean", "variance")}
    body = """y = Conv <kernel_shape = [1], group = 1> (x, w)
        before = BatchNormalization <epsilon = 1e-5> (y, scale, shift, mean, variance)
        z = Conv <kernel_shape = [1], group = 1> (x, w)
        after = BatchNormalization <epsilon = 1e-5> (z, scale, shift, mean, variance)"""
    graph = graph_of(body, shape="N, 64, L", w=rng.standard_normal((64, 64, 1)), **constants)
    before, after = regions(graph)
    for _ in range(9):
        found = prover.prove_identity(equivalence_of_regions([before], [after]))
        assert found.security_bits >= 80
    assert not any(begun)
    assert len(begun) <= 9 * 4  # one that finds no roots, one that shows it, and now and then one more
