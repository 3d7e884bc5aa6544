"""QuantizeLinear, DequantizeLinear and their kin: the float64 evaluator beside onnx.reference and onnxruntime."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from normdeploy.evaluate import quantize_ops
from normdeploy.evaluate.evaluator import UnsupportedOp, evaluate_node, is_supported, silence_numpy
from normdeploy.ort_sessions.session import EXACT_INTEGERS

INTEGERS = ["INT8", "UINT8", "INT16", "UINT16", "INT4", "UINT4"]
FLOATS = ["FLOAT8E4M3FN", "FLOAT8E5M2"]
# name -> shape of the scale, attributes, for an input of 4×6×10
FORMS = {
    "tensor": ((), {}),
    "one number": ((1,), {}),
    "axis 1": ((6,), {"axis": 1}),
    "last axis": ((10,), {"axis": -1}),
    "blocks": ((4, 2, 10), {"axis": 1, "block_size": 3}),
    "a block that is cut": ((4, 6, 3), {"axis": 2, "block_size": 4}),
}


def model_of(op, inputs, attrs, outputs, opset):
    """One node as a model of its inputs, all of them given when it is run."""
    kinds = [helper.np_dtype_to_tensor_dtype(v.dtype) for v in inputs]
    names = [f"i{k}" for k in range(len(inputs))]
    made = [f"o{k}" for k in range(len(outputs))]
    graph = helper.make_graph(
        [helper.make_node(op, names, made, **attrs)],
        "one",
        [helper.make_tensor_value_info(n, k, v.shape) for n, k, v in zip(names, kinds, inputs, strict=True)],
        [helper.make_tensor_value_info(n, k, None) for n, k in zip(made, outputs, strict=True)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def by_runtime(op, inputs, attrs, outputs, opset):
    """What onnxruntime makes of it, with inputs of any type as initializers but for the first where numpy has that."""
    model = model_of(op, inputs, attrs, outputs, opset)
    fixed = inputs if inputs[0].dtype != np.float32 else [None, *inputs[1:]]
    for name, value in zip([v.name for v in model.graph.input], fixed, strict=True):
        if value is not None:
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    for value in [v for v in model.graph.input if v.name in {t.name for t in model.graph.initializer}]:
        model.graph.input.remove(value)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for name, value in EXACT_INTEGERS.items():
        options.add_session_config_entry(name, value)
    kind = helper.tensor_dtype_to_np_dtype(outputs[0])
    if kind.name not in ("float32", "int8", "uint8", "int16", "uint16"):  # comes back as what DequantizeLinear says
        made = model.graph.output[0].name
        model.graph.initializer.append(numpy_helper.from_array(np.ones((), np.float32), "unit"))
        model.graph.node.append(helper.make_node("DequantizeLinear", [made, "unit"], ["seen"]))
        del model.graph.output[:]
        model.graph.output.append(helper.make_tensor_value_info("seen", TensorProto.FLOAT, None))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {} if fixed[0] is not None else {"i0": inputs[0]})


def numbers(rng, scale, kind, shape=(4, 6, 10)):
    """Values around and beyond the range, exact ties among them: scales are powers of two."""
    low, high = quantize_ops.finite_limits(kind)
    steps = rng.integers(round(low * 1.3) * 2, round(high * 1.3) * 2 + 1, shape) / 2  # whole and half steps
    return (steps * quantize_ops.broadcast_parameter(scale, shape, *scale_at(scale, shape))).astype(np.float32)


def scale_at(scale, shape):
    form = next(attrs for size, attrs in FORMS.values() if size == scale.shape)
    return form.get("axis", 1), form.get("block_size", 0)


def zero_points(rng, kind, shape):
    low, high = quantize_ops.finite_limits(kind)
    return rng.integers(int(low), int(high) + 1, shape).astype(np.int64).astype(kind) if "int" in kind.name else None


def draw(rng, name, form):
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(getattr(TensorProto, name)))
    shape, attrs = FORMS[form]
    scale = (2.0 ** rng.integers(-6, 3, shape)).astype(np.float32).reshape(shape)
    zero = zero_points(rng, kind, shape)
    return kind, attrs, scale, np.zeros(shape, kind) if zero is None else np.asarray(zero).reshape(shape)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", INTEGERS + FLOATS)
def test_quantize_and_dequantize_are_those_of_the_reference_and_of_onnxruntime(name, form):
    rng = np.random.default_rng([*map(ord, name + form)])
    kind, attrs, scale, zero = draw(rng, name, form)
    number = getattr(TensorProto, name)
    x = numbers(rng, scale, kind)
    if "float" in kind.name:
        x = (x.astype(np.float64) * rng.uniform(0.5, 1, x.shape)).astype(np.float32)
    with silence_numpy():
        (q,) = evaluate_node("QuantizeLinear", [x.astype(np.float64), scale.astype(np.float64), zero], attrs, opset=21)
        (y,) = evaluate_node("DequantizeLinear", [q, scale.astype(np.float64), zero], attrs, opset=21)
    assert q.dtype == kind
    assert y.dtype == np.float64
    (told,) = ReferenceEvaluator(model_of("QuantizeLinear", [x, scale, zero], attrs, [number], 21)).run(
        None, {"i0": x, "i1": scale, "i2": zero}
    )
    (ran,) = by_runtime("QuantizeLinear", [x, scale, zero], attrs, [number], 21)
    np.testing.assert_array_equal(q.astype(np.float64), told.astype(np.float64))
    np.testing.assert_array_equal(q.astype(np.float64), ran.astype(np.float64))
    (told,) = ReferenceEvaluator(model_of("DequantizeLinear", [q, scale, zero], attrs, [TensorProto.FLOAT], 21)).run(
        None, {"i0": q, "i1": scale, "i2": zero}
    )
    (ran,) = by_runtime("DequantizeLinear", [q, scale, zero], attrs, [TensorProto.FLOAT], 21)
    np.testing.assert_array_equal(y, told.astype(np.float64))  # a product with a power of two rounds nothing
    np.testing.assert_array_equal(y, ran.astype(np.float64))


@pytest.mark.parametrize("name", ["INT8", "UINT8", "INT16", "UINT16"])
def test_any_scale_where_float32_and_float64_round_alike(name):
    """Not within 1e-5 of a tie: onnxruntime's quotient is float32, whose error is 1.2e-7 of at most 1.3 · 32768."""
    rng = np.random.default_rng(ord(name[-1]))
    kind = np.dtype(name.lower())
    scale, zero = np.float32(rng.uniform(1e-3, 0.1)), zero_points(rng, kind, ())
    x = (rng.standard_normal(4000) * 90 * scale).astype(np.float32)
    steps = x.astype(np.float64) / np.float64(scale)
    x = x[np.abs(np.abs(steps - np.rint(steps)) - 0.5) > 1e-4]
    (q,) = evaluate_node("QuantizeLinear", [x.astype(np.float64), np.float64(scale), zero], {}, opset=13)
    (ran,) = by_runtime(
        "QuantizeLinear", [x, np.asarray(scale), np.asarray(zero)], {}, [getattr(TensorProto, name)], 21
    )
    np.testing.assert_array_equal(q, ran)


