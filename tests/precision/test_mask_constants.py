"""Masks in half precision: no finite number of them becomes −Inf, whether calibration met it or not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from normdeploy.precision.emulated_half import emulate_half
from normdeploy.precision.half_conversion import convert_to_half
from normdeploy.precision.type_conversion import FORMATS
from tests.half_graphs import X, runs, text
from tests.support import run_onnxruntime

LOW = float(np.finfo(np.float32).min)
SEEN = {"x": X, "keep": np.ones((2, 4), bool)}
HIDDEN = {"x": X, "keep": np.array([[True, False, True, False], [False] * 4])}
INPUTS = "float[2,4] x, bool[2,4] keep"
MASK = "m = Where(keep, zero, low) s = Add(x, m) p = Softmax<axis = -1>(s)"
LAST = np.array([-1])


@pytest.mark.parametrize("to", FORMATS)
def test_a_guard_that_reads_the_mask_keeps_hidden_rows_zero(to: str) -> None:
    body = f"{MASK} r = ReduceMax<keepdims = 1>(m, axes) shown = Greater(r, half) f = Cast<to = 1>(shown) y = Mul(p, f)"
    proto = text(body, INPUTS, zero=0.0, low=LOW, half=LOW / 2, axes=LAST)
    made, account = convert_to_half(proto, to, [SEEN])
    assert not account.islands
    for found in runs(made, to, HIDDEN).values():
        np.testing.assert_array_equal(found[0][1].astype(np.float32), 0)
        assert found[0][0, 0] > 0


@pytest.mark.parametrize("to", FORMATS)
def test_a_row_unhidden_by_comparing_with_the_lowest_number_stays_unhidden(to: str) -> None:
    body = """hidden = Equal(m, low) h = Cast<to = 1>(hidden) least = ReduceMin<keepdims = 1>(h, axes)
        shown = Sub(one, least) n = Mul(m, shown) t = Add(x, n) y = Softmax<axis = -1>(t)"""
    proto = text(f"m = Where(keep, zero, low) {body}", INPUTS, zero=0.0, low=LOW, one=1.0, axes=LAST)
    made, _ = convert_to_half(proto, to, [SEEN])
    found = run_onnxruntime(emulate_half(made), HIDDEN)[0]
    np.testing.assert_allclose(found, run_onnxruntime(proto, HIDDEN)[0], atol=2e-2)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    "body",
    [
        "m = Where(keep, x, low) y = ReduceMax<keepdims = 0>(m, axes)",
        "m = Where(keep, x, low) y = ReduceLogSumExp<keepdims = 0>(m, axes)",
        "m = Where(keep, x, low) a = Abs(m) b = Neg(a) y = ReduceMax<keepdims = 0>(b, axes)",
        "m = Where(keep, zero, low) s = Add(x, m) y = ReduceMax<keepdims = 0>(s, axes)",
    ],
)
def test_a_number_that_calibration_never_met_is_not_rounded_to_infinity(body: str, to: str) -> None:
    proto = text(body, INPUTS, "float[2] y", zero=0.0, low=LOW, axes=LAST)
    made, _ = convert_to_half(proto, to, [SEEN])
    found = run_onnxruntime(emulate_half(made), HIDDEN)[0]
    np.testing.assert_allclose(found, run_onnxruntime(proto, HIDDEN)[0], rtol=2e-2)


@pytest.mark.parametrize("low", [LOW, -1e9, -1e30])
def test_two_masks_leave_a_row_that_both_hide_finite(low: float) -> None:
    body = "m = Where(keep, zero, low) n = Where(keep, zero, low) a = Add(m, n) s = Add(x, a) y = Softmax<axis = -1>(s)"
    made, account = convert_to_half(text(body, INPUTS, zero=0.0, low=low), "fp16", [SEEN])
    assert not account.islands
    found = run_onnxruntime(emulate_half(made), HIDDEN)[0]
    np.testing.assert_allclose(found[1], 0.25, atol=1e-3)


def test_one_mask_absorbs_scores_as_float32s_lowest_number_does() -> None:
    """A row that is hidden whole is the mean of all: scores up to 15 beside the mask change nothing."""
    proto = text("m = Where(keep, zero, low) s = Add(x, m) y = Softmax<axis = -1>(s)", INPUTS, zero=0.0, low=LOW)
    made, _ = convert_to_half(proto, "fp16", [SEEN])
    scores = np.array([[15, -15, 3, 0], [15, -15, 3, 0]], np.float32)
    found = run_onnxruntime(emulate_half(made), HIDDEN | {"x": scores})[0]
    np.testing.assert_allclose(found[1], 0.25, atol=1e-3)


def test_a_filled_shape_is_a_mask_like_an_expanded_number() -> None:
    body = "f = ConstantOfShape<value = float[1] {-3.0e38}>(shape) m = Where(keep, zero, f) s = Add(x, m)"
    proto = text(f"{body} y = Softmax<axis = -1>(s)", INPUTS, zero=0.0, shape=np.array([2, 4]))
    made, account = convert_to_half(proto, "fp16", [SEEN])
    assert not account.islands
    assert np.isfinite(run_onnxruntime(emulate_half(made), HIDDEN)[0]).all()


def test_a_mask_that_is_subtracted_stays_float32() -> None:
    """x − lowest is the largest number of all."""
    proto = text("s = Sub(x, low) y = Softmax<axis = -1>(s)", low=np.array([[LOW, 0, 0, 0]]))
    made, account = convert_to_half(proto, "fp16", [{"x": X}])
    assert account.kept
    np.testing.assert_array_equal(run_onnxruntime(emulate_half(made), {"x": X})[0], [[1, 0, 0, 0]] * 2)


def test_a_minus_infinity_stays_one() -> None:
    proto = text(
        "m = Where(keep, zero, low) s = Add(x, m) y = Softmax<axis = -1>(s)", INPUTS, zero=0.0, low=np.array(-np.inf)
    )
    made, _ = convert_to_half(proto, "fp16", [SEEN])
    found = run_onnxruntime(emulate_half(made), HIDDEN)[0]
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[0]).all()


def test_a_cast_before_a_transpose_loads_in_onnxruntime() -> None:
    """onnxruntime 1.31.1 crashes on Cast, Transpose, MatMul with its optimizer on."""
    body = """n = LayerNormalization<axis = -1>(x, scale) t = Transpose<perm = [1, 0, 2]>(n) y = MatMul(t, w)"""
    proto = text(body, "float[a,b,4] x", "float[b,a,4] y", scale=np.ones(4), w=np.eye(4))
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4) % 7
    made, _ = convert_to_half(proto, "fp16", [{"x": x}])
    ops = [n.op_type for n in made.graph.node]
    assert ops.index("Transpose") < ops.index("Cast", ops.index("LayerNormalization"))
    onnx.checker.check_model(made, full_check=True)
    for found in runs(made, "fp16", {"x": x}).values():
        np.testing.assert_allclose(found[0], run_onnxruntime(proto, {"x": x})[0], atol=2e-3)
