"""Codes and scales beside ONNX's own reference implementation of QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from normdeploy.quantization.number_formats import (
    FP8,
    INT4,
    INT8,
    UINT8,
    CodeFormat,
    broadcast_scales,
    quantize_dequantize,
    quantize_dequantize_weight,
    quantize_to_codes,
    step_for_range,
    weight_scales,
)

FORMATS = pytest.mark.parametrize("form", [INT8, UINT8, FP8, INT4], ids=lambda form: form.name)


def reference(
    x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, form: CodeFormat, **attributes: int
) -> np.ndarray:
    """x quantized and back by onnx's reference."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], **attributes),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], **attributes),
    ]
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)]
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    constants = [
        onnx.numpy_helper.from_array(scale.astype(np.float32), "s"),
        helper.make_tensor("z", form.onnx, zero_point.shape, zero_point.astype(np.float32).reshape(-1).tolist()),
    ]
    graph = helper.make_graph(nodes, "g", ends, out, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return np.asarray(ReferenceEvaluator(model).run(None, {"x": x})[0])


@FORMATS
def test_a_step_rounds_as_the_standard_says(form: CodeFormat) -> None:
    """Ties, both ends and beyond them."""
    step = step_for_range(-3.0, 5.0, form)
    ties = (np.arange(-300, 300) + 0.5) * step.scale
    x = np.concatenate([ties, np.linspace(-9, 9, 999), [0.0, -0.0]]).astype(np.float32)
    x = np.clip(x, (form.low - step.zero_point) * step.scale, None).astype(np.float32)  # symmetric: no -128
    right = reference(x, np.array(step.scale), np.array(step.zero_point), form)
    made = quantize_dequantize(x, step)
    largest = (form.high - step.zero_point) * step.scale  # of INT4 and INT8 the last code may be one further down
    inside = np.abs(x) < largest
    np.testing.assert_array_equal(made[inside], right[inside])
    assert np.abs(made[~inside]).max() <= np.float32(largest)


@FORMATS
def test_zero_is_a_code_and_the_ends_are_reached(form: CodeFormat) -> None:
    for low, high in ((-3.0, 5.0), (2.0, 5.0), (-7.0, -1.0), (0.0, 1e-30), (-1e30, 2.0)):
        step = step_for_range(low, high, form)
        assert quantize_dequantize(np.zeros(1, np.float32), step)[0] == 0
        ends = quantize_dequantize(np.array([low, high], np.float32), step)
        fraction = 2.0**-4 if form is FP8 else 0.0  # its numbers have four digits
        assert np.abs(ends - [low, high]).max() <= step.scale * (0.5 + 1e-3) + fraction * max(-low, high)


def test_each_channel_and_each_block_has_its_own_scale() -> None:
    w = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32) * 10.0 ** np.arange(4)
    for axis, block in ((1, 0), (0, 0), (None, 0), (0, 3), (1, 2)):
        scales = weight_scales(w, axis, INT8, block)
        largest = np.abs(w / broadcast_scales(scales, w.shape, axis, block))
        assert largest.max() == pytest.approx(127, rel=1e-6)
        near = np.abs(quantize_dequantize_weight(w, axis, INT8, block) - w)
        assert (
            near <= broadcast_scales(scales, w.shape, axis, block) * (0.5 + 1e-5)
        ).all()  # half a step, and its rounding
    assert weight_scales(w, 0, INT8, 3).shape == (2, 4)
    right = reference(w, weight_scales(w, 0, INT8, 3), np.zeros((2, 4)), INT8, axis=0, block_size=3)
    np.testing.assert_allclose(quantize_dequantize_weight(w, 0, INT8, 3), right, rtol=1e-6)


def test_a_weight_of_zeros_stays_zero() -> None:
    w = np.zeros((3, 2), np.float32)
    assert not quantize_to_codes(w, broadcast_scales(weight_scales(w, 1, INT8), w.shape, 1), INT8).any()
