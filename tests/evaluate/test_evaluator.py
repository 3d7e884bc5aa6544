"""The float64 evaluator against torch in float64 and formulas in extended precision; its refusals, types and speed."""

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from normdeploy.evaluate.evaluator import UnsupportedOp, evaluate_node, is_supported, silence_numpy
from tests.work import count_calls

RNG = np.random.default_rng(0)
X, IMAGE = RNG.standard_normal((2, 3, 4)), RNG.standard_normal((2, 4, 5, 6))
CHANNEL = [RNG.standard_normal(4), RNG.standard_normal(4), RNG.standard_normal(4), RNG.uniform(0.5, 2.0, 4)]


def ints(*values):
    return np.array(values, np.int64)


def one(op, inputs, attrs=None, opset=21, domain=""):
    """The first output of a node."""
    with silence_numpy():
        return evaluate_node(op, inputs, attrs or {}, opset=opset, domain=domain)[0]


# --- float64: nothing may be lost -------------------------------------------------------------------------------------

CONVOLUTIONS = [
    {"groups": groups, "stride": stride, "padding": padding, "dilation": dilation}
    for groups, stride, padding, dilation in [(1, 1, 0, 1), (1, 2, 1, 1), (2, 1, 2, 2), (4, 3, 1, 1), (2, 2, 1, 3)]
]


def attributes(rank, groups, stride, padding, dilation):
    return {"group": groups, "strides": [stride] * rank, "pads": [padding] * (2 * rank), "dilations": [dilation] * rank}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("form", CONVOLUTIONS, ids=str)
