"""What is quantized, to the bit: QuantizeLinear as onnxruntime runs it, on ties, numbers beside them, what is
saturated, infinities and NaN.

With γ = 0 a LayerNorm is β exactly, and with ε = 0 the RMSNorm of ones is γ: so the numbers that are quantized are
known to the bit, and any kernel must give the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from normdeploy_plugins._aot import CAPABILITIES, AotError
from normdeploy_plugins._launch import QUANTIZED
from normdeploy_plugins._quantize import LARGEST, quantized

from . import emulated, interpreted
from .cases import Case
from .usual import USUAL, compiled

pytestmark = pytest.mark.usefixtures("cache")
TYPES = {"int8": onnx.TensorProto.INT8, "fp8": onnx.TensorProto.FLOAT8E4M3FN}
OPS = ("LayerNormQuantize", "RMSNormQuantize", "AddLayerNormQuantize", "AddRMSNormQuantize")


def quantize_linear(y: np.ndarray, scale: float, to: str) -> np.ndarray:
    """Of float32 numbers, by onnxruntime."""
    zero = onnx.helper.make_tensor("zero", TYPES[to], [], [0])
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("QuantizeLinear", ["y", "scale", "zero"], ["q"])],
        "quantize",
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n"])],
        [onnx.helper.make_tensor_value_info("q", TYPES[to], ["n"])],
        [onnx.numpy_helper.from_array(np.float32(scale), "scale"), zero],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (q,) = session.run(None, {"y": y.astype(np.float32)})
    return (q if to == "int8" else q.view(ml_dtypes.float8_e4m3fn)).astype(np.float64)


def numbers(to: str, scale: float) -> np.ndarray:
    """Ties, the numbers beside them, and what is larger than all, in float32."""
    if to == "int8":
        ties = np.arange(-130, 130) + 0.5
    else:
        positive = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        ties = (positive[1:] + positive[:-1]) / 2
        ties = np.concatenate([positive, ties, -ties, [464.0, 480.0]])
    y = (ties * np.float64(np.float32(scale))).astype(np.float32)
    beside = [np.nextafter(y, np.float32(way)) for way in (np.inf, -np.inf)]
    # so near to a tie that float16 can't tell
    close = [(y * np.float32(1 + e)).astype(np.float32) for e in (2.0**-14, -(2.0**-14))]
    most = np.float32([0.0, -0.0, 1e-45, 1e30, -1e30, 3e38, -3e38, np.inf, -np.inf, np.nan])
    return np.concatenate([y, *beside, *close, most])


def known(op: str, y: np.ndarray, dtype: str, to: str, scale: float) -> tuple[Case, list[np.ndarray]]:
    """A call whose norm is ``y`` exactly, two rows of it."""
    attributes = {"epsilon": 1e-5 if "Layer" in op else 0.0, "to": to} | ({} if op.startswith("Add") else {"axis": -1})
    case = Case(op, (2, len(y)), attributes, dtype, parameters="fp32" if dtype != "fp32" else "")
    ones = np.ones(case.shape)
    data = [ones / 2, ones / 2] if op.startswith("Add") else [ones]
    if "Layer" in op:
        data[0] = data[0] * np.random.default_rng(0).integers(-3, 4, case.shape)
    return case, [*data, *([np.zeros(len(y)), y] if "Layer" in op else [y]), np.array([scale])]


def ends_alike(got: np.ndarray, expected: np.ndarray) -> None:
    for row in got:
        assert np.array_equal(row, expected, equal_nan=True), [
            *zip(row[row != expected], expected[row != expected], strict=True)
        ][:5]


@pytest.mark.parametrize("scale", [0.1, 0.25])
@pytest.mark.parametrize("to", QUANTIZED)
def test_the_reference_is_quantize_linear(to: str, scale: float) -> None:
    """But for numbers so near to a tie that the quotient in float32 is one."""
    y = numbers(to, scale)
    with np.errstate(all="ignore"):
        quotient = (y / np.float32(scale)).astype(np.float64)
    assert np.array_equal(quantized(quotient, np.float64(1), to), quantize_linear(y, scale, to), equal_nan=True)


@pytest.mark.parametrize("scale", [0.1, 0.25])
@pytest.mark.parametrize("to", QUANTIZED)
@pytest.mark.parametrize("op", OPS)
def test_every_bit_in_the_interpreter(interpreter: Callable[..., Any], op: str, to: str, scale: float) -> None:
    y = numbers(to, scale)
    case, arrays = known(op, y, "fp32", to, scale)
    _, (q, *_) = interpreter(interpreted.run, case.op, arrays, case.dtypes(), case.attributes)
    ends_alike(q, quantize_linear(y, scale, to))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)], ids=lambda c: f"{c[0]}.{c[1]}")
@pytest.mark.parametrize("to", QUANTIZED)
@pytest.mark.parametrize("op", OPS)
def test_every_bit_of_what_is_compiled(op: str, to: str, capability: tuple[int, int]) -> None:
    if (to, capability) == ("fp8", (8, 0)):  # which it has not: see below
        capability = (10, 0)
    y = numbers(to, 0.1)
    case, arrays = known(op, y, "fp32", to, 0.1)
    _, (q, *_) = emulated.run(case, arrays, capability=capability)
    ends_alike(q, quantize_linear(y, 0.1, to))


@pytest.mark.parametrize("to", QUANTIZED)
def test_every_bit_by_any_usual_scale(to: str) -> None:
    """The quotient is a division's, whatever the scale: by its reciprocal alone one in some hundreds would be wrong."""
    rng, wrong = np.random.default_rng(5), 0
    for scale in np.exp(rng.uniform(np.log(2.0**-60), np.log(2.0**60), 12)).astype(np.float32).tolist():
        y = numbers(to, scale)
        case, arrays = known("LayerNormQuantize", y, "fp32", to, scale)
        _, (q,) = emulated.run(case, arrays)
        expected = quantize_linear(y, scale, to)
        ends_alike(q, expected)
        with np.errstate(all="ignore"):
            by_reciprocal = quantized((y * (np.float32(1) / np.float32(scale))).astype(np.float64), np.float64(1), to)
        wrong += int((by_reciprocal != expected).sum() - np.isnan(expected).sum())
    assert wrong > 50  # the numbers tell the two apart


