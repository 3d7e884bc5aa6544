"""The formula for the noise of rounding, by which factors are chosen, beside rows that are rounded and multiplied."""

from __future__ import annotations

import numpy as np
import pytest

from normdeploy.quantization.number_formats import INT8, quantize_dequantize, quantize_dequantize_weight, step_for_range
from normdeploy.quantization.smoothing import LayerFormats, SeenRows, expected_error, row_lengths
from tests.quantization.test_gptq import inputs, weight


@pytest.mark.parametrize("share", [1.0, 0.6], ids=["within", "cut off"])
def test_the_formula_is_what_rounding_gives(share: float) -> None:
    """Of the weights' error it counts half, and not its mean. One draw of 64 × 24 roundings tells their root mean
    square to some 10 %; all that is cut off is in both."""
    x, w = inputs(5).astype(np.float64), weight().astype(np.float64)
    lengths = row_lengths(x @ w)
    low, high = x.min(0) * share, x.max(0) * share
    told = expected_error(SeenRows(x, low, high, lengths), w, LayerFormats(INT8, INT8))
    step = step_for_range(float(low.min()), float(high.max()), INT8)
    of_inputs = (quantize_dequantize(x.astype(np.float32), step) - x) @ w
    of_weights = (x - x.mean(0)) @ (quantize_dequantize_weight(w.astype(np.float32), 1, INT8) - w)
    right = np.sqrt(np.mean(((of_inputs**2).sum(1) + (of_weights**2).sum(1) / 2) / lengths**2))
    assert told == pytest.approx(right, rel=0.15)
