"""What is allowed: four times eager's error and four units in the last place; ties are told by disturbance."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from normdeploy.compare.error_tally import ErrorTally
from normdeploy.compare.rounding_ties import RoundingTies
from normdeploy.compare.ulp_spacing import ulp_at
from normdeploy.runtimes import RunResult


@pytest.mark.parametrize(
    ("magnitude", "dtype", "wanted"),
    [
        (1.0, np.float32, 2.0**-23),
        (1.9, np.float32, 2.0**-23),
        (3.0, np.float16, 2.0**-9),
        (1.0, ml_dtypes.bfloat16, 2.0**-7),
        (0.0, np.float16, 2.0**-24),
        (1e-30, np.float64, float(np.spacing(1e-30))),
        (1e9, np.float16, 2.0**5),
        (0.0, np.float32, 2.0**-149),
    ],
)
def test_ulp_is_the_spacing_of_the_type(magnitude: float, dtype: Any, wanted: float) -> None:
    assert ulp_at(magnitude, np.dtype(dtype)) == wanted


def all_right(value: np.ndarray) -> np.ndarray:
    return np.ones(value.shape, bool)


def test_the_error_allowed_is_eager_s_times_four_and_four_ulp() -> None:
    reference, eager = np.array([1.0, 3.0]), ErrorTally(np.dtype(np.float32))
    eager.add("a", (reference + np.array([0, 1e-6])).astype(np.float32), reference, all_right)
    error = float(np.float32(3.000001)) - 3.0
    mine = ErrorTally(np.dtype(np.float32))
    assert mine.allowed_error(eager) == 4 * error + 4 * 2.0**-22
    mine.add("b", (reference + np.array([1e-4, 0])).astype(np.float32), reference, all_right)
    assert mine.absolute == pytest.approx(1e-4, rel=1e-3)
    assert (mine.case, mine.scale) == ("b", 3.0)


def test_ties_disturb_the_reference_no_more_than_needed() -> None:
    asked: list[int] = []

    def perturbed(seed: int) -> RunResult:
        asked.append(seed)
        return {"y": np.array([0, int(seed == 3), 0])}

    ties = RoundingTies(perturbed, {"y": np.zeros(3, int)}, {"y": np.array([0, 0, 7])})
    assert ties.explain_elements("y", np.array([0, 0, 7])).tolist() == [True, True, True]
    assert asked == []
    assert ties.explain_elements("y", np.array([0, 1, 7])).tolist() == [True, True, True]
    assert asked == [0, 1, 2, 3]
    assert ties.explain_elements("y", np.array([1, 2, 6])).tolist() == [False, False, False]
    assert asked == list(range(16))


def test_tally_that_fails_shows_a_later_input_if_it_is_off_by_more() -> None:
    """Bounds of later inputs are of fewer draws, and may be too small."""
    tally, reference = ErrorTally(np.dtype(np.float32)), np.zeros(1)
    for case, off, allowed in (("first", 1.0, 0.1), ("few draws", 0.5, 0.01), ("worse", 2.0, 0.01)):
        given = np.array([off], np.float32)
        tally.add(case, given, reference, all_right, bound=lambda error, allowed=allowed: np.full(1, allowed))  # type: ignore[misc]
        assert tally.case == ("first" if off < 2 else "worse")