def test_conv_in_float64(form, rank, bias):
    x, w = (
        RNG.standard_normal((2, 4, 9, 8, 7)[: rank + 2]),
        RNG.standard_normal((8, 4 // form["groups"], 3, 2, 3)[: rank + 2]),
    )
    inputs = [x, w, RNG.standard_normal(8)] if bias else [x, w]
    expected = getattr(F, f"conv{rank}d")(*map(torch.from_numpy, inputs), **form).numpy()
    np.testing.assert_allclose(
        one("Conv", inputs, attributes(rank, **form)), expected, rtol=0, atol=1e-13
    )  # up to 72 products near 1


@pytest.mark.parametrize("output_padding", [0, 1])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("form", CONVOLUTIONS, ids=str)
def test_conv_transpose_in_float64(form, rank, output_padding):
    if output_padding >= max(form["stride"], form["dilation"]):
        output_padding = 0  # torch asks for less than stride or dilation
    x, w = RNG.standard_normal((2, 4, 5, 4, 3)[: rank + 2]), RNG.standard_normal((4, 3, 3, 2, 3)[: rank + 2])
    inputs = [x, w, RNG.standard_normal(3 * form["groups"])]
    function = getattr(F, f"conv_transpose{rank}d")
    expected = function(*map(torch.from_numpy, inputs), output_padding=output_padding, **form).numpy()
    attrs = attributes(rank, **form) | {"output_padding": [output_padding] * rank}
    np.testing.assert_allclose(one("ConvTranspose", inputs, attrs), expected, rtol=0, atol=1e-13)


POINTWISE = {
    "Exp": torch.exp,
    "Erf": torch.erf,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "Softplus": F.softplus,
    "Gelu": F.gelu,
    "HardSwish": F.hardswish,
    "Relu": F.relu,
    "Softmax": lambda x: torch.softmax(x, -1),
    "Sqrt": torch.sqrt,
    "Log": torch.log,
    "Reciprocal": torch.reciprocal,
    "ReduceLogSumExp": lambda x: torch.logsumexp(x, (0, 1), keepdim=True),
}


@pytest.mark.parametrize("op", POINTWISE)
def test_functions_in_float64(op):
    x = RNG.standard_normal((50, 40)) * 3
    # a few u of the function's own scale; the threshold of F.softplus costs it exp(-20) beyond 20, which is not reached
    np.testing.assert_allclose(one(op, [x]), POINTWISE[op](torch.from_numpy(x)).numpy(), rtol=1e-14, atol=1e-15)


def test_attributes_are_float32_numbers():
    x = np.full((1, 4), -1.0)
    assert one("LeakyRelu", [x])[0, 0] == -float(np.float32(0.01))
    assert one("HardSigmoid", [-x])[0, 0] == float(np.float32(0.2)) + 0.5


BATTERY = {
    "normal": RNG.standard_normal((2, 6, 5, 4)),
    "offset": RNG.standard_normal((2, 6, 5, 4)) + 1e3,
    "epsilon dominates": RNG.standard_normal((2, 6, 5, 4)) * 1e-4,
    "zeros": np.zeros((2, 6, 5, 4)),
    "constant": np.full((2, 6, 5, 4), 0.1),
    "large": RNG.standard_normal((2, 6, 5, 4)) * 6e4,
}
EPSILON = np.longdouble(np.float32(1e-5))  # the default of every one of these ops
SCALE, SHIFT = RNG.standard_normal(6), RNG.standard_normal(6)


def standardized(x, axes, epsilon=EPSILON):
    """(x - mean) / sqrt(mean((x - mean)²) + epsilon) in extended precision."""
    x = x.astype(np.longdouble)
    centered = x - x.mean(axes, keepdims=True)
    return centered / np.sqrt((centered**2).mean(axes, keepdims=True) + epsilon)


def channels(vector):
    return vector.reshape(1, -1, 1, 1)


def layer_norm(x):
    scale, shift = RNG.standard_normal((5, 4)), RNG.standard_normal((1, 4))
    return one("LayerNormalization", [x, scale, shift], {"axis": 2}), standardized(x, (2, 3)) * scale + shift


def modulated_layer_norm(x):
    scale, shift = RNG.standard_normal((2, 6, 1, 4)), RNG.standard_normal((2, 1, 1, 4))
    return one("LayerNormalization", [x, scale, shift]), standardized(x, (3,)) * scale + shift


def rms_norm(x):
    scale, wide = RNG.standard_normal(4), x.astype(np.longdouble)
    return (
        one("RMSNormalization", [x, scale], opset=23),
        wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPSILON) * scale,
    )


def instance_norm(x):
    return one("InstanceNormalization", [x, SCALE, SHIFT]), standardized(x, (2, 3)) * channels(SCALE) + channels(SHIFT)


def group_norm(x):
    expected = standardized(x.reshape(2, 3, -1), (2,)).reshape(x.shape) * channels(SCALE) + channels(SHIFT)
    return one("GroupNormalization", [x, SCALE, SHIFT], {"num_groups": 3}, 21), expected


def group_norm_18(x):
    """Scale and bias of opset 18 are one number a group."""
    scale, shift = SCALE[:3].copy(), SHIFT[:3].copy()
    expected = standardized(x.reshape(2, 3, -1), (2,)) * scale.reshape(1, 3, 1) + shift.reshape(1, 3, 1)
    return one("GroupNormalization", [x, scale, shift], {"num_groups": 3}, 18), expected.reshape(x.shape)


def batch_norm(x):
    mean, variance = RNG.standard_normal(6), np.abs(RNG.standard_normal(6))
    expected = (x.astype(np.longdouble) - channels(mean)) / np.sqrt(channels(variance) + EPSILON) * channels(
        SCALE
    ) + channels(SHIFT)
    return one("BatchNormalization", [x, SCALE, SHIFT, mean, variance], {}, 15), expected


def lp_norm(x):
    wide = x.astype(np.longdouble)
    length = np.sqrt((wide**2).sum(1, keepdims=True))
    return one("LpNormalization", [x], {"axis": 1}), np.divide(wide, length, out=np.zeros_like(wide), where=length > 0)


def skip_layer_norm(x):
    skip, gamma = RNG.standard_normal(x.shape), RNG.standard_normal(4)
    expected = standardized(x.astype(np.longdouble) + skip, (3,), np.longdouble(np.float32(1e-12))) * gamma
    return one("SkipLayerNormalization", [x, skip, gamma], {}, 1, "com.microsoft"), expected


NORMS = (
    layer_norm,
    modulated_layer_norm,
    rms_norm,
    instance_norm,
    group_norm,
    group_norm_18,
    batch_norm,
    lp_norm,
    skip_layer_norm,
)


@pytest.mark.parametrize("name", BATTERY)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
def test_norms_in_float64(norm, name):
    """Within 16 u, and as much again as x itself is rounded when the mean is taken off: u · max|x| / (spread of x, or
    sqrt(epsilon))."""
    x = BATTERY[name]
    got, expected = norm(x)
    condition = np.abs(x).max() / max(float(x.std()), math.sqrt(1e-5))
    assert got.dtype == np.float64
    np.testing.assert_allclose(
        got, expected.astype(np.float64), rtol=0, atol=16 * 2**-53 * (np.abs(expected).max() + condition)
    )


def test_layer_norm_statistics():
    x = RNG.standard_normal((3, 4, 5)) + 10
    y, mean, inverse = evaluate_node("LayerNormalization", [x, np.ones(5)], {"axis": -2}, opset=17, outputs=3)
    np.testing.assert_allclose(mean, x.mean((1, 2), keepdims=True), rtol=1e-14)
    np.testing.assert_allclose(inverse, 1 / np.sqrt(x.var((1, 2), keepdims=True) + float(np.float32(1e-5))), rtol=1e-13)
    np.testing.assert_allclose(y, (x - mean) * inverse, rtol=1e-13)
    assert len(evaluate_node("LayerNormalization", [x, np.ones(5)], {}, opset=17)) == 1


def test_mean_variance_norm_is_the_function_of_the_standard():
    x = RNG.standard_normal((2, 3, 4, 5))
    wide, axes = x.astype(np.longdouble), (0, 2, 3)
    deviation = np.sqrt((wide**2).mean(axes, keepdims=True) - wide.mean(axes, keepdims=True) ** 2)
    expected = (wide - wide.mean(axes, keepdims=True)) / (deviation + np.longdouble(np.float32(1e-9)))
    np.testing.assert_allclose(
        one("MeanVarianceNormalization", [x]), expected.astype(np.float64), rtol=1e-12, atol=1e-14
    )


# --- what is refused, and the rest of the contract --------------------------------------------------------------------


def test_forms_older_than_onnxruntime_reads():
    """Opset 6 and below, by hand."""
    x = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(one("Reshape", [x], {"shape": [3, -1]}, 1), x.reshape(3, 2))
    np.testing.assert_array_equal(
        one("Pad", [x], {"paddings": [0, 1, 0, 0], "value": 9.0}, 1), [[9, 0, 1, 2], [9, 3, 4, 5]]
    )
    np.testing.assert_array_equal(one("Tile", [x, ints(2), ints(1)], {}, 1), np.tile(x, (1, 2)))
    np.testing.assert_array_equal(one("Cast", [x], {"to": b"INT32"}, 1), x.astype(np.int32))
    np.testing.assert_array_equal(one("Clip", [x], {"max": 2.0, "consumed_inputs": [0]}, 1), np.minimum(x, 2))
    np.testing.assert_array_equal(one("Concat", [x, x], {}, 1), np.concatenate([x, x], axis=1))
    np.testing.assert_array_equal(one("Dropout", [x], {"is_test": 1}, 6), x)
    parameters = [np.array(values, np.float64) for values in ([1, 2, 3], [4, 5, 6], [0, 1, 2], [3, 8, 15])]
    scale, bias, mean, variance = parameters
    expected = (x - mean) / np.sqrt(variance + 1.0) * scale + bias
    np.testing.assert_allclose(
        one("BatchNormalization", [x, *parameters], {"is_test": 1, "epsilon": 1.0}, 6), expected, rtol=1e-15
    )
    np.testing.assert_array_equal(evaluate_node("Split", [x, ints(1, 2)], {"axis": 1}, opset=1, outputs=2)[1], x[:, 1:])


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "opset", "outputs", "message"),
    [
        ("Loop", [], {}, 21, 1, "Loop"),
        ("Dropout", [X, np.float64(0.5), np.array(True)], {}, 13, 1, "training mode"),
        ("Dropout", [X], {}, 6, 1, "training mode"),
        ("BatchNormalization", [IMAGE, *CHANNEL], {"training_mode": 1}, 15, 3, "training mode"),
        ("BatchNormalization", [IMAGE, *CHANNEL], {"training_mode": 1}, 14, 1, "training mode"),
        ("BatchNormalization", [IMAGE, *CHANNEL], {}, 9, 5, "training mode"),
        ("BatchNormalization", [IMAGE, *CHANNEL], {}, 6, 1, "training mode"),
        ("BatchNormalization", [IMAGE, *CHANNEL], {"spatial": 0}, 7, 1, "spatial"),
        ("Pad", [X, ints(1, 1, 1, 1, 1, 1)], {"mode": b"reflect"}, 18, 1, "reflect"),
        ("Cast", [X], {"to": 17}, 21, 1, "type 17"),
        ("Add", [X, X], {"broadcast": 1, "axis": 0}, 6, 1, "axis"),
        ("Constant", [], {"value_string": b"a"}, 21, 1, "value_string"),
        ("Constant", [], {"value": np.array(["a"])}, 21, 1, "type"),
    ],
)
def test_refusals(op, inputs, attrs, opset, outputs, message):
    with pytest.raises(UnsupportedOp, match=message):
        evaluate_node(op, inputs, attrs, opset=opset, outputs=outputs)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "opset"),
    [
        ("GroupNormalization", [IMAGE, *CHANNEL[:2]], {"num_groups": 3}, 21),
        ("GroupNormalization", [IMAGE, *CHANNEL[:2]], {"num_groups": 2}, 18),
        ("GroupNormalization", [IMAGE, np.ones(2), np.ones(2)], {"num_groups": 2}, 21),
        ("InstanceNormalization", [IMAGE, np.ones(1), np.ones(1)], {}, 21),
        ("LayerNormalization", [X, np.ones(4)], {"axis": 3}, 17),
        ("Conv", [IMAGE, np.zeros((2, 3, 3, 3))], {}, 21),
        ("Conv", [IMAGE, np.zeros((2, 4, 9, 9))], {}, 21),
        ("ConvTranspose", [IMAGE, np.zeros((3, 2, 3, 3))], {}, 21),
        ("Split", [X, ints(1, 1)], {"axis": 1}, 13),
        ("Squeeze", [X, ints(1)], {}, 13),
        ("ReduceMean", [X, ints(3)], {}, 18),
    ],
)
def test_inputs_that_do_not_fit(op, inputs, attrs, opset):
    with pytest.raises((ValueError, IndexError)):
        evaluate_node(op, inputs, attrs, opset=opset)


