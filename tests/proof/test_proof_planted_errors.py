"""Every error that was once planted and passed: each is refused, and what it was planted in is proved."""

from __future__ import annotations

import numpy as np
import pytest

from normdeploy.proof.proof_errors import ProofFailure

from .support import BY_HAND, NODE, proved, refused

OF_NODE = "norm = LayerNormalization <axis = -1, epsilon = 1e-5> (x, gamma, beta)"
OPS = (ProofFailure.OP,)
ANY = (ProofFailure.OP, ProofFailure.SIZE)


def test_the_norm_itself_is_proved() -> None:
    found = proved(BY_HAND + NODE)
    assert not found.parameters
    assert found.security_bits >= 80


# the text after the norm by hand: what the file is said to compute now
AFTER = {
    "zero where x = 7.25": "at = Equal(x, seven) after = Where(at, zero, norm)",
    "zero where x > 1e5": "at = Greater(x, large) after = Where(at, zero, norm)",
    "zero where 0 < x < 1e-9": "a = Greater(x, zero) b = Less(x, small) at = And(a, b) after = Where(at, zero, norm)",
    "zero where the whole row is negative": (
        "top = ReduceMax(x, last) at = Less(top, zero) after = Where(at, zero, norm)"
    ),
    "NaN becomes 0": "at = IsNaN(norm) after = Where(at, zero, norm)",
    "clipped at -25": "after = Clip(norm, low)",
    "clipped at 5e4 and -5e4": "after = Clip(norm, lowest, highest)",
    "an upper limit": "after = Min(norm, highest)",
    "rounded": "a = Mul(norm, large) b = Round(a) after = Div(b, large)",
    "a bump of Exp": "a = Sub(x, seven) b = Mul(a, a) c = Neg(b) bump = Exp(c) after = Add(norm, bump)",
    "by bool": "a = Cast <to = 9> (x) b = Cast <to = 1> (a) after = Mul(norm, b)",
}


@pytest.mark.parametrize("name", AFTER)
def test_piecewise_after_the_norm_is_refused(name: str) -> None:
    numbers = {"seven": 7.25, "large": 1e5, "small": 1e-9, "zero": 0.0, "low": -25.0, "lowest": -5e4, "highest": 5e4}
    refused(BY_HAND + OF_NODE + "\n" + AFTER[name], *OPS, **numbers)


# wrong at some sizes alone: n is the length S of x, or its batch B
SIZES = {
    "wrong only at S > 7": ("S", "big = Greater(many, seven)"),
    "wrong only at S = 3": ("S", "big = Equal(many, three)"),
    "wrong only at S = 1": ("S", "big = Equal(many, one)"),
    "wrong beyond a batch of 12": ("B", "big = Greater(many, twelve)"),
}


@pytest.mark.parametrize("name", SIZES)
def test_wrong_at_some_sizes_is_refused(name: str) -> None:
    dim, test = SIZES[name]
    start = 0 if dim == "B" else 1
    body = (
        f"{BY_HAND} {OF_NODE} many = Shape <start = {start}, end = {start + 1}> (x) {test} after = Where(big, zero,"
        " norm)"
    )
    refused(body, *ANY, seven=np.array([7]), three=np.array([3]), one=np.array([1]), twelve=np.array([12]), zero=0.0)


def test_a_mask_by_position_is_refused() -> None:
    """torch.where(torch.arange(n) < 32, x, 0) before the norm: lost where n > 32."""
    mask = """
        many = Shape <start = 1, end = 2> (x)
        k = Squeeze(many)
        at = Range(none, k, step)
        m = Less(at, limit)
        m2 = Unsqueeze(m, last)
        kept = Where(m2, x, zero)"""
    body = mask + BY_HAND.replace("(x,", "(kept,") + NODE
    refused(body, *ANY, none=np.array(0), step=np.array(1), limit=np.array(32), zero=0.0)


def test_a_clamped_size_as_the_divisor_is_refused() -> None:
    by_sum = """
        many = Shape <start = 2> (x)
        few = Min(many, most)
        f = Cast <to = 1> (few)
        u = ReduceMean(x, last)
        d = Sub(x, u)
        q = Mul(d, d)
        s = ReduceSum(q, last)
        v = Div(s, f)
        e = Add(v, eps)
        r = Sqrt(e)
        before = Div(d, r)
        after = LayerNormalization <axis = -1, epsilon = 1e-5> (x, one)"""
    refused(by_sum, ProofFailure.SIZE, ProofFailure.OP, shape="B, S, H", most=np.array([64]), one=np.ones((1, 1)))
    plain = by_sum.replace("few = Min(many, most)", "few = Identity(many)")
    proved(plain, shape="B, S, H", one=np.ones((1, 1)))  # the same without the limit holds at every size


def test_wrong_beyond_row_100_of_a_static_axis_is_refused() -> None:
    weight = np.ones((200, 1))
    weight[100:] = 1.001
    refused(
        BY_HAND + OF_NODE + " after = Mul(norm, weight)",
        ProofFailure.DIFFERS,
        ProofFailure.STORED,
        shape="B, 200, 16",
        weight=weight,
    )


def test_the_smallest_of_channels_spread_over_1e10_counts() -> None:
    gamma = np.logspace(-5, 5, 16).astype(np.float32)
    other = gamma.copy()
    other[0] = 0
    node = NODE.replace("gamma", "other")
    refused(BY_HAND + node, ProofFailure.STORED, ProofFailure.DIFFERS, gamma=gamma, other=other)
    other[0] = np.nextafter(gamma[0], np.float32(1))
    refused(BY_HAND + node, ProofFailure.STORED, ProofFailure.DIFFERS, gamma=gamma, other=other)
    proved(BY_HAND + node, gamma=gamma, other=gamma)


WRONG_NODES = {
    "another epsilon": NODE.replace("1e-5", "1.0001e-5"),
    "epsilon one ulp off": NODE.replace("1e-5", str(float(np.nextafter(np.float32(1e-5), np.float32(1))))),
    "another axis": (
        "t = Transpose <perm = [0, 2, 1]> (x) m = LayerNormalization <axis = -1, epsilon = 1e-5> (t, unit)"
        " a = Transpose <perm = [0, 2, 1]> (m) b = Mul(a, gamma) after = Add(b, beta)"
    ),
    "gamma in another order": NODE.replace("gamma", "turned"),
    "no mean": (
        "s = Mul(x, x) m = ReduceMean(s, last) w = Add(m, eps) z = Sqrt(w) y = Div(x, z) p = Mul(y, gamma) after ="
        " Add(p, beta)"
    ),
    "negative": "m = LayerNormalization <axis = -1, epsilon = 1e-5> (x, gamma, beta) after = Neg(m)",
    "without beta": "after = LayerNormalization <axis = -1, epsilon = 1e-5> (x, gamma)",
}


@pytest.mark.parametrize("name", WRONG_NODES)
def test_another_norm_is_refused(name: str) -> None:
    turned = np.random.default_rng(3).uniform(0.5, 1.5, 16).astype(np.float32)[::-1].copy()
    refused(
        BY_HAND + WRONG_NODES[name],
        ProofFailure.DIFFERS,
        ProofFailure.STORED,
        ProofFailure.LIMIT,
        shape="B, 16, 16",
        turned=turned,
        unit=np.ones(16),
    )
