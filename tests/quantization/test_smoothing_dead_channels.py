"""Channels on which nothing hangs, or that never move: what they cost the others.

Each network is judged in onnxruntime with its optimizer, as users run it: that writes biases as int32 itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest

import normdeploy
from normdeploy.quantization.smoothing import smoothing_factors, undo_affine
from tests.half_graphs import text
from tests.support import run_onnxruntime

NOISE = 0.05  # of the output, in the mean: int8 leaves one or two hundredths of these networks


def error(proto: onnx.ModelProto, x: np.ndarray, **options: Any) -> float:
    """The relative error of the quantized file's output, which half of the rows calibrate."""
    made = normdeploy.optimize(proto, quantize="int8", calibrate=[{"x": x}], **options).proto
    assert made is not None
    assert any(n.op_type in ("DequantizeLinear", "MatMulInteger") for n in made.graph.node)
    before, after = (np.asarray(run_onnxruntime(p, {"x": x}, optimized=True)[0], np.float64) for p in (proto, made))
    return float(np.linalg.norm(after - before) / np.linalg.norm(before))


@pytest.mark.parametrize("runtime", ["any", "onnxruntime"])
@pytest.mark.parametrize("gamma", [0.0, 1e-42, 1e-6])
@pytest.mark.parametrize("op", ["LayerNormalization", "RMSNormalization"])
def test_gammas_of_next_to_nothing_leave_the_range_to_others(op: str, gamma: float, runtime: str) -> None:
    """Their channels of the norm are as large as all others, though the norm's result does not show them."""
    for seed in (12, 13):
        rng = np.random.default_rng(seed)
        gammas, channels = rng.random(64) + 0.5, f"float[b,{64}]"
        gammas[:4] = gamma
        proto = text(
            f"n = {op}<axis = -1>(x, gamma) y = MatMul(n, w)",
            f"{channels} x",
            f"{channels} y",
            opset=23,
            gamma=gammas,
            w=rng.standard_normal((64, 64)) / 8,
        )
        assert error(proto, rng.standard_normal((128, 64)).astype(np.float32), runtime=runtime) < NOISE


@pytest.mark.parametrize("spread", [0.0, 1e-4])
@pytest.mark.parametrize("seed", range(6))
def test_what_a_constant_channel_adds_stays(seed: int, spread: float) -> None:
    """Its weights, over a range of next to nothing, round to zero: the bias has to hold all that they add."""
    rng = np.random.default_rng(seed)
    middle, x = 2 * rng.standard_normal(16), np.tanh(rng.standard_normal((128, 16)))
    x = x * np.where(np.arange(16) % 4 < 2, spread, rng.standard_normal(16)) + middle
    x = np.pad(x, ((0, 0), (0, 3))).astype(np.float32)
    proto = text("y = MatMul(x, w)", "float[b,19] x", "float[b,16] y", w=rng.standard_normal((19, 16)) / 4)
    assert error(proto, x) < NOISE


@pytest.mark.parametrize("runtime", ["any", "onnxruntime"])
@pytest.mark.parametrize("gamma", [0.0, 1e-9, 1e-6])
def test_a_bias_beside_weights_of_next_to_nothing_does_not_overflow(gamma: float, runtime: str) -> None:
    """Of a pruned network BatchNorm's shift is all that is left of a channel."""
    rng = np.random.default_rng(0)
    gammas = rng.standard_normal(8)
    gammas[::3] = gamma
    image = "float[b,8,6,6]"
    proto = text(
        "c = Conv<pads = [1, 1, 1, 1]>(x, w1) n = BatchNormalization(c, gamma, beta, mean, var) r = Relu(n)"
        " y = Conv(r, w2)",
        f"{image} x",
        f"{image} y",
        w1=rng.standard_normal((8, 8, 3, 3)) / 8,
        gamma=gammas,
        beta=rng.standard_normal(8),
        mean=rng.standard_normal(8),
        var=rng.random(8) + 0.1,
        w2=rng.standard_normal((8, 8, 1, 1)) / 3,
    )
    assert error(proto, rng.standard_normal((64, 8, 6, 6)).astype(np.float32), runtime=runtime) < NOISE


@pytest.mark.parametrize("op", ["InstanceNormalization(x, g, g)", "GroupNormalization<num_groups = 4>(x, g, g)"])
def test_a_norm_whose_channels_a_view_mixes_is_no_error(op: str) -> None:
    rng = np.random.default_rng(1)
    proto = text(
        f"n = {op} f = Flatten(n) y = Gemm(f, w)",
        "float[b,16,6] x",
        "float[b,5] y",
        g=rng.random(16) + 0.5,
        w=rng.standard_normal((96, 5)) / 10,
    )
    assert error(proto, rng.standard_normal((64, 16, 6)).astype(np.float32)) < NOISE