def test_supported_and_domains():
    assert is_supported("", "Add")
    assert is_supported("ai.onnx", "Add")
    assert is_supported("com.microsoft", "SkipLayerNormalization")
    assert not is_supported("com.microsoft", "Add")
    assert is_supported("", "Attention")
    assert not is_supported("", "DFT")
    np.testing.assert_array_equal(evaluate_node("Add", [X, X], {}, opset=21, domain="ai.onnx")[0], X + X)


def test_integers_keep_their_type():
    x = np.array([[1, 2], [3, 4]], np.int32)
    for op in ("Add", "Sub", "Mul", "Div", "Max", "Sum", "Pow", "MatMul"):
        assert one(op, [x, x]).dtype == np.int32
    for op in ("ReduceSum", "ReduceMean", "ReduceProd", "ReduceMax", "ReduceL2", "Neg", "Abs", "Relu"):
        assert one(op, [x]).dtype == np.int32


def test_dropout_masks():
    """Ones: of the input's type at first, bool from opset 10."""
    for opset, dtype in ((7, np.float64), (10, np.bool_), (13, np.bool_)):
        output, mask = evaluate_node("Dropout", [X], {}, opset=opset, outputs=2)
        np.testing.assert_array_equal(output, X)
        np.testing.assert_array_equal(mask, np.ones(X.shape, dtype), strict=True)


