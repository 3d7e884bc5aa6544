"""Rows without a root in the field are drawn again, and rows that have one stay."""

from __future__ import annotations

import numpy as np

from normdeploy.proof.errors import Why

from .support import BY_HAND, NODE, proved, refused

BIAS = np.linspace(-1.0, 1.0, 16)


def test_a_constant_that_all_rows_share_does_not_undo_them() -> None:
    """A bias under the root: were it drawn again for one bad row, all of sixteen would have to be good at once."""
    body = "h = Add(x, bias)" + (BY_HAND + NODE).replace("(x,", "(h,")
    for _ in range(5):
        assert proved(body, bias=BIAS).bits >= 80


def test_another_leaf_whose_axes_are_as_long_does_not_undo_them() -> None:
    """The groups of x are as many as its places along another axis, and so are those of the skip that is added."""
    body = """
        s = Add(x, skip) h = Add(s, bias) t = Transpose <perm = [0, 2, 1]> (h) r = Reshape(t, groups)
        u = ReduceMean(r, last) d = Sub(r, u) q = Mul(d, d) v = ReduceMean(q, last) e = Add(v, eps) f = Sqrt(e) before = Div(d, f)
        after = LayerNormalization <axis = -1, epsilon = 1e-5> (r, one)"""
    constants = {"bias": BIAS[:8], "groups": np.array([2, 4, -1]), "one": np.ones(8)}
    for _ in range(5):
        assert proved(body, shape="2, 4, 8", leaves=["skip: 2, 4, 8"], **constants).bits >= 80


def test_a_bias_that_is_lost_is_refused() -> None:
    refused("h = Add(x, bias)" + BY_HAND.replace("(x,", "(h,") + NODE, Why.DIFFERS, Why.LIMIT, bias=BIAS)
