"""Ops of the proofs' language that no norm's own test covers."""

from __future__ import annotations

import numpy as np
import pytest

from normdeploy.proof.proof_errors import ProofFailure

from .support import proved, refused

PER_SAMPLE = """
    size = Shape<start = 0, end = 1>(x)
    many = Tile({p}, size)
    flat = Reshape(x, one)
    scaled = Mul(flat, many)
    shape = Shape(x)
    before = Reshape(scaled, shape)
    after = Mul(x, p)"""


@pytest.mark.parametrize("shape", ["B, 16", "3, 16", "16, 16"])
def test_a_tile_repeats_the_elements(shape: str) -> None:
    proved(PER_SAMPLE.format(p="p"), shape=shape, one=np.array([-1]), p=np.arange(16.0) + 1)


@pytest.mark.parametrize("shape", ["B, 16", "3, 16"])
def test_a_tile_of_other_elements_is_refused(shape: str) -> None:
    other = np.arange(16.0) + 1
    other[5] = 7
    body = PER_SAMPLE.format(p="q")
    refused(body, ProofFailure.DIFFERS, shape=shape, one=np.array([-1]), p=np.arange(16.0) + 1, q=other)


def test_a_tile_repeats_the_whole_not_each_element() -> None:
    """[a, b, a, b] is no [a, a, b, b]."""
    body = """
        wide = Expand(column, to)
        twice = Reshape(wide, flat)
        before = Mul(x, twice)
        many = Tile(p, two)
        after = Mul(x, many)"""
    p = np.arange(16.0) + 1
    constants = {"column": p[:, None], "to": np.array([16, 2]), "flat": np.array([32]), "two": np.array([2])}
    refused(body, ProofFailure.DIFFERS, ProofFailure.LAYOUT, shape="B, 32", p=p, **constants)


def test_a_tile_over_two_axes_is_one_of_each() -> None:
    body = "before = Tile(x, both) a = Tile(x, first) after = Tile(a, second)"
    counts = {"both": np.array([3, 2]), "first": np.array([3, 1]), "second": np.array([1, 2])}
    proved(body, shape="B, 16", **counts)
    refused(body, ProofFailure.SIZE, shape="B, 16", **(counts | {"second": np.array([2, 1])}))


def test_a_tile_that_may_be_empty_is_refused() -> None:
    refused("before = Tile(x, none) after = Tile(x, none)", ProofFailure.SIZE, shape="B, 4", none=np.array([0, 1]))