@pytest.mark.parametrize("name", INTEGERS)
def test_what_is_not_finite_becomes_an_end_of_the_range(name):
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(getattr(TensorProto, name)))
    low, high = quantize_ops.finite_limits(kind)
    x = np.array([np.inf, -np.inf, 1e30, -1e30, np.nan], np.float32)
    (q,) = evaluate_node("QuantizeLinear", [x.astype(np.float64), np.float64(0.5), np.ones((), kind)], {}, opset=21)
    assert q.astype(np.float64).tolist() == [high, low, high, low, low]
    (ran,) = by_runtime(
        "QuantizeLinear", [x[:4], np.float32(0.5).reshape(()), np.ones((), kind)], {}, [getattr(TensorProto, name)], 21
    )
    assert ran.astype(np.float64).tolist() == [high, low, high, low]


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("name", FLOATS)
def test_floats_of_eight_bits_saturate_or_overflow(name, saturate):
    """The table of Cast in ONNX's spec, which QuantizeLinear refers to, and onnxruntime on the same."""
    number = getattr(TensorProto, name)
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(number))
    largest = quantize_ops.finite_limits(kind)[1]
    x = np.array([np.inf, -np.inf, np.nan, largest * 1.5, -largest * 1.5, largest, 0.0, largest / 3], np.float32)
    inputs = [x, np.ones((), np.float32), np.zeros((), kind)]
    (q,) = evaluate_node("QuantizeLinear", [x.astype(np.float64), *inputs[1:]], {"saturate": saturate}, opset=19)
    beyond = largest if saturate else np.inf if name == "FLOAT8E5M2" else np.nan
    np.testing.assert_array_equal(q.astype(np.float64)[:6], [beyond, -beyond, np.nan, beyond, -beyond, largest])
    (ran,) = by_runtime("QuantizeLinear", inputs, {"saturate": saturate}, [number], 19)
    np.testing.assert_array_equal(q.astype(np.float64), ran.astype(np.float64))


