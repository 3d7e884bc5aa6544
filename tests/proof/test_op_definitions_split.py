"""A Split is the inverse of a Concat: norms of parts are one norm, unless its statistics span the parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from normdeploy.proof.proof_errors import ProofFailure

from .support import proved, refused

PARTS = {"equal": [1, 1, 1], "of two": [2, 2, 2], "unequal": [2, 2, 1]}


def parts_of(op: str, sizes: Sequence[int], axis: int) -> str:
    """Apply ``op`` to each part; "#" in it is the part, and "@" the part's number."""
    names = ", ".join(f"p{i}" for i in range(len(sizes)))
    each = " ".join(f"n{i} = {op.replace('#', f'p{i}').replace('@', str(i))}" for i in range(len(sizes)))
    joined = ", ".join(f"n{i}" for i in range(len(sizes)))
    return f"{names} = Split<axis = {axis}>(x, sizes) {each} before = Concat<axis = {axis}>({joined})"


LAYER = "LayerNormalization<axis = -1, epsilon = 1e-5>(#, gamma, beta)"
GROUP = "GroupNormalization<num_groups = 4>(#, gamma, beta)"


@pytest.mark.parametrize("rest", ["S", "5"])
@pytest.mark.parametrize("name", PARTS)
def test_layer_norms_of_parts_are_one(name: str, rest: str) -> None:
    sizes = PARTS[name]
    body = f"{parts_of(LAYER, sizes, 1)} after = {LAYER.replace('#', 'x')}"
    proved(body, shape=f"B, {sum(sizes)}, {rest}, 16", sizes=np.array(sizes))


def test_as_many_parts_as_elements_in_a_row_are_one() -> None:
    body = f"{parts_of(LAYER, [1] * 16, 1)} after = {LAYER.replace('#', 'x')}"
    proved(body, shape="B, 16, S, 16", sizes=np.ones(16, np.int64))


@pytest.mark.parametrize("rest", ["h, w", "5, 6"])
@pytest.mark.parametrize("name", PARTS)
def test_group_norms_of_parts_of_the_batch_are_one(name: str, rest: str) -> None:
    sizes = PARTS[name]
    body = f"{parts_of(GROUP, sizes, 0)} after = {GROUP.replace('#', 'x')}"
    proved(body, shape=f"{sum(sizes)}, 16, {rest}", sizes=np.array(sizes))


def test_statistics_of_each_part_are_not_those_of_the_whole() -> None:
    """The split axis is normalized: along the row, and along the channels of a group."""
    node = "LayerNormalization<axis = -1, epsilon = 1e-5>({}, one)"
    row = parts_of(node.format("#"), [8, 8], 2)
    why = (ProofFailure.DIFFERS, ProofFailure.SIGN, ProofFailure.LIMIT)
    one = {"one": np.ones(1), "sizes": np.array([8, 8])}
    refused(f"{row} after = {node.format('x')}", *why, **one)
    both = "LayerNormalization<axis = 1, epsilon = 1e-5>({}, one)"
    refused(f"{parts_of(both.format('#'), [8, 8], 1)} after = {both.format('x')}", *why, shape="B, 16, 16", **one)


@pytest.mark.parametrize("change", ["epsilon", "order", "missing", "gamma"])
def test_a_difference_in_one_part_is_seen(change: str) -> None:
    body = parts_of(LAYER, [1, 1, 1], 1)
    changed = {
        "epsilon": body.replace("epsilon = 1e-5>(p1", "epsilon = 1e-4>(p1"),
        "order": body.replace("(n0, n1, n2)", "(n0, n2, n1)"),
        "missing": body.replace("(n0, n1, n2)", "(n0, n1, n1)"),
        "gamma": body.replace("(p1, gamma, beta)", "(p1, beta, gamma)"),
    }[change]
    assert changed != body
    refused(
        f"{changed} after = {LAYER.replace('#', 'x')}",
        *(ProofFailure.DIFFERS, ProofFailure.SIGN, ProofFailure.LIMIT),
        shape="B, 3, S, 16",
        sizes=np.array([1, 1, 1]),
    )


@pytest.mark.parametrize("sizes", [[2, 2], [1, 1, 2], [3, 0]])
def test_sizes_that_are_not_those_of_the_axis_are_refused(sizes: list[int]) -> None:
    body = f"{parts_of('Identity(#)', sizes, 1)} after = Identity(x)"
    refused(body, ProofFailure.SIZE, shape="B, 3, 16", sizes=np.array(sizes))


def test_an_open_axis_is_refused() -> None:
    refused(
        "a, b = Split<axis = 1, num_outputs = 2>(x) before = Concat<axis = 1>(a, b) after = Identity(x)",
        ProofFailure.SIZE,
    )


def test_a_split_without_sizes_has_a_smaller_last_part() -> None:
    body = """a, b = Split<axis = 1, num_outputs = 2>(x) before = Identity(a)
        c, d = Split<axis = 1>(x, sizes) after = Identity({})"""
    proved(body.format("c"), shape="B, 5, 16", sizes=np.array([3, 2]))
    refused(body.format("d"), ProofFailure.SIZE, shape="B, 5, 16", sizes=np.array([3, 2]))


def test_parts_have_their_own_elements() -> None:
    body = "a, b = Split<axis = 1, num_outputs = 2>(x) before = Sub(a, {}) after = Sub(a, b)"
    refused(body.format("a"), ProofFailure.DIFFERS, ProofFailure.HIDDEN, shape="B, 4, 16")