@pytest.mark.parametrize("runtime", ["any", "onnxruntime"])
@pytest.mark.parametrize("stack", [1, 4])
def test_a_stack_of_weights_has_one_scale(stack: int, runtime: str) -> None:
    """onnxruntime's integer products take no scale for each output there."""
    rng = np.random.default_rng(2)
    proto = text("y = MatMul(x, w)", "float[4,b,16] x", "float[4,b,8] y", w=rng.standard_normal((stack, 16, 8)))
    x = rng.standard_normal((4, 32, 16)).astype(np.float32)
    samples = [{"x": x}, {"x": x[:, ::-1].copy()}]
    made = normdeploy.optimize(proto, quantize="int8", calibrate=samples, runtime=runtime).proto
    before, after = (np.asarray(run_onnxruntime(p, {"x": x}, optimized=True)[0], np.float64) for p in (proto, made))
    assert np.linalg.norm(after - before) < NOISE * np.linalg.norm(before)


@pytest.mark.parametrize("runtime", ["any", "onnxruntime"])
def test_an_infinite_bias_stays_one(runtime: str) -> None:
    """A mask: times a scale of infinity zero would be NaN."""
    rng = np.random.default_rng(4)
    bias = np.array([0.0, 0.0, -np.inf, 0.0])
    proto = text("y = Gemm(x, w, b)", "float[n,16] x", "float[n,4] y", w=rng.standard_normal((16, 4)), b=bias)
    x = rng.standard_normal((64, 16)).astype(np.float32)
    result = normdeploy.optimize(proto, quantize="int8", calibrate=[{"x": x}], runtime=runtime)
    assert result.proto is not None
    (y,) = run_onnxruntime(result.proto, {"x": x}, optimized=True)
    assert (y[:, 2] == -np.inf).all()
    assert np.isfinite(y[:, [0, 1, 3]]).all()
    assert result.quantization is not None
    assert not any("differs from the model's output in shape" in note for note in result.quantization.notes)


def test_one_large_bias_leaves_the_scale_of_all_channels() -> None:
    rng = np.random.default_rng(5)
    bias = np.zeros(6)
    bias[0] = 1e7
    proto = text(
        "y = ConvTranspose<group = 2>(x, w, b)",
        "float[n,4,8] x",
        "float[n,6,10] y",
        w=rng.standard_normal((4, 3, 3)),
        b=bias,
    )
    x = rng.standard_normal((64, 4, 8)).astype(np.float32)
    made = normdeploy.optimize(proto, quantize="int8", calibrate=[{"x": x}], runtime="tensorrt").proto
    before, after = (np.asarray(run_onnxruntime(p, {"x": x})[0], np.float64)[:, 1:] for p in (proto, made))
    assert np.linalg.norm(after - before) < NOISE * np.linalg.norm(before)


@pytest.mark.parametrize("bias", [np.array(2.0), np.array([2.0]), np.full((1, 4), 2.0)])
def test_one_bias_for_all_outputs(bias: np.ndarray) -> None:
    rng = np.random.default_rng(6)
    proto = text("y = Gemm(x, w, b)", "float[n,16] x", "float[n,4] y", w=rng.standard_normal((16, 4)), b=bias)
    assert error(proto, rng.standard_normal((64, 16)).astype(np.float32), runtime="onnxruntime") < NOISE


@pytest.mark.parametrize("coarse", [False, True])
def test_channels_on_which_nothing_hangs_take_no_factor_from_others(coarse: bool) -> None:
    x, w = np.array([1.0, 4.0, 0.5, 100.0, 0.0]), np.array([1.0, 0.5, 2.0, 0.0, 50.0])
    s = smoothing_factors(x, w, 0.5, coarse)
    np.testing.assert_allclose(s[:3], smoothing_factors(x[:3], w[:3], 0.5, coarse))
    assert s[3] > 1  # nothing is multiplied by it: it may not fill the range
    assert x[3] / s[3] <= (x[:3] / s[:3]).max()
    rounded = 1.25 if coarse else 1.0
    assert w[4] * s[4] <= rounded * (w[:3] * s[:3]).max()  # what never moves may not fill the weights' range


def test_what_a_norm_made_is_told_from_its_affine_where_that_shows_it() -> None:
    n = np.random.default_rng(3).uniform(-2, 2, (50, 4))
    scale, shift = np.array([0.5, -3.0, 0.0, 1e-6]), np.array([1.0, 0.0, 2.0, 7.0])
    y = scale * n + shift
    rows, low, high = undo_affine(y, y.min(0), y.max(0), scale, shift)
    np.testing.assert_allclose(rows[:, :2], n[:, :2])
    np.testing.assert_allclose((low[:2], high[:2]), (n.min(0)[:2], n.max(0)[:2]))
    assert not rows[:, 2:].any()
    assert _ends(low[2:], high[2:]) == [(-2.0, 2.0)] * 2  # √4


def _ends(low: Sequence[float], high: Sequence[float]) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in zip(low, high, strict=True)]
