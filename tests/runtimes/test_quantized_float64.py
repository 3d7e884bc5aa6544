"""Other roundings of the same steps: each within half a step, zeros and ReLU kept, and nothing where no scale was
chosen."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from normdeploy.runtimes.ort_runner import OrtRunner
from normdeploy.runtimes.quantized_float64 import QuantizedRunner, RoundingDraw


def pair(kind: type, scale: float, zero: int, size: int = 200) -> onnx.ModelProto:
    parameters = ["s", "z"]
    graph = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", *parameters], ["q"], "Q"),
            helper.make_node("DequantizeLinear", ["q", *parameters], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [size])],
        [
            numpy_helper.from_array(np.float32(scale).reshape(()), "s"),
            numpy_helper.from_array(np.asarray(float(zero)).astype(kind).reshape(()), "z"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def values(seed: int = 0, size: int = 200) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).uniform(-1, 1, size).astype(np.float32)
    x[:20] = 0
    return {"x": x}


@pytest.mark.parametrize(("kind", "zero"), [(np.int8, 0), (np.uint8, 128), (np.int16, 5)])
def test_a_draw_is_within_half_a_step_and_keeps_zeros(kind: type, zero: int) -> None:
    runner, feeds = QuantizedRunner(pair(kind, 0.05, zero)), values()
    x = feeds["x"].astype(np.float64)
    step = float(np.float32(0.05))
    exact = runner.run_with_draw(feeds, RoundingDraw("exact"))["y"]
    np.testing.assert_allclose(exact, x, rtol=0, atol=1e-15)
    draws = [runner.run_with_draw(feeds, RoundingDraw(seed))["y"] for seed in range(20)]
    assert all((np.abs(y - x) <= step / 2 * (1 + 1e-9)).all() for y in draws)
    assert all((y[:20] == 0).all() for y in draws)
    moved = np.max([np.abs(y - x) for y in draws], 0)[20:]
    assert np.median(moved) > 0.4 * step  # of twenty draws over half a step the largest is nearly that
    again = runner.run_with_draw(feeds, RoundingDraw(3))["y"]
    np.testing.assert_array_equal(draws[3], again)


def test_equal_values_get_equal_errors() -> None:
    """As in the file itself: the mean of a constant image is off by all of one error, not by its root of n-th part."""
    feeds = {"x": np.full(200, 0.333, np.float32)}
    y = QuantizedRunner(pair(np.int8, 0.05, 0)).run_with_draw(feeds, RoundingDraw(1))["y"]
    assert np.ptp(y) == 0
    assert abs(y[0] - 0.333) > 1e-4


def test_floats_of_eight_bits_have_steps_of_their_size() -> None:
    runner, feeds = QuantizedRunner(pair(ml_dtypes.float8_e4m3fn, 0.01, 0)), values()
    x = feeds["x"].astype(np.float64)
    for seed in range(10):
        y = runner.run_with_draw(feeds, RoundingDraw(seed))["y"]
        # 3 bits behind the point: 1/16 of a number is half a step at most, and 2^-10 of the scale among the smallest
        assert (np.abs(y - x) <= np.maximum(np.abs(x) / 16, 0.01 * 2**-10) * (1 + 1e-9)).all()


def test_what_lies_beyond_the_range_is_cut_off_told_and_in_no_draw() -> None:
    runner, feeds = QuantizedRunner(pair(np.int8, 0.004, 0)), values()
    x = feeds["x"].astype(np.float64)
    end = 127 * float(np.float32(0.004))
    np.testing.assert_allclose(runner.infer(feeds)["y"].max(), end)
    cut = runner.run_with_draw(feeds, RoundingDraw("exact"))["y"]
    assert cut.max() == pytest.approx(end, abs=0.0041)  # by a step at most
    np.testing.assert_allclose(
        runner.run_with_draw(feeds, RoundingDraw("exact", clips=False))["y"], x, rtol=0, atol=1e-15
    )
    (seen,) = runner.list_saturations()
    assert seen
    assert seen.tensor == "x"
    assert seen.largest == pytest.approx(x.max())
    assert seen.share == pytest.approx(np.mean((x > end + 0.004) | (x < -end - 0.008)), abs=0.02)
    assert seen.beyond == pytest.approx((np.abs(x).max() - end) / 0.004, abs=1.1)
    assert "'x' saturates at QuantizeLinear Q" in str(seen)


def test_a_range_that_begins_at_zero_is_relu_in_every_draw() -> None:
    runner, feeds = QuantizedRunner(pair(np.uint8, 0.01, 0)), values()
    for draw in (
        RoundingDraw("exact"),
        RoundingDraw("exact", clips=False),
        RoundingDraw(1),
        RoundingDraw(1, clips=False),
    ):
        assert runner.run_with_draw(feeds, draw)["y"].min() == 0
    runner.infer(feeds)
    assert not any(runner.list_saturations())


def weights(scale: np.ndarray, codes: np.ndarray, **attrs: int) -> onnx.ModelProto:
    graph = helper.make_graph(
        [
            helper.make_node("DequantizeLinear", ["codes", "scale"], ["w"], **attrs),
            helper.make_node("MatMul", ["x", "w"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, codes.shape[0]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, codes.shape[1]])],
        [numpy_helper.from_array(scale.astype(np.float32), "scale"), numpy_helper.from_array(codes, "codes")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(
    ("shape", "attrs"), [((), {}), ((6,), {"axis": 1}), ((2, 6), {"axis": 0, "block_size": 4})], ids=str
)
def test_weights_move_by_half_a_step_but_where_no_scale_was_chosen(
    shape: tuple[int, ...], attrs: dict[str, int]
) -> None:
    """A bias of zeros in 8 bits has any scale, of which half would be an error of any size."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (8, 6)).astype(np.int8)
    codes[:, 2] = 0
    scale = np.full(shape, 0.01)
    runner = QuantizedRunner(weights(scale, codes, **attrs))
    feeds = {"x": np.eye(8, dtype=np.float32)[:3]}  # the first rows of the weight
    plain = runner.infer(feeds)["y"]
    np.testing.assert_allclose(plain, codes[:3] * np.float64(np.float32(0.01)), rtol=1e-12)
    moved = np.max(
        [np.abs(runner.run_with_draw(feeds, RoundingDraw("exact", seed))["y"] - plain) for seed in range(30)], 0
    )
    assert moved.max() <= 0.005 * (1 + 1e-6)
    assert (moved[:, [0, 1, 3, 4, 5]] > 0.003).all()
    if shape:
        assert (moved[:, 2] == 0).all()


