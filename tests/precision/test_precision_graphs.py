"""Half precision on small graphs: which nodes stay float32, and the reason that is given."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn

import normdeploy
from normdeploy.errors import GraphError, InputError
from normdeploy.precision import half_conversion
from normdeploy.precision.emulated_half import emulate_half
from normdeploy.precision.half_conversion import convert_to_half
from normdeploy.precision.type_conversion import FORMATS
from tests.half_graphs import X, node, reasons, runs, text, types
from tests.support import run_onnxruntime


def test_a_norm_is_float32_between_casts_and_the_rest_half() -> None:
    proto = text(
        "h = MatMul(x, w) n = LayerNormalization<axis = -1, epsilon = 1.0e-12>(h, g, b) y = MatMul(n, w)",
        w=np.eye(4),
        g=np.linspace(0.1, 1, 4),
        b=np.linspace(-1, 0.3, 4),
    )
    before = proto.SerializeToString()
    made, account = convert_to_half(proto, "fp16", [{"x": X}])
    assert proto.SerializeToString() == before
    assert [n.op_type for n in made.graph.node] == ["MatMul", "Cast", "LayerNormalization", "Cast", "MatMul"]
    norm, kinds = node(made, "LayerNormalization"), types(made)
    assert {kinds[i] for i in norm.input} == {"float32"}
    assert norm.attribute[1].f == np.float32(1e-12)
    np.testing.assert_array_equal(
        numpy_helper.to_array(next(t for t in made.graph.initializer if t.name == "g")),
        np.float32(np.linspace(0.1, 1, 4)),
    )
    assert (kinds["x"], kinds["y"], kinds["w"]) == ("float16", "float16", "float16")
    assert (account.inputs, account.outputs) == ({"x": "float16"}, {"y": "float16"})
    assert (account.kept, account.nodes, account.casts, account.bytes) == (1, 3, 2, (96, 64))


def test_weights_are_rounded_to_nearest_and_not_cut_off() -> None:
    """onnxruntime's converter would make 6e-8 of 1e-9, and 65504 of 1e5."""
    w = np.array([[1e-9, 2.0**-11 + 1, 1.00048828125 + 2.0**-20, 3], [65519, 1, 1, 1], [0, 0, 0, 0], [1, 2, 3, 4]])
    for to in ("fp16", "bf16"):
        made, account = convert_to_half(text("y = MatMul(x, w)", w=w), to, [{"x": 1e-3 * X}])
        held = numpy_helper.to_array(made.graph.initializer[0])
        np.testing.assert_array_equal(
            held.astype(np.float64), w.astype(np.float32).astype(FORMATS[to].dtype).astype(np.float64)
        )
        assert not account.islands


def test_an_initializer_read_both_ways_is_held_in_both_types() -> None:
    proto = text("a = Mul(x, g) y = LayerNormalization<axis = -1>(a, g)", g=np.array([0.1, 1 / 3, 1, 2]))
    made, _ = convert_to_half(proto, "fp16", [{"x": X}])
    norm, kinds = node(made, "LayerNormalization"), types(made)
    assert kinds[node(made, "Mul").input[1]] == "float16"
    wide = next(t for t in made.graph.initializer if t.name == norm.input[1])
    np.testing.assert_array_equal(numpy_helper.to_array(wide), np.float32([0.1, 1 / 3, 1, 2]))


def test_two_norms_of_one_tensor_share_a_cast() -> None:
    """onnxruntime's converter, told to leave both nodes alone, writes two Casts of one name."""
    body = "h = Relu(x) a = LayerNormalization<axis = -1>(h, g) b = RMSNormalization<axis = -1>(h, g) y = Add(a, b)"
    made, account = convert_to_half(text(body, opset=23, g=np.ones(4)), "fp16", [{"x": X}])
    assert account.casts == 3
    assert len({o for n in made.graph.node for o in n.output}) == len(made.graph.node)
    run_onnxruntime(made, {"x": X.astype(np.float16)})