def test_scalars_come_back_as_arrays():
    for op, inputs in [
        ("Add", [np.array(1.0), np.array(2.0)]),
        ("Gather", [np.arange(3.0), np.array(1)]),
        ("Erf", [np.array(0.5)]),
    ]:
        (result,) = evaluate_node(op, inputs, {}, opset=21)
        assert isinstance(result, np.ndarray)
        assert result.shape == ()


def test_ieee_and_no_warnings():
    with warnings.catch_warnings(), silence_numpy():
        warnings.simplefilter("error")
        assert evaluate_node("Div", [np.array([1.0, 0.0]), np.zeros(2)], {}, opset=21)[0].tolist()[0] == math.inf
        assert np.isnan(evaluate_node("Sqrt", [np.array([-1.0])], {}, opset=21)[0]).all()
        assert evaluate_node("Exp", [np.array([1e4])], {}, opset=21)[0] == math.inf
        assert np.isnan(evaluate_node("Max", [np.array([math.nan]), np.zeros(1)], {}, opset=21)[0]).all()
        rows = np.array([[-math.inf, -math.inf], [-math.inf, 2.0], [math.inf, 0.0]])
        assert evaluate_node("ReduceLogSumExp", [rows, ints(1)], {"keepdims": 0}, opset=21)[0].tolist() == [
            -math.inf,
            2,
            math.inf,
        ]


def test_convolution_loops_over_no_elements_and_a_small_node_takes_few_calls():
    x = RNG.standard_normal((1, 64, 7, 7))
    w = RNG.standard_normal((64, 64, 3, 3))
    small = RNG.standard_normal((2, 8))
    scale = np.ones(8)
    axes = ints(-1)
    # 9 offsets of the kernel, a few calls for each
    assert count_calls(lambda: one("Conv", [x, w], {"pads": [1, 1, 1, 1]})) < 1000
    assert count_calls(lambda: evaluate_node("Add", [small, scale], {}, opset=21)) < 100
    assert count_calls(lambda: evaluate_node("ReduceMean", [small, axes], {}, opset=21)) < 100
    assert count_calls(lambda: evaluate_node("LayerNormalization", [small, scale, scale], {}, opset=21)) < 300