def test_a_file_as_it_is_is_what_onnxruntime_makes_of_it() -> None:
    rng = np.random.default_rng(1)
    proto = weights(np.full(6, 0.01), rng.integers(-127, 128, (8, 6)).astype(np.int8), axis=1)
    feeds = {"x": rng.standard_normal((3, 8)).astype(np.float32)}
    with OrtRunner(proto, optimize=False) as runner:
        np.testing.assert_allclose(
            runner.infer(feeds)["y"], QuantizedRunner(proto).infer(feeds)["y"], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize(("kind", "zero"), [(np.int8, 0), (np.uint8, 128)])
def test_a_width_multiplies_what_a_draw_rounds(kind: type, zero: int) -> None:
    runner, feeds = QuantizedRunner(pair(kind, 1 / 64, zero)), values()
    narrow, wide = (
        runner.run_with_draw(feeds, RoundingDraw(3, clips=False, width=w))["y"] - feeds["x"] for w in (1.0, 4.0)
    )
    assert np.abs(narrow).max() > 0.25 / 64
    np.testing.assert_allclose(wide, 4 * narrow, rtol=0, atol=1e-12)


def test_resize_of_codes_weighs_codes_that_are_not_rounded() -> None:
    """onnxruntime's quantizer leaves a Resize on the codes, whose kernel cuts the weighted codes to integers."""
    text = """
    <ir_version: 10, opset_import: ["" : 19]>
    g (float[1, 1, 4, 4] x) => (float[1, 1, 8, 8] y)
    <float s = {0.05}, uint8 z = {100}, float[4] scales = {1, 1, 2, 2}> {
      q = QuantizeLinear (x, s, z)
      r = Resize <mode = "linear"> (q, , scales)
      y = DequantizeLinear (r, s, z)
    }
    """
    runner = QuantizedRunner(parser.parse_model(text))
    x = np.random.default_rng(0).uniform(-1, 1, (1, 1, 4, 4)).astype(np.float32)
    plain = text.replace("q = QuantizeLinear (x, s, z)", "q = Identity (x)").replace(
        "DequantizeLinear (r, s, z)", "Abs (r)"
    )
    with OrtRunner(parser.parse_model(plain), optimize=False) as without:
        right = without.infer({"x": x})["y"]
    exact = runner.run_with_draw({"x": x}, RoundingDraw("exact"))["y"]
    assert np.abs(np.abs(exact) - right).max() < 1e-5
    stored = runner.infer({"x": x})["y"]
    with OrtRunner(parser.parse_model(text), optimize=False) as kernel:
        assert np.abs(stored - kernel.infer({"x": x})["y"]).max() < 1e-5
