"""Constants that repeat a piece have the variables of the piece, at every layout of their axes."""

from __future__ import annotations

import numpy as np
import pytest

from normdeploy.proof.proof_errors import ProofFailure
from normdeploy.proof.sampler import StoredConstant

from .support import proved, refused

P = np.arange(8.0) + 1


@pytest.mark.parametrize(
    ("array", "periods"),
    [
        (np.tile(P, 3), (8,)),
        (P, (None,)),
        (np.repeat(P, 3), (None,)),
        (np.array([1.0, 2, 1, 2, 1]), (None,)),
        (np.array([1.0, 1, 2, 1, 1, 2]), (3,)),
        (np.tile(P, (4, 1)), (1, None)),
        (np.tile(P, 3).reshape(1, 24, 1), (None, 8, None)),
        (np.tile(P, (4, 2)) + np.arange(4.0)[:, None] // 2, (None, 8)),
    ],
)
def test_the_shortest_piece_of_each_axis_is_found(array: np.ndarray, periods: tuple[int | None, ...]) -> None:
    assert StoredConstant(array).periods == periods


def test_last_digits_count() -> None:
    rest = np.zeros(16)
    assert StoredConstant(np.tile(P, 2), rest=rest).periods == (8,)
    rest[9] = 1e-17
    assert StoredConstant(np.tile(P, 2), rest=rest).periods == (None,)


# Each sample's own value is the average over the samples only if all samples have the same.
AVERAGE = """
    flat = Reshape(x, wide)
    zero = Sub(flat, flat)
    each = Add(zero, many)
    before = Reshape(each, back)
    mean = ReduceMean(before, samples)
    zeros = Sub(x, x)
    after = Add(mean, zeros)"""
SHAPES = {"wide": np.array([24]), "back": np.array([3, 8]), "samples": np.array([0])}


def test_a_piece_for_each_sample_is_one_piece() -> None:
    proved(AVERAGE, shape="3, 8", many=np.tile(P, 3), **SHAPES)


@pytest.mark.parametrize("at", [0, 9, 23])
def test_pieces_that_differ_in_one_element_are_told_apart(at: int) -> None:
    many = np.tile(P, 3)
    many[at] += 1
    refused(AVERAGE, ProofFailure.DIFFERS, shape="3, 8", many=many, **SHAPES)


def test_elements_that_each_repeat_are_no_piece() -> None:
    refused(AVERAGE, ProofFailure.DIFFERS, shape="3, 8", many=np.repeat(P, 3), **SHAPES)
