"""Shifts that BatchNorms make of biases: each is found, and few numbers are computed until then."""

from __future__ import annotations

import numpy as np
import pytest

from normdeploy.verbs.verify import bias_shifts
from normdeploy.verbs.verify.bias_shifts import (
    BatchNormShifts,
    BiasShift,
    FixedShift,
    find_partial_shifts,
    find_shift,
    group_by_size,
    iter_shifts,
)
from normdeploy.verbs.verify.derived_tensors import FloatSpacing

FLOAT = FloatSpacing.of_dtype(np.dtype(np.float32))
NORMS, BIASES, CHANNELS = 30, 50, 64


@pytest.fixture
def every() -> list[BatchNormShifts | FixedShift]:
    rng = np.random.default_rng(3)
    biases = rng.standard_normal((BIASES, CHANNELS))
    return [
        BatchNormShifts(
            sources=[f"b{row} by n{norm}" for row in range(BIASES)],
            biases=biases,
            mean=rng.standard_normal(CHANNELS),
            scale=rng.uniform(0.5, 2, CHANNELS),
            shift=rng.standard_normal(CHANNELS),
        )
        for norm in range(NORMS)
    ]


def test_find_among_many_norms_compares_few_channels(
    every: list[BatchNormShifts | FixedShift], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = list[int]()
    outside = bias_shifts.mark_differences

    def counted(array: np.ndarray, expected: np.ndarray, size: np.ndarray, form: FloatSpacing) -> np.ndarray:
        compared.append(expected.size)
        return outside(array, expected, size, form)

    monkeypatch.setattr(bias_shifts, "mark_differences", counted)
    last = [*iter_shifts(every)][-1]
    found = find_shift(last.values.astype(np.float32).astype(np.float64), every, FLOAT)
    assert found is not None
    assert found.source == f"b{BIASES - 1} by n{NORMS - 1}"
    # All channels of all shifts are 96,000.
    assert sum(compared) < 10_000


def test_find_with_one_channel_changed_finds_none_and_find_most_marks_it(
    every: list[BatchNormShifts | FixedShift],
) -> None:
    shift = [*iter_shifts(every)][700]
    changed = shift.values.astype(np.float32).astype(np.float64)
    changed[40] *= 1.001
    assert find_shift(changed, every, FLOAT) is None
    ((near, marked),) = find_partial_shifts(changed, every, FLOAT)
    assert near.source == shift.source
    assert np.flatnonzero(marked).tolist() == [40]


def test_by_size_keeps_apart_what_has_other_sizes(every: list[BatchNormShifts | FixedShift]) -> None:
    fixed = FixedShift(BiasShift("a scale", np.ones(7), np.ones(7)))
    arranged = group_by_size([*every, fixed])
    assert arranged[7] == [fixed]
    assert len(arranged[CHANNELS]) == NORMS