@pytest.mark.parametrize("least", [0.0, 100.0])
@pytest.mark.parametrize("capability", [(8, 9), (9, 0)], ids=lambda c: f"{c[0]}.{c[1]}")
@pytest.mark.parametrize("to", QUANTIZED)
@pytest.mark.parametrize("op", [op.replace("Quantize", "DynamicQuantize") for op in OPS])
def test_every_bit_of_a_row_by_its_own_scale(op: str, to: str, capability: tuple[int, int], least: float) -> None:
    """The largest is LARGEST, so that the scale is 1 and ties are ties; then rows by a scale that is none such, of
    zeros alone, and with a NaN."""
    y = numbers(to, 1.0)
    y = y[np.abs(y) <= LARGEST[to]]
    rows = [y, y * np.float32(0.3), np.zeros_like(y), np.where(np.arange(len(y)) == 5, np.float32(np.nan), y)]
    for row in rows:
        case, arrays = known(op.replace("Dynamic", ""), row, "fp32", to, 1.0)
        case = Case(op, case.shape, case.attributes | {"least": least}, "fp32")
        _, (q, scales, *_) = emulated.run(case, arrays[:-1], capability=capability)
        with np.errstate(all="ignore"):
            scale = np.maximum(np.abs(row).max(), np.float32(least)) / np.float32(LARGEST[to])
            expected = quantize_linear(row / scale, 1.0, to)
        assert np.array_equal(scales, np.full((2, 1), scale), equal_nan=True)
        ends_alike(q, expected)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("to", QUANTIZED)
def test_a_norm_is_rounded_to_its_own_type_before(to: str, dtype: str) -> None:
    """As where QuantizeLinear reads the norm's result: of ties many are none any more."""
    y = numbers(to, 0.1)
    with np.errstate(over="ignore"):
        rounded = y.astype(emulated.storage(dtype)).astype(np.float32)
    expected = quantize_linear(rounded, 0.1, to)
    assert not np.array_equal(expected, quantize_linear(y, 0.1, to), equal_nan=True)
    case, arrays = known("LayerNormQuantize", y, dtype, to, 0.1)
    _, (q,) = emulated.run(case, arrays)
    ends_alike(q, expected)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c < (8, 9)], ids=lambda c: f"{c[0]}.{c[1]}")
def test_fp8_below_8_9_is_refused_by_name(op: str, capability: tuple[int, int]) -> None:
    shape, attributes = USUAL[op]
    with pytest.raises(
        AotError, match=rf"{op} to FP8 needs a GPU of compute capability 8\.9 or newer, not {capability[0]}"
    ):
        compiled(op, shape, attributes | {"to": "fp8"}, "fp16", capability)
