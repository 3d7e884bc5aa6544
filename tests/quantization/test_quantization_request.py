"""What is asked for of quantization from Python, looked at before any work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from normdeploy.errors import InputError
from normdeploy.verb_options import ConversionOptions
from normdeploy.verbs.conversion.conversion_request import parse_quantization_request

SAMPLES: Any = ["samples.npz"]
DYNAMIC = ConversionOptions(quantize="int8", runtime="onnxruntime", dynamic=True)


@pytest.mark.parametrize("metric", [0.99, {"cosine": 0.99}, {"y": {"cosine": 0.99}}, [0.99], {"y": ["snr>=30", 3]}, 0])
def test_a_metric_is_a_text(metric: Any) -> None:
    with pytest.raises(InputError, match=r"can't read the metric .*; pass a text such as 'cosine>=0.995'"):
        parse_quantization_request(ConversionOptions(quantize="int8", metric=metric, calibrate=SAMPLES))


@pytest.mark.parametrize("metric", ["cosine>=0.9", ["y=cosine>=0.9"], ("cosine>=0.9",), {"y": ["cosine>=0.9"]}, None])
def test_texts_and_texts_by_output_are_metrics(metric: Any) -> None:
    wish = parse_quantization_request(ConversionOptions(quantize="int8", metric=metric, calibrate=SAMPLES))
    assert wish is not None
    assert [str(rule) for rule in wish.policy.rules_for("y")] == (["cosine>=0.9"] if metric else [])


@pytest.mark.parametrize("calibration", ["minmax", "entropy", "percentile"])
def test_dynamic_ranges_are_of_no_calibration(calibration: str) -> None:
    with pytest.raises(InputError, match=f"the calibration '{calibration}' needs samples; omit --dynamic or"):
        parse_quantization_request(replace(DYNAMIC, calibration=calibration))
    assert parse_quantization_request(DYNAMIC) is not None
