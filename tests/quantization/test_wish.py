"""What is asked for of quantization from Python, looked at before any work."""

from __future__ import annotations

from typing import Any

import pytest

from normdeploy.api.quantizing import wish_of
from normdeploy.errors import InputError

SAMPLES: Any = ["samples.npz"]


@pytest.mark.parametrize("calibration", ["minmax", "entropy", "percentile"])
def test_dynamic_ranges_are_of_no_calibration(calibration: str) -> None:
    with pytest.raises(InputError, match=f"the calibration '{calibration}' would take them of samples; leave one of"):
        wish_of("int8", "onnxruntime", calibration, None, (), None, dynamic=True)
    assert wish_of("int8", "onnxruntime", None, None, (), None, dynamic=True) is not None
