"""Roots whose arguments differ by a number: unbiased variances, sums for means, and rounded epsilons."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import onnx
import pytest

from normdeploy.verbs.prove.proof_result import Verdict
from normdeploy.verbs.prove.residues import draw_primes
from normdeploy.verbs.prove.root_ratios import fraction_residues, reconstruct_fraction

from .graphs import model, prove

ROWS = "b, s, 8"
LAST = np.array([-1])
UNBIASED = """
    u = ReduceMean(x, last)
    d = Sub(x, u)
    q = Mul(d, d)
    t = ReduceSum(q, last)
    v = Div(t, seven)
    e = Add(v, eps)
    r = Sqrt(e)
    n = Div(d, r)
    y = Mul(n, gamma)"""


@pytest.fixture
def primes() -> tuple[int, ...]:
    return draw_primes(8, random.Random(1))


@pytest.mark.parametrize("number", [Fraction(0), Fraction(15, 16), Fraction(-7, 3), Fraction(2**59 + 1, 2**58 + 3)])
def test_reconstruct_fraction_finds_small_fraction(primes: tuple[int, ...], number: Fraction) -> None:
    assert reconstruct_fraction(fraction_residues(number, primes).tolist(), primes) == number


def test_reconstruct_fraction_refuses_random_residues_and_few_primes(primes: tuple[int, ...]) -> None:
    rng = random.Random(2)
    for _ in range(100):
        assert reconstruct_fraction([rng.randrange(p) for p in primes], primes) is None
    assert reconstruct_fraction([1, 1], primes[:2]) is None


@pytest.fixture
def gamma() -> np.ndarray:
    return np.random.default_rng(0).uniform(0.5, 1.5, 8).astype(np.float32)


def unbiased(gamma: np.ndarray, epsilon: float = 1e-5, divisor: float = 7.0) -> onnx.ModelProto:
    held = {"last": LAST, "seven": np.float32(divisor), "eps": np.float32(epsilon), "gamma": gamma}
    return model(UNBIASED, ROWS, ROWS, **held)


def fused(gamma: np.ndarray, epsilon: float, scale: float) -> onnx.ModelProto:
    """Build a LayerNormalization with γ·scale; epsilon is stored in float32."""
    scaled = (gamma.astype(np.float64) * scale).astype(np.float32)
    body = f"y = LayerNormalization <axis = -1, epsilon = {float(np.float32(epsilon))!r}> (x, gamma)"
    return model(body, ROWS, ROWS, gamma=scaled)


def test_prove_unbiased_variance_as_norm_with_rounded_constants(gamma: np.ndarray) -> None:
    epsilon = float(np.float32(1e-5)) * 7 / 8
    proof = prove(unbiased(gamma), fused(gamma, epsilon, np.sqrt(7 / 8)))
    assert proof.verdict is Verdict.ROUNDED
    assert {r.name for r in proof.rounded} == {"gamma", f"epsilon {float(np.float32(epsilon)):.9g}"}
    assert all(r.ulps < 0.51 for r in proof.rounded)


@pytest.mark.parametrize(
    ("epsilon", "scale"),
    [
        (1e-5, np.sqrt(7 / 8)),
        (1e-5 * 7 / 8 * (1 + 3e-7), np.sqrt(7 / 8)),
        (1e-5 * 7 / 8, np.sqrt(6 / 8)),
        (1e-5 * 7 / 8, np.sqrt(7 / 8) * (1 + 3e-7)),
        (1e-5 * 7 / 8, 7 / 8),
        (1e-5 * 7 / 8, -np.sqrt(7 / 8)),
    ],
)
def test_prove_unbiased_variance_with_other_constants_is_not_equal(
    gamma: np.ndarray, epsilon: float, scale: float
) -> None:
    assert not prove(unbiased(gamma), fused(gamma, epsilon, float(scale)))


def test_prove_unbiased_variance_without_epsilon_is_defined_alike(gamma: np.ndarray) -> None:
    body = UNBIASED.replace("e = Add(v, eps)", "e = Identity(v)")
    first = model(body, ROWS, ROWS, last=LAST, seven=np.float32(7), gamma=gamma)
    biased = body.replace("t = ReduceSum(q, last)", "v = ReduceMean(q, last)").replace("v = Div(t, seven)", "")
    scaled = (gamma.astype(np.float64) * np.sqrt(7 / 8)).astype(np.float32)
    second = model(biased, ROWS, ROWS, last=LAST, gamma=scaled)
    assert prove(first, second).verdict is Verdict.ROUNDED
    # A divisor that may be zero in one file only
    shifted = model(
        biased.replace("r = Sqrt(e)", "z = Sqrt(e) r = Sub(z, one)"), ROWS, ROWS, last=LAST, gamma=scaled, one=1.0
    )
    assert not prove(first, shifted)


def test_prove_scaled_constant_is_repeated_along_axes() -> None:
    first = model(UNBIASED, ROWS, ROWS, last=LAST, seven=np.float32(7), eps=np.float32(1e-5), gamma=np.float32(0.7))
    second = fused(np.full(8, 0.7, np.float32), float(np.float32(1e-5)) * 7 / 8, np.sqrt(7 / 8))
    assert prove(first, second).verdict is Verdict.ROUNDED


TRUE = {
    "four times the argument": (
        "a = Mul(q, four) r = Sqrt(a) y = Add(r, x)",
        "a = Sqrt(q) r = Mul(a, two) y = Add(r, x)",
    ),
    "half the root": ("a = Div(q, four) r = Sqrt(a) y = Add(r, x)", "a = Sqrt(q) r = Div(a, two) y = Add(r, x)"),
}


@pytest.mark.parametrize("name", TRUE)
def test_prove_root_of_a_square_multiple_is_equal(name: str) -> None:
    first, second = (model("q = Exp(x) " + body, four=np.float32(4), two=np.float32(2)) for body in TRUE[name])
    assert prove(first, second).verdict is Verdict.EQUAL


FALSE = {
    "negative multiple": (
        "a = Mul(q, two) r = Sqrt(a) y = Add(r, x)",
        "b = Neg(q) a = Mul(b, two) r = Sqrt(a) y = Add(r, x)",
    ),
    "root of the number": ("a = Mul(q, four) r = Sqrt(a) y = Add(r, x)", "a = Sqrt(q) r = Mul(a, four) y = Add(r, x)"),
    "one element scaled": ("a = Mul(q, ones) r = Sqrt(a) y = Add(r, x)", "a = Mul(q, most) r = Sqrt(a) y = Add(r, x)"),
}


@pytest.mark.parametrize("name", FALSE)
def test_prove_root_of_another_multiple_is_not_equal(name: str) -> None:
    most = np.full(8, 4.0)
    most[3] = 9.0
    held = {"four": np.float32(4), "two": np.float32(2), "ones": np.full(8, 4.0), "most": most}
    first, second = (model("q = Exp(x) " + body, **held) for body in FALSE[name])
    assert not prove(first, second)


def test_prove_quotient_of_open_sizes_is_a_number() -> None:
    by_sizes = """
        n = Size(x) m = Cast <to = 1> (n)
        s = ReduceSum(x, last) k = Size(s) l = Cast <to = 1> (k)
        c = Div(m, l) o = Max(c, one) y = Div(x, o)"""
    held = {"last": LAST, "one": np.float32(1), "eight": np.float32(8)}
    first = model(by_sizes, ROWS, ROWS, **held)
    assert prove(first, model("y = Div(x, eight)", ROWS, ROWS, **held)).verdict is Verdict.EQUAL
    assert not prove(first, model("y = Mul(x, eight)", ROWS, ROWS, **held))