@pytest.mark.parametrize("name", FLOATS)
def test_floats_of_eight_bits_are_the_nearest_and_even_at_ties(name):
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(getattr(TensorProto, name)))
    codes = np.arange(256, dtype=np.uint8).view(kind).astype(np.float64)
    table = np.unique(codes[np.isfinite(codes)])
    middles = (table[1:] + table[:-1]) / 2
    even = np.array([int(np.float64(v).astype(kind).view(np.uint8)) % 2 == 0 for v in table])
    expected = np.where(even[1:], table[1:], table[:-1])
    (q,) = evaluate_node("QuantizeLinear", [middles, np.float64(1), np.zeros((), kind)], {}, opset=19)
    np.testing.assert_array_equal(q.astype(np.float64), expected)
    above = np.nextafter(middles, np.inf)  # one unit of float64 beside a tie: rounding twice would lose it
    (q,) = evaluate_node("QuantizeLinear", [above, np.float64(1), np.zeros((), kind)], {}, opset=19)
    np.testing.assert_array_equal(q.astype(np.float64), table[1:])


def test_the_type_comes_from_the_zero_point_or_the_attribute_or_is_uint8():
    x, scale = np.array([-3.0, 3.0]), np.float64(1)
    assert evaluate_node("QuantizeLinear", [x, scale], {}, opset=21)[0].tolist() == [0, 3]
    assert evaluate_node("QuantizeLinear", [x, scale], {"output_dtype": 3}, opset=21)[0].dtype == np.int8
    assert (
        evaluate_node("QuantizeLinear", [x, scale, np.zeros((), ml_dtypes.int4)], {}, opset=21)[0].dtype
        == ml_dtypes.int4
    )
    with pytest.raises(UnsupportedOp, match="type 1"):
        evaluate_node("QuantizeLinear", [x, scale], {"output_dtype": 1}, opset=21)
    with pytest.raises(ValueError, match="expected one value per index"):
        evaluate_node("QuantizeLinear", [np.ones((2, 3)), np.ones(2)], {"axis": 1}, opset=21)


def test_dynamic_quantization_is_that_of_onnxruntime():
    rng = np.random.default_rng(5)
    for low, high in [(-1, 1), (0.5, 3), (-4, -1), (0, 0)]:
        x = rng.uniform(low, high, 300).astype(np.float32)
        q, scale, zero = evaluate_node("DynamicQuantizeLinear", [x.astype(np.float64)], {}, opset=11, outputs=3)
        kinds = [TensorProto.UINT8, TensorProto.FLOAT, TensorProto.UINT8]
        ran = by_runtime("DynamicQuantizeLinear", [x], {}, kinds, 11)
        np.testing.assert_allclose(scale, ran[1] if x.any() else scale, rtol=2e-7)  # a division in float32
        assert zero == ran[2]
        steps = x / scale
        sure = np.abs(np.abs(steps - np.rint(steps)) - 0.5) > 1e-4  # elsewhere float32 may round to the other side
        np.testing.assert_array_equal(q[sure], ran[0][sure])


def test_products_of_integers():
    rng = np.random.default_rng(6)
    a, b = rng.integers(0, 256, (3, 4, 8)).astype(np.uint8), rng.integers(-128, 128, (8, 5)).astype(np.int8)
    zeros = [np.uint8(7).reshape(()), rng.integers(-9, 9, 5).astype(np.int8)]
    (y,) = evaluate_node("MatMulInteger", [a, b, *zeros], {}, opset=10)
    assert y.dtype == np.int32
    np.testing.assert_array_equal(y, (a.astype(np.int64) - 7) @ (b.astype(np.int64) - zeros[1]))
    # Without VNNI and with its optimizer off, onnxruntime saturates sums of two products beyond 16 bits: 2 · 127 · 128.
    small = np.minimum(a, 127)
    (y,) = evaluate_node("MatMulInteger", [small, b, *zeros], {}, opset=10)
    (ran,) = by_runtime("MatMulInteger", [small, b, *zeros], {}, [TensorProto.INT32], 10)
    np.testing.assert_array_equal(y, ran)
    x, w = rng.integers(0, 256, (2, 3, 6, 6)).astype(np.uint8), rng.integers(0, 256, (4, 3, 3, 3)).astype(np.uint8)
    zeros = [np.uint8(100).reshape(()), np.uint8(130).reshape(())]
    attrs = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
    (y,) = evaluate_node("ConvInteger", [x, w, *zeros], attrs, opset=10)
    (ran,) = by_runtime("ConvInteger", [x, w, *zeros], attrs, [TensorProto.INT32], 10)
    np.testing.assert_array_equal(y, ran)


def test_nothing_may_look_through_a_quantization():
    assert not any(is_supported(domain, op) for domain, op in quantize_ops.TABLE)
    assert onnx.defs.has("QuantizeLinear")
