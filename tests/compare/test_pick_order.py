"""Orders of scores that rounding explains."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from normdeploy.compare.pick_order import PassedTie, find_passed_tie, find_widest_inversion

SCORES = np.array([1.0, 0.9, 0.5, 0.1])


def is_possible(
    scores: np.ndarray, room: np.ndarray, picks: tuple[int, ...], *, largest: bool = True, in_order: bool = True
) -> bool:
    pair = find_widest_inversion(scores, room, np.array(picks), 0, largest=largest, in_order=in_order)
    return pair is None or pair.ratio <= 1


def test_order_of_the_scores_has_no_inversion() -> None:
    assert find_widest_inversion(SCORES, np.zeros(4), np.array([0, 1, 2]), 0) is None


def test_reversed_pair_is_possible_up_to_the_sum_of_both_errors() -> None:
    assert is_possible(SCORES, np.full(4, 0.051), (1, 0))
    assert not is_possible(SCORES, np.full(4, 0.049), (1, 0))


def test_score_that_is_left_out_is_compared_with_the_last_pick() -> None:
    pair = find_widest_inversion(SCORES, np.full(4, 0.1), np.array([0, 2]), 0)
    assert pair is not None
    assert (pair.first, pair.second, round(pair.gap, 9), pair.room) == (0.5, 0.9, 0.4, 0.2)


def test_chain_of_small_inversions_that_exceeds_the_errors_is_not_possible() -> None:
    scores = np.array([3.0, 2.0, 1.0])
    # Each pair of neighbors may be reversed, but the first and the last score may not.
    assert is_possible(scores, np.full(3, 0.6), (1, 0, 2))
    assert not is_possible(scores, np.full(3, 0.6), (2, 1, 0))
    assert is_possible(scores, np.full(3, 1.0), (2, 1, 0))


def test_without_order_only_the_set_of_picks_counts() -> None:
    assert is_possible(SCORES, np.zeros(4), (1, 0), in_order=False)
    assert not is_possible(SCORES, np.zeros(4), (0, 2), in_order=False)


def test_smallest_scores_first() -> None:
    assert is_possible(SCORES, np.zeros(4), (3, 2), largest=False)
    assert not is_possible(SCORES, np.zeros(4), (0, 1), largest=False)


def test_equal_infinities_have_no_gap() -> None:
    masked = np.array([1.0, -np.inf, -np.inf])
    assert is_possible(masked, np.zeros(3), (0, 2, 1))
    assert not is_possible(masked, np.zeros(3), (2, 0, 1))


@pytest.mark.parametrize("seed", range(20))
def test_possible_orders_are_those_of_scores_within_their_errors(seed: int) -> None:
    """A program with few inequalities decides each order: scores in the intervals that never increase."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 6, 4).astype(float)
    room = rng.integers(0, 3, 4) / 2
    for picks in itertools.permutations(range(4), 3):
        left_out = next(i for i in range(4) if i not in picks)
        order = [*picks, left_out]
        # The highest possible scores in this order.
        highest = np.minimum.accumulate((scores + room)[order])
        assert is_possible(scores, room, picks) == bool((highest >= (scores - room)[order]).all())


def test_rows_of_any_axis_are_checked() -> None:
    scores = np.stack([SCORES, SCORES[::-1]], axis=1)
    picks = np.array([[0, 3], [1, 2]])
    assert find_widest_inversion(scores, np.zeros(scores.shape), picks, 0) is None
    assert find_widest_inversion(scores, np.zeros(scores.shape), picks[:, ::-1], 0) is not None


def test_pick_of_an_exact_tie_has_to_be_the_first() -> None:
    scores = np.array([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 0.0, 1.0], [0.0, np.nan, 1.0, 1.0]])
    exact = np.ones(scores.shape, bool)
    assert find_passed_tie(scores, exact, np.array([[1], [0], [1]]), 1) is None
    assert find_passed_tie(scores, exact, np.array([[3], [0], [1]]), 1) == PassedTie(index=3, first=1, score=3.0)
    exact[0, 1] = False
    # Rounding may move the first of the three scores, so it need not win.
    assert find_passed_tie(scores, exact, np.array([[2], [0], [1]]), 1) is None
    assert find_passed_tie(scores, exact, np.array([[3], [0], [1]]), 1) == PassedTie(index=3, first=2, score=3.0)
    exact[0, 3] = False
    assert find_passed_tie(scores, exact, np.array([[3], [0], [1]]), 1) is None
    assert find_passed_tie(scores.T, exact.T, np.array([[3, 1, 1]]), 0) == PassedTie(index=1, first=0, score=2.0)
