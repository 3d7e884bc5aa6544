"""Ranges of channels behind no norm: zero stays a code, and the bias takes a shift back by the weight as stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import normdeploy
from normdeploy.graphs.quantization_info import RECENTRED
from normdeploy.model import Dim, InputSpec
from normdeploy.quantization.number_formats import FP8, INT8, ScaleZeroPoint, quantize_dequantize
from normdeploy.quantization.quantization_request import QuantizationRequest
from normdeploy.quantization.quantizer import quantize_model
from normdeploy.quantization.sample_split import split_samples
from normdeploy.quantization.smoothing import factors_from_ranges
from normdeploy.runtimes.quantized_float64 import QuantizedRunner
from normdeploy.runtimes.rounding_draws import RoundingDraw
from tests.half_graphs import text
from tests.support import run_onnxruntime

RNG = np.random.default_rng(5)
CHANNELS, OUTPUTS, ROWS = 32, 16, 256
SPECS = [InputSpec("x", "float32", (Dim("b", 1, 8, 256), Dim.from_size(CHANNELS)))]
# one-sided as GELU's results are, each channel of a size of its own, one a hundred times as large in a few rows alone
X = (np.maximum(RNG.standard_normal((ROWS, CHANNELS)), -0.1) * np.exp(RNG.standard_normal(CHANNELS))).astype(np.float32)
X[:, 3] = np.where(np.arange(ROWS) % 16 == 0, 100.0, 0.0)
W = RNG.standard_normal((CHANNELS, OUTPUTS)).astype(np.float32)
B = RNG.standard_normal(OUTPUTS).astype(np.float32)
GRAPHS = {
    "MatMul": ("m = MatMul(x, w) y = Add(m, b)", {"w": W}),
    "Gemm": ("y = Gemm(x, w, b)", {"w": W}),
    "transposed": ("y = Gemm<transB=1>(x, w, b)", {"w": np.ascontiguousarray(W.T)}),
}


def model(kind: str) -> onnx.ModelProto:
    body, weights = GRAPHS[kind]
    return text(body, f"float[b,{CHANNELS}] x", f"float[b,{OUTPUTS}] y", b=B, **weights)


@pytest.mark.parametrize("kind", GRAPHS)
def test_what_is_zero_gives_the_models_bias(kind: str) -> None:
    """However the weight is rounded."""
    made, account = quantize_model(model(kind), QuantizationRequest("int8"), split_samples([{"x": X}], SPECS))
    assert [(layer.migrated, layer.rounding) for layer in account.layers] == [(("smooth",), "GPTQ")]
    assert "Sub" in [n.op_type for n in made.graph.node]
    (value,) = run_onnxruntime(made, {"x": np.zeros((1, CHANNELS), np.float32)})
    np.testing.assert_allclose(value[0], B, atol=1e-3)  # a step of the inputs is 100 / 127, of the weights 1 / 50


def test_the_range_is_what_the_factors_are_made_for() -> None:
    _, account = quantize_model(model("MatMul"), QuantizationRequest("int8"), split_samples([{"x": X}], SPECS))
    (layer,) = account.layers
    assert layer.high is not None
    assert layer.low == -layer.high
    assert layer.scale == pytest.approx(layer.high / 127)


@pytest.mark.parametrize(("least", "room"), [(0.5, 0.0), (0.8, 0.5), (0.95, 1.0)])
def test_every_channel_is_in_range_and_zero_is_a_code(least: float, room: float) -> None:
    low, high = X.min(0).astype(np.float64), X.max(0).astype(np.float64)
    s, c, reach = factors_from_ranges(low, high, least, room, INT8)
    step = ScaleZeroPoint(INT8, reach / 127)
    for end in (low, high):
        z = (end - c) / s
        assert (np.abs(z) <= reach + step.scale).all()
    codes = -c / s / step.scale
    np.testing.assert_allclose(codes, np.rint(codes), atol=1e-4)
    assert quantize_dequantize(np.float32([0]), step)[0] == 0
    half = (high - low) / 2
    assert (s * reach >= half + room * np.median(half) - 1e-5).all()
    assert (s * reach >= np.quantile(half, least) - 1e-5).all()


def test_nothing_of_nothing() -> None:
    s, c, reach = factors_from_ranges(np.zeros(4), np.zeros(4), 0.5, 1.0, FP8)
    assert (s == 1).all()
    assert not c.any()
    assert reach == 0


def test_a_bias_that_two_layers_read_is_left_to_the_other() -> None:
    """Their weights are rounded otherwise: no bias serves both."""
    proto = text(
        "m = MatMul(x, w) y = Add(m, b) n = MatMul(x, v) z = Add(n, b)",
        f"float[b,{CHANNELS}] x",
        f"float[b,{OUTPUTS}] y, float[b,{OUTPUTS}] z",
        w=W,
        v=W[::-1].copy(),
        b=B,
    )
    made, _ = quantize_model(proto, QuantizationRequest("int8"), split_samples([{"x": X}], SPECS))
    for value in run_onnxruntime(made, {"x": np.zeros((1, CHANNELS), np.float32)}):
        np.testing.assert_allclose(value[0], B, atol=1e-3)
    stored = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    biases = [stored[i] for n in made.graph.node if n.op_type == "Add" for i in n.input if i in stored]
    assert len(biases) == 2
    assert not np.array_equal(*biases)


@pytest.mark.parametrize("kind", GRAPHS)
def test_the_budget_of_a_shifted_layer_is_that_of_one_without(kind: str) -> None:
    """Weights that round to the same codes have another bias: what they do to rows of zeros is nothing."""
    made, _ = quantize_model(model(kind), QuantizationRequest("int8"), split_samples([{"x": X}], SPECS))
    runner, zeros = QuantizedRunner(made), {"x": np.zeros((1, CHANNELS), np.float32)}
    exact = runner.run_with_draw(zeros, RoundingDraw("exact", clips=False))["y"]
    for seed in range(3):
        drawn = runner.run_with_draw(zeros, RoundingDraw("exact", seed, clips=False))["y"]
        np.testing.assert_allclose(drawn, exact, rtol=0, atol=1e-4)  # of float32's constants; 100 / 127 is a step
    rows = {"x": X[:16]}
    moved = (
        runner.run_with_draw(rows, RoundingDraw("exact", 0, clips=False))["y"]
        - runner.run_with_draw(rows, RoundingDraw("exact", clips=False))["y"]
    )
    assert np.abs(moved).max() > 1e-3


def other_writer(rng: np.random.Generator) -> tuple[onnx.ModelProto, onnx.ModelProto, np.ndarray]:
    """A model, its file as another tool would shift it, with the bias b + W·t, and rows of it near zero."""
    rows = np.abs(0.02 * rng.standard_normal((32, CHANNELS))).astype(np.float32)
    t = s = np.full(CHANNELS, 5.0, np.float32)
    w = W * s[:, None]
    scales = (np.abs(w).max(0) / 127).astype(np.float32)
    codes = np.rint(w / scales).astype(np.int8)
    made = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[n,{CHANNELS}] x) => (float[n,{OUTPUTS}] y) {{
        z = Sub(x, t) u = Div(z, s) q = QuantizeLinear(u, step, zero) d = DequantizeLinear(q, step, zero)
        v = DequantizeLinear<axis = 1>(codes, scales) m = MatMul(d, v) y = Add(m, b) }}"""
    )
    stored = {"t": t, "s": s, "step": np.float32(1 / 127), "zero": np.int8(0), "codes": codes, "scales": scales}
    stored["b"] = (B + t @ W).astype(np.float32)
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in stored.items())
    onnx.checker.check_model(made, full_check=True)
    return model("MatMul"), made, rows


