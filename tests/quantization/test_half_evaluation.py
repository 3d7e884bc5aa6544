"""Half precision around quantized layers, in one file: scales in its type, codes that fit them, norms in float32."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import normdeploy
from normdeploy.errors import InputError
from normdeploy.quantization.number_formats import FP8, INT4, INT8, broadcast_scales, quantize_to_codes, round_scales_up
from normdeploy.verbs.arguments.export_result import ExportResult
from tests.half_graphs import text, types

RNG = np.random.default_rng(0)
WIDTH = 64
X = RNG.standard_normal((64, WIDTH)).astype(np.float32)
HALVES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


@pytest.fixture(scope="module")
def block() -> onnx.ModelProto:
    proto = text(
        "n = LayerNormalization(x, gamma, beta) a = MatMul(n, w1) r = Relu(a) b = MatMul(r, w2) y = Add(b, x)",
        f"float[b,{WIDTH}] x",
        f"float[b,{WIDTH}] y",
        gamma=RNG.uniform(0.5, 2, WIDTH),
        beta=RNG.standard_normal(WIDTH),
        w1=RNG.standard_normal((WIDTH, 2 * WIDTH)) / 8,
        w2=RNG.standard_normal((2 * WIDTH, WIDTH)) / 11,
    )
    return proto


def made(block: onnx.ModelProto, to: str, half: str, **more: object) -> onnx.ModelProto:
    runtime = "tensorrt-rtx" if to == "fp8" else "any"
    result = normdeploy.optimize(
        block, quantize=to, precision=half, calibrate=[{"x": X}], **{"runtime": runtime, **more}
    )
    assert result.quantization is not None
    assert result.precision is not None
    assert result.proto is not None
    return result.proto


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("to", ["int8", "fp8", "int4"])
def test_scales_are_half_and_codes_are_theirs(
    block: onnx.ModelProto, to: str, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the second layer's weight stays the model's own
    monkeypatch.setattr("normdeploy.quantization.smoothing._condition_by_ranges", lambda *_: None)
    # each element rounded by itself, so that its code is known
    monkeypatch.setattr(
        "normdeploy.quantization.quantizer.compensate_rounding", lambda moved, left, plans, *rest: plans
    )
    proto, form = made(block, to, half), {"int8": INT8, "fp8": FP8, "int4": INT4}[to]
    kinds = types(proto)
    constants = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    pairs = [n for n in proto.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert {kinds[n.input[1]] for n in pairs} == {HALVES[half].name}
    products = [n for n in proto.graph.node if n.op_type == "MatMul"]
    assert {kinds[name] for n in products for name in (*n.input, *n.output)} == {HALVES[half].name}
    norm = next(n for n in proto.graph.node if n.op_type == "LayerNormalization")
    assert {kinds[name] for name in (*norm.input, *norm.output)} == {"float32"}
    # the second product's weight is the model's own: its codes are those of the scale that the file holds
    (w2,) = (numpy_helper.to_array(t) for t in block.graph.initializer if t.name == "w2")
    of_w2 = next(n for n in pairs if n.op_type == "DequantizeLinear" and n.input[0].startswith("w2"))
    attrs = {a.name: a.i for a in of_w2.attribute}
    scales = broadcast_scales(
        constants[of_w2.input[1]].astype(np.float32), w2.shape, attrs["axis"], attrs.get("block_size", 0)
    )
    np.testing.assert_array_equal(constants[of_w2.input[0]], quantize_to_codes(w2, scales, form))
    largest = np.abs(w2 / scales).max()
    assert form.high * (1 - 2.0**-7) <= largest <= form.high  # rounded up: nothing is cut off, and little is lost


def test_float16_runs_in_onnxruntime_and_is_near(block: onnx.ModelProto) -> None:
    """int8's own error, on the same samples, is a hundred times as large as float16's unit."""
    proto = made(block, "int8", "fp16")
    plain = normdeploy.optimize(block, quantize="int8", calibrate=[{"x": X}]).proto
    assert plain is not None

    def run(file: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
        session = onnxruntime.InferenceSession(file.SerializeToString(), providers=["CPUExecutionProvider"])
        return np.asarray(session.run(None, {"x": x})[0], np.float64)

    exact, int8, both = run(block, X), run(plain, X), run(proto, X.astype(np.float16))
    errors = [float(np.linalg.norm(y - exact)) for y in (int8, both)]
    assert errors[1] <= 1.2 * errors[0]
    assert errors[0] <= 0.02 * float(np.linalg.norm(exact))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("to", ["int8", "fp8"])
def test_scales_of_weights_that_make_up_for_errors_are_rounded_up_too(
    block: onnx.ModelProto, to: str, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the second layer's weight stays the model's own
    monkeypatch.setattr("normdeploy.quantization.smoothing._condition_by_ranges", lambda *_: None)
    proto, form = made(block, to, half), {"int8": INT8, "fp8": FP8}[to]
    constants = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    (of_w2,) = (n for n in proto.graph.node if n.op_type == "DequantizeLinear" and n.input[0].startswith("w2"))
    (w2,) = (numpy_helper.to_array(t) for t in block.graph.initializer if t.name == "w2")
    scales = constants[of_w2.input[1]].astype(np.float32)
    assert not np.array_equal(
        constants[of_w2.input[0]], quantize_to_codes(w2, scales, form)
    )  # it is not rounded one by one
    largest = np.abs(w2 / scales).max(0)
    assert (largest <= form.high).all()
    assert (largest >= form.high * (1 - 2.0**-6)).all()


def test_the_metric_is_that_of_the_half_file_and_blocks_go_back_to_float32_for_it(
    block: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of weights rounded one by one int8 is the larger part of the error, and leaving a layer out reaches nothing
    monkeypatch.setattr(
        "normdeploy.quantization.quantizer.compensate_rounding", lambda moved, left, plans, *rest: plans
    )

    def value(metric: str, **more: object) -> tuple[float, ExportResult]:
        result = normdeploy.optimize(block, quantize="int8", calibrate=[{"x": X}], metric=metric, **more)
        assert result.quantization is not None
        return result.quantization.judged[0].value, result

    (plain, _), (half, kept) = value("snr>=1"), value("snr>=1", precision="bf16")
    assert half < plain
    assert kept.precision is not None
    # scales in bfloat16 cost int8 itself a part of what lies between
    least = half + (plain - half) / 8
    reached, wider = value(f"snr>={least}", precision="bf16")
    assert wider.precision is not None
    assert reached >= least
    assert kept.precision.kept < wider.precision.kept < wider.precision.nodes


def test_onnxruntime_has_no_such_kernels(block: onnx.ModelProto) -> None:
    for runtime in ("onnxruntime", "onnxruntime-accurate"):
        with pytest.raises(InputError, match="onnxruntime's int8 kernels read and write float32: with fp16"):
            made(block, "int8", "fp16", runtime=runtime)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("to", ["int8", "fp8", "int4"])
def test_an_engine_is_built(block: onnx.ModelProto, to: str, half: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    onnx.save(made(block, to, half, runtime="tensorrt-rtx", fuse="portable"), tmp_path / "x.onnx")
    engine = normdeploy.build(
        tmp_path / "x.onnx", tmp_path / "x.engine", compute_capabilities=["8.9"], profiles=["b=1:8:64"]
    )
    assert HALVES[half].name in engine.types


@pytest.mark.parametrize("half", HALVES)
def test_scales_are_rounded_up(half: str) -> None:
    dtype = HALVES[half]
    scales = np.exp2(RNG.uniform(-14, 4, 4096)).astype(np.float32)
    kept = round_scales_up(scales, dtype)
    np.testing.assert_array_equal(kept.astype(dtype).astype(np.float32), kept)
    assert (kept >= scales).all()
    assert (kept <= scales * (1 + float(ml_dtypes.finfo(dtype).eps))).all()
    assert round_scales_up(np.float32(2.0**-100), dtype) == 2.0**-20  # a channel of zeros: no scale is zero
    np.testing.assert_array_equal(round_scales_up(scales, np.dtype(np.float32)), scales)
