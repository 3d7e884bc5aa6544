"""Residues against Python's integers and fractions."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest

from normdeploy.verbs.prove.residues import RandomFunctions, Residues, draw_primes


@pytest.fixture
def field() -> Residues:
    return Residues(draw_primes(3, random.Random(1)))


def test_draw_primes_are_distinct_and_of_31_bits() -> None:
    primes = draw_primes(20, random.Random(2))
    assert len(set(primes)) == 20
    for p in primes:
        assert 2**30 < p < 2**31
        assert all(p % d for d in range(2, 2000))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_from_floats_is_exact(field: Residues, dtype: type) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal(50), [0.0, -0.0, 1.0, -2.5, 6e-8]]).astype(dtype)
    made = field.from_floats(x)
    for j, p in enumerate(field.primes):
        for value, residue in zip(x.tolist(), made[j].tolist(), strict=True):
            exact = Fraction(value)
            assert residue == exact.numerator * pow(exact.denominator, -1, p) % p


def test_from_floats_of_extreme_float32_is_exact(field: Residues) -> None:
    x = np.array([1e-45, -1e-44, 3e38, -1.2e-38], np.float32)
    assert np.array_equal(field.from_floats(x), field.from_floats(x.astype(np.float64)))


def test_matmul_agrees_with_integers(field: Residues) -> None:
    rng = np.random.default_rng(0)
    a = np.stack([rng.integers(0, p, (2, 5, 300)) for p in field.primes])
    b = np.stack([rng.integers(0, p, (300, 4)) for p in field.primes])
    made = field.matmul(a, b)
    for j, p in enumerate(field.primes):
        assert np.array_equal(made[j], (a[j].astype(object) @ b[j].astype(object)) % p)


def test_inverse_times_number_is_one(field: Residues) -> None:
    a = np.stack([np.arange(1, 50)] * 3)
    assert (field.multiply(a, field.inverse(a)) == 1).all()


def test_inverse_of_zero_raises(field: Residues) -> None:
    with pytest.raises(ZeroDivisionError):
        field.inverse(np.zeros((3, 2), np.int64))


def test_unknown_functions_agree_only_for_equal_arguments_and_names(field: Residues) -> None:
    functions = RandomFunctions(field, 7)
    a = functions.fill("a", (40,))
    b = a.copy()
    # One argument differs modulo one prime only.
    b[1, 3] = (b[1, 3] + 1) % field.primes[1]
    one, other = functions.apply("f", a), functions.apply("f", b)
    assert np.array_equal(one[:, 4:], other[:, 4:])
    assert (one[:, 3] != other[:, 3]).all()
    assert (functions.apply("g", a) != one).all()
