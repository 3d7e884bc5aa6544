"""The terminal shows the range of each output, and how many of its values are NaN or Inf."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from normdeploy.verbs.run.run_tables import summarize_values


@pytest.mark.parametrize(
    ("values", "summary"),
    [
        (np.array([1.0, -2.0, 4.0], np.float32), "min -2, max 4, mean 1"),
        (np.array([1, 3], ml_dtypes.bfloat16), "min 1, max 3, mean 2"),
        (torch.tensor([1.0, float("nan"), float("inf"), 3.0]), "min 1, max 3, mean 2, 1 of 4 NaN, 1 of 4 Inf"),
        (np.array([np.nan]), "1 of 1 NaN"),
        (np.array([True, False]), "min 0, max 1, mean 0.5"),
        (np.zeros((0, 3)), "no elements"),
        (np.array(["a"], object), ""),
    ],
)
def test_values_are_summarized(values: object, summary: str) -> None:
    assert summarize_values(values) == summary
