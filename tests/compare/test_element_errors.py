"""Distances by hand: NaN, infinities, integers beyond float64, and the element that decides."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from normdeploy.compare.element_errors import (
    absolute_difference,
    difference_from_float64,
    largest_finite,
    largest_of_rows,
    nonfinite_mismatch,
)
from normdeploy.compare.perturbation import explained_error, find_unexplained, regrouping_error
from normdeploy.compare.verdict import Verdict, farthest_beyond_bound, nearest_to_bound

INF, NAN = math.inf, math.nan
ODD = np.array([1.0, INF, INF, NAN, NAN, 2.0])
EVEN = np.array([3.0, INF, -INF, NAN, 1.0, NAN])


def test_distance_is_infinite_where_one_alone_is_finite() -> None:
    assert absolute_difference(ODD, EVEN).tolist() == [2.0, 0.0, 0.0, 0.0, INF, INF]
    assert absolute_difference(ODD, EVEN, one_sided=0.0).tolist() == [2.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert nonfinite_mismatch(ODD, EVEN).tolist() == [False, False, True, False, True, True]


def test_distance_of_a_scalar_and_of_bfloat16() -> None:
    assert absolute_difference(np.array(1.0), np.array(NAN)) == INF
    assert absolute_difference(np.ones(2, ml_dtypes.bfloat16), np.full(2, 3, ml_dtypes.bfloat16)).tolist() == [2.0, 2.0]


def test_distance_of_integers_closer_than_float64_tells_is_one() -> None:
    assert absolute_difference(np.array([2**60 + 1]), np.array([2**60])).tolist() == [1.0]
    assert absolute_difference(np.array([True, False]), np.array([True, True])).tolist() == [0.0, 1.0]


def test_distance_of_strings_is_infinite_where_they_differ() -> None:
    assert absolute_difference(np.array(["a", "b"]), np.array(["a", "c"])).tolist() == [0.0, INF]


def test_difference_names_the_first_misplaced_element() -> None:
    found = difference_from_float64(ODD, EVEN)
    assert (found.error, found.scale) == (2.0, 3.0)
    assert found.reason == "inf where float64 has -inf (3 of 6 elements)"
    assert not difference_from_float64(EVEN, EVEN).reason


def test_largest_finite_and_row_largest() -> None:
    assert largest_finite(np.array([-3.0, INF, NAN])) == 3.0
    assert largest_finite(np.zeros(0)) == 0.0
    assert largest_of_rows(np.array([[1.0, 2.0], [4.0, 3.0]])).tolist() == [[2.0], [4.0]]
    assert largest_of_rows(np.array(5.0)) == 5.0


def test_a_verdict_is_true_within_its_bound() -> None:
    assert Verdict(1.0, 1.0)
    assert not Verdict(1.1, 1.0)
    assert not Verdict(0.0, 1.0, reason="another shape")
    assert Verdict(0.0, 0.0).bound_ratio == 0.0
    assert Verdict(1.0, 0.0).bound_ratio == INF
    assert Verdict(3.0, 2.0).bound_ratio == 1.5


def test_nearest_goes_by_the_multiple_and_farthest_by_the_error() -> None:
    error, allowed = np.array([[1.0, 4.0]]), np.array([[0.1, 3.0]])
    assert nearest_to_bound(error, allowed) == Verdict(1.0, 0.1, (0, 0))
    assert farthest_beyond_bound(error, allowed) == Verdict(4.0, 3.0, (0, 1), beyond=2)
    assert farthest_beyond_bound(error, np.array([[5.0]])) is None
    assert nearest_to_bound(np.zeros(0), np.zeros(0))


def test_what_perturbations_explain() -> None:
    right, moved = np.array([[1.0, -8.0]]), np.array([[0.25, 0.5]])
    assert explained_error(right, moved, 2.0**-4).tolist() == [[4 * 0.5 + 0.5]]
    assert find_unexplained(right + np.array([[2.5, 0.0]]), right, moved, 2.0**-4) is None
    assert find_unexplained(right + np.array([[2.75, 0.0]]), right, moved, 2.0**-4) == Verdict(
        2.75, 2.5, (0, 0), beyond=1
    )


def test_an_integer_that_perturbations_move_may_be_any_other() -> None:
    right = np.array([[1, 2], [3, 4]])
    moved = np.array([[0.0, 1.0], [0.0, 0.0]])
    assert find_unexplained(right + np.array([[0, 7], [0, 0]]), right, moved, 0.0) is None
    assert find_unexplained(right + np.array([[7, 7], [0, 0]]), right, moved, 0.0) == Verdict(
        7.0, 0.0, (0, 0), beyond=1
    )
    assert find_unexplained(right + np.array([[0, 0], [0, 1]]), right, np.zeros((2, 2)), 0.0) == Verdict(
        1.0, 0.0, (1, 1), beyond=1
    )


def test_folds_and_regroupings_round_by_the_number_of_nodes() -> None:
    assert regrouping_error(16, 2.0**-24) == pytest.approx(24 * 2.0**-24)