def test_a_norm_that_onnxruntime_adds_to_the_standard_is_float32_too() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[2,4] x) => (float[2,4] y) <float[4] g = {1, 2, 3, 4}>
        { y = SimplifiedLayerNormalization<epsilon = 1.0e-12>(x, g) }"""
    )
    made, account = convert_to_half(proto, "fp16", [{"x": X}])
    assert reasons(account) == {"SimplifiedLayerNormalization": "norm"}
    assert [n.op_type for n in made.graph.node] == ["Cast", "SimplifiedLayerNormalization", "Cast"]
    found, expected = run_onnxruntime(made, {"x": X.astype(np.float16)})[0], run_onnxruntime(proto, {"x": X})[0]
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=1e-3)


def test_an_overflowing_weight_is_kept_and_told() -> None:
    proto = text("h = MatMul(x, big) y = MatMul(h, small)", big=np.eye(4) * 1e5, small=np.eye(4) * 1e-3)
    made, account = convert_to_half(proto, "fp16", [{"x": X}])
    (island,) = [i for i in account.islands if i.tensor == "big"]
    assert (island.kind, island.value) == ("constant", pytest.approx(1e5))
    assert "'big' reaches 1e+05, but the largest float16 number is 65504" in island.reason
    np.testing.assert_allclose(
        run_onnxruntime(made, {"x": X.astype(np.float16)})[0].astype(np.float64), X * 100, rtol=1e-3
    )
    assert not convert_to_half(proto, "bf16", [{"x": X}])[1].islands


@pytest.mark.parametrize("scale", [1e-8, 1e-6])
def test_a_weight_that_vanishes_is_kept(scale: float) -> None:
    made, account = convert_to_half(
        text("h = MatMul(x, w) y = Div(h, s)", w=np.eye(4) * scale, s=np.array(scale)), "fp16", [{"x": X}]
    )
    assert {i.tensor for i in account.islands} >= {"w", "s"}
    np.testing.assert_allclose(run_onnxruntime(made, {"x": X.astype(np.float16)})[0].astype(np.float64), X, rtol=2e-3)


def test_an_epsilon_is_kept_up_to_the_division() -> None:
    """x / max(|x|, 1e-12) of zeros: in half the bound would be 0, and the quotient NaN."""
    body = "n = ReduceL2<keepdims = 1>(x, axis) c = Max(n, eps) e = Expand(c, shape) y = Div(x, e)"
    weights = {"axis": np.array([-1]), "eps": np.array(1e-12), "shape": np.array([2, 4])}
    made, account = convert_to_half(text(body, **weights), "fp16", [{"x": X}])
    assert {account.islands[0].kind, account.islands[1].kind} == {"statistics", "constant"}
    assert account.kept == 4
    np.testing.assert_array_equal(run_onnxruntime(made, {"x": np.zeros((2, 4), np.float16)})[0], 0)


@pytest.mark.parametrize("body", ["m = Max(a, eps)", "m = Add(a, eps)", "s = Add(a, eps) m = Sqrt(s)"])
def test_an_epsilon_without_statistics_is_kept_up_to_the_division_too(body: str) -> None:
    """Calibration saw no zeros, and 1e-12 is 0 in half: 0 / 0 would be NaN."""
    proto = text(f"a = Abs(x) {body} y = Div(x, m)", eps=np.array(1e-12))
    made, account = convert_to_half(proto, "fp16", [{"x": X}])
    assert ("constant", "eps") in [(island.kind, island.tensor) for island in account.islands]
    for found in runs(made, "fp16", {"x": np.zeros((2, 4), np.float32)}).values():
        np.testing.assert_array_equal(found[0], 0)


def test_a_residual_stream_near_the_limit_is_kept_before_the_norm_and_beyond() -> None:
    body = """a = MatMul(x, grow) r = Add(x, a) n = LayerNormalization<axis = -1>(r, g) f = MatMul(n, w) s = Add(r, f)
              m = LayerNormalization<axis = -1>(s, g) y = MatMul(m, w)"""
    proto = text(body, grow=np.eye(4) * 2e4, w=np.eye(4), g=np.ones(4))
    calm, account = convert_to_half(proto, "fp16", [{"x": X * 1e-3}])
    assert reasons(account) == {"LayerNormalization": "norm"}
    made, account = convert_to_half(proto, "fp16", [{"x": X}])
    found = {i.tensor: i for i in account.islands if i.kind == "range"}
    assert set(found) == {"a", "r", "s"}
    assert found["r"].value == pytest.approx(80004)
    kinds = types(made)
    assert (kinds["r"], kinds["s"], kinds[node(made, "MatMul").input[0]]) == ("float32", "float32", "float32")
    assert kinds["f"] == "float16"
    assert np.isnan(run_onnxruntime(emulate_half(calm), {"x": X})[0]).any()
    reference = run_onnxruntime(proto, {"x": X})[0]
    np.testing.assert_allclose(
        run_onnxruntime(emulate_half(made), {"x": X})[0], reference, atol=4e-3
    )  # four half roundings of values up to 2


def test_readers_of_what_does_not_fit_are_kept() -> None:
    proto = text("a = Mul(x, grow) y = MatMul(a, shrink)", grow=np.array(5e4), shrink=np.eye(4) * 1e-3)
    made, account = convert_to_half(proto, "fp16", [{"x": X}])
    assert {i.op: i.nodes for i in account.islands} == {"Mul": ("a", "y")}
    np.testing.assert_allclose(run_onnxruntime(emulate_half(made), {"x": X})[0], X * 50, rtol=1e-3)


def test_squares_of_small_numbers_do_not_vanish_before_they_are_added_up() -> None:
    """0.0005² is subnormal in float16: its root would be off by a tenth."""
    body = "q = Mul(x, x) m = ReduceMean<keepdims = 1>(q, axis) r = Sqrt(m) y = Div(x, r)"
    proto = text(body, axis=np.array([-1]))
    made, account = convert_to_half(proto, "fp16", [{"x": X}, {"x": 5e-4 * X}])
    assert account.kept == 4
    x = (5e-4 * X).astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(
        run_onnxruntime(emulate_half(made), {"x": x})[0], run_onnxruntime(proto, {"x": x})[0], rtol=1e-3
    )


def test_an_output_that_overflows_stays_float32_and_is_told() -> None:
    made, account = convert_to_half(text("y = Mul(x, w)", w=np.array(6e4)), "fp16", [{"x": X}])
    assert account.outputs == {"y": "float32"}
    assert any("output 'y' reached 2.4e+05" in note for note in account.notes)
    np.testing.assert_array_equal(run_onnxruntime(made, {"x": X.astype(np.float16)})[0], X * np.float32(6e4))


def test_an_input_that_overflows_stays_float32() -> None:
    made, account = convert_to_half(text("a = Mul(x, w) y = Relu(a)", w=np.array(1e-3)), "fp16", [{"x": X * 1e5}])
    assert (account.inputs, account.outputs) == ({"x": "float32"}, {"y": "float16"})
    np.testing.assert_allclose(run_onnxruntime(made, {"x": X * np.float32(1e5)})[0], np.maximum(X * 100, 0), rtol=1e-3)


LOW = float(np.finfo(np.float32).min)


@pytest.mark.parametrize("to", ["fp16", "bf16"])
@pytest.mark.parametrize("low", [LOW, -1e9])
def test_masks_stay_finite_also_where_all_is_masked(to: str, low: float) -> None:
    body = "i = Sub(one, m) a = Mul(i, low) s = Add(x, a) t = Add(s, a) y = Softmax<axis = -1>(t)"
    proto = text(body, inputs="float[2,4] x, float[2,4] m", one=np.array(1.0), low=np.array(low))
    mask = np.array([[1, 0, 1, 0], [0, 0, 0, 0]], np.float32)
    made, account = convert_to_half(proto, to, [{"x": X, "m": mask}])
    if to == "fp16" or low == LOW:
        assert not account.islands
        assert any("'low' is only a mask" in note for note in account.notes)
    found = run_onnxruntime(emulate_half(made), {"x": X, "m": mask})[0]
    assert np.isfinite(found).all()
    assert found[0, 1] == found[0, 3] == 0
    np.testing.assert_allclose(found.sum(-1), 1, atol=2e-2)


def test_a_causal_mask_is_a_mask() -> None:
    """Expand and Trilu of one number, as torch.full and triu become."""
    body = "f = Expand(low, shape) t = Trilu<upper = 1>(f, one) s = Add(x, t) y = Softmax<axis = -1>(s)"
    proto = text(
        body, inputs="float[4,4] x", outputs="float[4,4] y", low=np.array(LOW), shape=np.array([4, 4]), one=np.array(1)
    )
    made, account = convert_to_half(proto, "fp16", [{"x": np.zeros((4, 4), np.float32)}])
    assert not account.islands
    np.testing.assert_array_equal(
        run_onnxruntime(emulate_half(made), {"x": np.zeros((4, 4), np.float32)})[0][1], [0.5, 0.5, 0, 0]
    )


def test_a_temperature_is_no_mask() -> None:
    proto = text("h = Mul(x, cold) y = Softmax<axis = -1>(h)", cold=np.array(-1e5))
    made, account = convert_to_half(proto, "fp16", [{"x": X}])
    assert account.islands[0].tensor == "cold"
    x = np.float32([[1e-5, 2e-5, 0, 3e-5], [0, 0, 0, 0]]).astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(
        run_onnxruntime(emulate_half(made), {"x": x})[0], run_onnxruntime(proto, {"x": x})[0], atol=1e-3
    )


def test_a_huge_constant_that_is_no_mask_is_kept() -> None:
    made, account = convert_to_half(
        text("a = Add(x, low) y = Mul(a, tiny)", low=np.array(-1e9), tiny=np.array(1e-9)), "fp16", [{"x": X}]
    )
    assert account.kept == 2
    np.testing.assert_allclose(run_onnxruntime(made, {"x": X.astype(np.float16)})[0], -1, rtol=1e-3)


def test_a_constant_that_lets_one_place_win_is_no_mask() -> None:
    """It is computed in float32 with the numbers that it has."""
    m = np.array([0, -1e9, 0, 1e5], np.float32)
    made, account = convert_to_half(text("a = Add(x, m) y = Softmax<axis = -1>(a)", m=m), "fp16", [{"x": X}])
    assert account.kept == 2
    assert not any("only a mask" in note for note in account.notes)
    assert [numpy_helper.to_array(t).tolist() for t in made.graph.initializer] == [m.tolist()]
    np.testing.assert_array_equal(run_onnxruntime(made, {"x": X.astype(np.float16)})[0], [[0, 0, 0, 1]] * 2)


def test_a_bound_that_overflows_is_no_bound() -> None:
    made, account = convert_to_half(
        text("y = Clip(x, low, high)", low=np.array(LOW), high=np.array(-LOW)), "fp16", [{"x": X}]
    )
    assert not account.islands
    np.testing.assert_array_equal(run_onnxruntime(made, {"x": X.astype(np.float16)})[0], X)


@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_angles_made_of_positions_are_float32(to: str) -> None:
    """At position 4000 bfloat16 has one number for sixteen."""
    body = (
        "p = Range(zero, n, one) f = Cast<to = 1>(p) a = Mul(f, freq) c = Cos(a) t = Unsqueeze(c, axis) y = Add(x, t)"
    )
    weights = {
        "zero": np.array(0),
        "n": np.array(4100),
        "one": np.array(1),
        "freq": np.array(0.7),
        "axis": np.array([0]),
    }
    proto = text(body, inputs="float[1,4100] x", outputs="float[1,4100] y", **weights)
    made, account = convert_to_half(proto, to, [{"x": np.zeros((1, 4100), np.float32)}])
    assert {i.op: i.kind for i in account.islands}["Cos"] == "positions"
    assert account.kept == 3  # the Cast and the product too
    found = run_onnxruntime(emulate_half(made), {"x": np.zeros((1, 4100), np.float32)})[0]
    np.testing.assert_allclose(
        found[0],
        np.cos(np.arange(4100) * float(np.float32(0.7))),
        atol=FORMATS[to].unit_roundoff + 1e-3 * (to == "bf16") + 4e-4,
    )


def test_whole_numbers_beyond_the_exact_ones_are_kept() -> None:
    proto = text("f = Cast<to = 1>(i) y = Add(f, x)", inputs="float[2,4] x, int64[2,4] i")
    counted = np.arange(8).reshape(2, 4) * 301
    assert reasons(convert_to_half(proto, "fp16", [{"x": X, "i": counted}])[1]) == {"Cast": "range"}
    assert not convert_to_half(proto, "fp16", [{"x": X, "i": counted // 301}])[1].islands


def test_bfloat16_raises_the_opset_only_where_an_op_needs_it() -> None:
    conv = text("y = Conv(x, w)", inputs="float[1,1,4,4] x", outputs="float[1,1,4,4] y", w=np.ones((1, 1, 1, 1)))
    made, account = convert_to_half(conv, "bf16", [{"x": np.ones((1, 1, 4, 4), np.float32)}])
    assert (half_conversion.file_opset(made), types(made)["y"]) == (22, "bfloat16")
    assert any("raised to 22" in note for note in account.notes)
    assert half_conversion.file_opset(convert_to_half(text("y = Relu(x)"), "bf16", [{"x": X}])[0]) == 21


def test_ops_without_the_type_are_kept() -> None:
    assert reasons(convert_to_half(text("y = HardSwish(x)"), "bf16", [{"x": X}])[1]) == {"HardSwish": "no half form"}
    assert not convert_to_half(text("y = HardSwish(x)"), "fp16", [{"x": X}])[1].islands
    ids = "v, i = TopK(x, k) y = Relu(v)"
    assert reasons(convert_to_half(text(ids, outputs="float[2,2] y", k=np.array([2])), "bf16", [{"x": X}])[1]) == {
        "TopK": "no half form"
    }


def test_control_flow_is_left_as_a_whole_and_sees_float32() -> None:
    body = """h = Relu(x) c = Greater(p, zero)
        z = If (c) <then_branch = t () => (float[2,4] a) { a = Mul(h, two) }, else_branch = e () => (float[2,4] b) {
        b = Identity(h) }>
        y = Add(z, h)"""
    proto = text(body, inputs="float[2,4] x, float p", zero=np.array(0.0), two=np.array(2.0))
    made, account = convert_to_half(proto, "fp16", [{"x": X, "p": np.array(1, np.float32)}])
    assert reasons(account) == {"If": "control flow"}
    found = run_onnxruntime(made, {"x": X.astype(np.float16), "p": np.array(1, np.float16)})[0]
    np.testing.assert_array_equal(found, 3 * np.maximum(X, 0))


def test_sequences_stay_float32() -> None:
    body = "h = Relu(x) s = SplitToSequence<axis = 0, keepdims = 1>(h) a = SequenceAt(s, zero) y = Neg(a)"
    made, account = convert_to_half(text(body, outputs="float[1,4] y", zero=np.array(0)), "fp16", [{"x": X}])
    assert account.outputs == {"y": "float16"}
    np.testing.assert_array_equal(run_onnxruntime(made, {"x": X.astype(np.float16)})[0], -np.maximum(X[:1], 0))


ZOO = {
    "Resize": ('y = Resize<mode = "linear">(x, empty, scales)', "float[1,1,2,2] x", "float[1,1,4,4] y"),
    "ConstantOfShape": ("c = ConstantOfShape(shape) y = Add(x, c)", "float[2,4] x", "float[2,4] y"),
    "ConstantOfShape of 1e-12": (
        "c = ConstantOfShape<value = float[1] {1.0e-12}>(shape) m = Max(x, c) y = Div(x, m)",
        "float[2,4] x",
        "float[2,4] y",
    ),
    "Quantized": (
        "q = QuantizeLinear(x, tenth, zero) d = DequantizeLinear(q, tenth, zero) y = Mul(d, tenth)",
        "float[2,4] x",
        "float[2,4] y",
    ),
    "OneHot": ("o = OneHot(i, depth, values) y = MatMul(x, o)", "float[2,4] x, int64[4] i", "float[2,3] y"),
    "CastLike": ("h = Relu(x) c = CastLike(i, h) y = Add(c, h)", "float[4] x, int64[4] i", "float[4] y"),
    "Clip without a bound": ("y = Clip(x, , tenth)", "float[2,4] x", "float[2,4] y"),
    "Dropout": ("h, mask = Dropout(x) y = Relu(h)", "float[2,4] x", "float[2,4] y"),
    "LayerNormalization's mean": ("h, m, s = LayerNormalization(x, g) y = Sub(h, m)", "float[2,4] x", "float[2,4] y"),
    "TopK": ("v, i = TopK(x, two) y = Neg(v)", "float[2,4] x", "float[2,2] y"),
    "Loop": (
        (
            "y = Loop(three, , x) <body = b (int64 n, bool c, float[2,4] a) => (bool d, float[2,4] z) { d = Identity(c)"
            " z = Mul(a, tenth) }>"
        ),
        "float[2,4] x",
        "float[2,4] y",
    ),
    "Constants": (
        (
            "c = Constant<value_float = 0.1>() d = Constant<value_floats = [1.0, 2.0, 3.0, 4.0]>() a = Mul(x, c) y ="
            " Add(a, d)"
        ),
        "float[2,4] x",
        "float[2,4] y",
    ),
    "a constant that is an output": ("y = Identity(g)", "float[2,4] x", "float[4] y"),
    "an inner tensor that is an output": (
        "y = LayerNormalization(x, g) z = Relu(y)",
        "float[2,4] x",
        "float[2,4] y, float[2,4] z",
    ),
    "BatchNormalization": ("y = BatchNormalization(x, g, g, g, g)", "float[2,4,3] x", "float[2,4,3] y"),
    "Where": ("c = Greater(x, tenth) y = Where(c, x, tenth)", "float[2,4] x", "float[2,4] y"),
    "two types of one input": (
        "a = LayerNormalization(x, x0) y = Mul(a, x0)",
        "float[2,4] x, float[4] x0",
        "float[2,4] y",
    ),
}
WEIGHTS = {
    **{
        "empty": np.zeros(0),
        "scales": np.array([1.0, 1, 2, 2]),
        "shape": np.array([2, 4]),
        "tenth": np.array(0.1),
        "g": np.ones(4),
    },
    **{
        "zero": np.array(0, np.int8),
        "depth": np.array(3),
        "values": np.array([0.0, 1]),
        "two": np.array([2]),
        "three": np.array(3),
    },
}


@pytest.mark.parametrize("to", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ZOO)
def test_ops_with_types_of_their_own(name: str, to: str) -> None:
    body, inputs, outputs = ZOO[name]
    proto = text(body, inputs, outputs, **{k: v for k, v in WEIGHTS.items() if k in body})
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {}
    for v in proto.graph.input:
        shape = [d.dim_value for d in v.type.tensor_type.shape.dim]
        whole = v.type.tensor_type.elem_type == TensorProto.INT64
        drawn = (
            rng.integers(0, 3, shape)
            if whole
            else (0.1 + rng.random(shape)).astype(FORMATS[to].dtype).astype(np.float32)
        )
        feeds[v.name] = np.asarray(drawn)
    made, account = convert_to_half(proto, to, [feeds])
    assert set(account.outputs.values()) == {FORMATS[to].dtype.name}
    reference = run_onnxruntime(proto, feeds)
    for found in runs(made, to, feeds).values():
        for a, b in zip(found, reference, strict=True):
            np.testing.assert_allclose(
                a.astype(np.float64), b, rtol=8 * FORMATS[to].unit_roundoff, atol=8 * FORMATS[to].unit_roundoff
            )


def test_weights_that_an_old_file_lists_as_inputs_are_weights() -> None:
    """Before IR version 4 all were (onnx, docs/IR.md)."""
    proto = text("y = MatMul(x, w)", w=np.eye(4) * 1e5)
    proto.ir_version = 3
    proto.graph.input.append(onnx.helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 4]))
    made, account = convert_to_half(proto, "fp16", [{"x": 1e-3 * X}])
    assert [v.name for v in made.graph.input] == ["x"]
    assert account.islands[0].tensor == "w"


@pytest.mark.parametrize(
    ("body", "default", "given"),
    [
        ("a = Add(x, d) y = Softmax<axis = -1>(a)", [0, -1e9, 0, 0], [0, -1e5, 0, -1e5]),
        ("y = Div(x, d)", [1e-9, -1e-9, 1e-9, 1e-8], [1, 2, 3, 4]),
        ("s = Mul(x, d) y = Relu(s)", [1e-9], [1]),
    ],
)
def test_a_default_that_half_does_not_hold_stays_float32(body: str, default: list[float], given: list[float]) -> None:
    """What the caller may give another value is no constant that could be changed, and an input of its own."""
    proto, d = text(body, d=np.array(default)), np.float32(given)
    proto.graph.input.append(onnx.helper.make_tensor_value_info("d", TensorProto.FLOAT, d.shape))
    made, account = convert_to_half(proto, "fp16", [{"x": X}])
    assert types(made)["d"] == "float32"
    assert any("input 'd' reached " in note for note in account.notes)
    np.testing.assert_array_equal(numpy_helper.to_array(made.graph.initializer[0]), np.float32(default))
    for feeds in ({"x": X}, {"x": X, "d": d}):
        found = run_onnxruntime(made, feeds | {"x": X.astype(np.float16)})[0].astype(np.float64)
        np.testing.assert_allclose(found, run_onnxruntime(proto, feeds)[0], rtol=2e-3, atol=1e-3)


def test_a_file_in_which_nothing_can_be_half_says_so() -> None:
    _, account = convert_to_half(text("y = LayerNormalization(x, g)", g=np.ones(4)), "fp16", [{"x": X}], keep_io=True)
    assert any("no node became float16" in note for note in account.notes)


def test_functions_of_others_are_written_out_and_our_own_ops_are_norms() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)).eval()
    proto = normdeploy.export(module, (torch.randn(2, 8),), fuse="portable", opset=21).proto
    made, account = convert_to_half(proto, "fp16")
    assert reasons(account) == {"RMSNorm": "norm"}
    assert types(made)[node(made, "RMSNorm").input[0]] == "float32"
    head = '<ir_version: 10, opset_import: ["": 21, "other": 1]> g (float[2,4] x) => (float[2,4] y)'
    twice = (
        '<opset_import: ["": 21], domain: "other"> Twice (a) => (b) { two = Constant<value_float = 2.0>() b = Mul(a,'
        " two) }"
    )
    foreign = onnx.parser.parse_model(f"{head} {{ y = other.Twice(x) }} {twice}")
    made, account = convert_to_half(foreign, "fp16", [{"x": X}])
    assert not made.functions
    np.testing.assert_array_equal(run_onnxruntime(made, {"x": X.astype(np.float16)})[0], 2 * X)


def test_a_file_that_is_half_already_gets_float32_norms() -> None:
    body = "h = Relu(x) n = LayerNormalization<axis = -1>(h, g) f = Cast<to = 1>(n) e = Exp(f) y = Cast<to = 10>(e)"
    proto = text(body, inputs="float16[2,4] x", outputs="float16[2,4] y", g=np.ones(4, np.float16))
    made, account = convert_to_half(proto, "fp16", [{"x": X}])
    kinds = types(made)
    assert {kinds[i] for i in node(made, "LayerNormalization").input} == {"float32"}
    assert kinds[node(made, "Exp").input[0]] == "float32"
    assert reasons(account)["Exp"] == "as written"
    run_onnxruntime(made, {"x": X.astype(np.float16)})
    with pytest.raises(InputError, match="is already float16, but bf16 was requested"):
        convert_to_half(proto, "bf16", [{"x": X}])


def test_inputs_and_outputs_stay_float32_where_asked() -> None:
    proto = text("h = MatMul(x, w) y = Relu(h)", w=np.eye(4))
    made, account = convert_to_half(proto, "fp16", [{"x": X}], keep_io=True)
    assert (account.inputs, account.outputs) == ({"x": "float32"}, {"y": "float32"})
    assert types(made)[node(made, "Relu").output[0]] == "float16"
    np.testing.assert_array_equal(run_onnxruntime(made, {"x": X})[0], np.maximum(X, 0))


def test_what_can_not_be_converted_is_said() -> None:
    with pytest.raises(InputError, match="unknown precision 'fp8'"):
        convert_to_half(text("y = Relu(x)"), "fp8")
    with pytest.raises(InputError, match="the model has no float32 tensors"):
        convert_to_half(text("y = Neg(x)", inputs="int64[2] x", outputs="int64[2] y"), "fp16")
    unknown = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21, "other": 1]> g (float[2] x) => (float[2] y) { h = other.Op(x) y ='
        " Relu(h) }"
    )
    with pytest.raises(GraphError, match=r"the type of 'h', an output of other\.Op"):
        convert_to_half(unknown, "fp16")


@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_a_tensor_that_an_attribute_holds_is_rounded(to: str) -> None:
    proto = text("c = ConstantOfShape<value = float[1] {0.3}>(shape) y = Mul(x, c)", shape=np.array([2, 4]))
    made, account = convert_to_half(proto, to, [{"x": X}])
    assert not account.islands
    (held,) = (a.t for a in node(made, "ConstantOfShape").attribute)
    assert float(numpy_helper.to_array(held)[0]) == float(np.float32(0.3).astype(FORMATS[to].dtype))


def test_a_cast_that_makes_an_output_is_no_cast_to_be_dropped() -> None:
    made, _ = convert_to_half(text("h = Relu(x) y = Cast<to = 1>(h)"), "fp16", [{"x": X}])
    assert [v.name for v in made.graph.output] == ["y"]
    np.testing.assert_array_equal(run_onnxruntime(made, {"x": X.astype(np.float16)})[0], np.maximum(X, 0))


@pytest.mark.parametrize(("factor", "kept"), [(2000, False), (2100, True)])
def test_an_eighth_of_the_largest_number_is_the_margin(factor: float, kept: bool) -> None:
    """The largest element of X is 4; float16 ends at 65504, an eighth of which is 8188."""
    _, account = convert_to_half(text("h = Mul(x, w) y = Relu(h)", w=np.array(float(factor))), "fp16", [{"x": X}])
    assert (reasons(account).get("Mul") == "range") == kept


@pytest.mark.parametrize(("size", "kept"), [(4, False), (1, True)])
def test_a_small_bias_may_vanish_and_a_small_number_may_not(size: int, kept: bool) -> None:
    """A vector that is added is a bias, whose loss is far below what it is added to; one number may be an epsilon."""
    _, account = convert_to_half(text("y = Add(x, b)", b=np.full(size, 1e-6)), "fp16", [{"x": X}])
    assert (reasons(account) == {"Add": "constant"}) == kept