@pytest.mark.parametrize("seed", range(3))
def test_another_writers_bias_is_judged_with_its_whole_shift(tmp_path: Path, seed: int) -> None:
    """It knew the weights before they were rounded: what rounding took from them meets the shift."""
    proto, made, rows = other_writer(np.random.default_rng(seed))
    for name, file in (("model", proto), ("made", made)):
        onnx.save(file, tmp_path / f"{name}.onnx")
    files = tmp_path / "model.onnx", tmp_path / "made.onnx"
    compared = normdeploy.verify(*files, feeds=[{"x": rows}])
    unrounded = [r for r in compared.results if "activations not rounded" in r.runtime]
    assert [r.verdict for r in unrounded] == ["pass"]
    made.metadata_props.add(key=RECENTRED, value='{"b": []}')  # a record that is wrong allows less
    onnx.save(made, files[1])
    compared = normdeploy.verify(*files, feeds=[{"x": rows}])
    assert [r.verdict for r in compared.results if "activations not rounded" in r.runtime] == ["fail"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", GRAPHS)
def test_rows_of_zeros_pass_with_what_float32_rounds_of_a_bias(tmp_path: Path, kind: str, seed: int) -> None:
    """There the weights' steps do nothing, and the bias of some 30 terms is rounded nevertheless."""
    rng = np.random.default_rng(seed)
    proto = model(kind)
    for tensor in proto.graph.initializer:
        drawn = rng.standard_normal(numpy_helper.to_array(tensor).shape).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(drawn, tensor.name))
    made, _ = quantize_model(proto, QuantizationRequest("int8"), split_samples([{"x": X}], SPECS))
    files = tmp_path / "model.onnx", tmp_path / "made.onnx"
    for file, path in zip((proto, made), files, strict=True):
        onnx.save(file, path)
    compared = normdeploy.verify(*files, feeds=[{"x": np.zeros((4, CHANNELS), np.float32)}])
    assert [r.verdict for r in compared.results if "activations not rounded" in r.runtime] == ["pass"]


@pytest.mark.parametrize("record", ["", "{", "7", '["b"]', '{"b": 1}', '{"nobody": []}'])
def test_a_record_of_nothing_is_none(record: str) -> None:
    made, _ = quantize_model(model("MatMul"), QuantizationRequest("int8"), split_samples([{"x": X}], SPECS))
    (entry,) = [p for p in made.metadata_props if p.key == RECENTRED]
    entry.value = record
    zeros = {"x": np.zeros((1, CHANNELS), np.float32)}
    runner = QuantizedRunner(made)
    exact = runner.run_with_draw(zeros, RoundingDraw("exact", clips=False))["y"]
    assert np.abs(runner.run_with_draw(zeros, RoundingDraw("exact", 0, clips=False))["y"] - exact).max() > 0.1
