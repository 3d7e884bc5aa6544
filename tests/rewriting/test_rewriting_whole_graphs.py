"""What surrounds a norm in a file: other readers, outputs in the middle of it, unknown shapes, odd numbers. Handled or
refused by name, never a changed output, never a traceback."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

from normdeploy.errors import GraphError
from normdeploy.findings.records import Summary
from normdeploy.rewriting.norm_optimizer import optimize_norms

NORM = """u = ReduceMean<axes=[-1]>(x) d = Sub(x, u) q = Mul(d, d) v = ReduceMean<axes=[-1]>(q)
    e = Add(v, eps) r = Sqrt(e) n = Div(d, r) m = Mul(n, g) y = Add(m, s)"""
CONSTANTS = "float eps = {1e-5}, float[8] g = {1,2,3,4,5,6,7,8}, float[8] s = {1,1,2,2,3,3,4,4}"
CONV = "float[2,8,1] w = {1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8}, float[2] a = {1,2}, float[2] b = {1,1}"
LAYER_NORM = "LayerNormalization(axis=-1, epsilon=1e-05)"


def net(
    body: str = NORM, inputs: str = "float[N,8] x", outputs: str = "float[N,8] y", constants: str = CONSTANTS
) -> onnx.ModelProto:
    return parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 17]> net ({inputs}) => ({outputs}) <{constants}> {{ {body} }}'
    )


def optimized(proto: onnx.ModelProto) -> tuple[list[str], Summary]:
    """The ops that are left. The outputs of the two files are compared bit by bit where NaN and infinities stand, and
    to rounding."""
    out, summary = optimize_norms(proto)
    assert optimize_norms(out)[0].SerializeToString(deterministic=True) == out.SerializeToString(deterministic=True)
    assert len(out.graph.node) <= len(proto.graph.node)
    feeds = {i.name: np.random.default_rng(0).standard_normal(_size(i), dtype=np.float32) for i in proto.graph.input}
    for a, b in zip(_run(proto, feeds), _run(out, feeds), strict=True):
        with np.errstate(invalid="ignore"):  # ten roundings of float32 in numbers up to 8 · sqrt(8) + 4
            np.testing.assert_allclose(a, b, rtol=0, atol=10 * 2.0**-24 * 27)
    return [n.op_type for n in out.graph.node], summary


def _size(value: onnx.ValueInfoProto) -> list[int]:
    return [
        d.dim_value if d.HasField("dim_value") else (8 if i else 3)
        for i, d in enumerate(value.type.tensor_type.shape.dim)
    ] or [3, 8]


def _run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level, options.graph_optimization_level = 4, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feeds)


def setting(name: str, value: float) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        tensor = next(t for t in proto.graph.initializer if t.name == name)
        held = numpy_helper.to_array(tensor).copy()
        held.flat[0] = value
        tensor.CopyFrom(numpy_helper.from_array(held, name))

    return change


def test_a_norm_with_two_readers() -> None:
    ops, _ = optimized(net(NORM + " z = Relu(y) t = Tanh(y)", outputs="float[N,8] z, float[N,8] t"))
    assert ops == ["LayerNormalization", "Relu", "Tanh"]


def test_outputs_in_the_middle_of_a_norm_stay() -> None:
    ops, summary = optimized(net(outputs="float[N,8] y, float[N,8] d, float[N,1] v"))
    assert ops == ["ReduceMean", "Sub", "Mul", "ReduceMean", "LayerNormalization"]
    assert [f.became for f in summary.findings] == [LAYER_NORM]


def test_one_norm_with_two_affines() -> None:
    ops, _ = optimized(net(NORM + " m2 = Mul(n, s) y2 = Add(m2, g)", outputs="float[N,8] y, float[N,8] y2"))
    assert sorted(ops) == ["Add", "Add", "LayerNormalization", "Mul", "Mul"]


def test_an_output_that_is_an_input_too() -> None:
    ops, _ = optimized(net(outputs="float[N,8] y, float[N,8] x"))
    assert ops == ["LayerNormalization"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("y = Add(x, m) m = Mul(y, x)", "Add 'y' needs its own result 'y' through Mul 'm'"),
        ("a = Conv(x, k) x = Sqrt(a) y = Neg(x)", "'x', which is an input"),
        ("y = Sqrt(x) y = Neg(x)", "'y', which is an input or was already written"),
    ],
)
def test_a_circle_is_refused_by_name(body: str, said: str) -> None:
    """A walk up from the root would not end, and take more and more memory."""
    with pytest.raises(GraphError, match=said):
        optimize_norms(net(body, constants="float[8,8,1] k = {" + ",".join("1" * 64) + "}"))


def test_gamma_as_an_input_is_a_scale_of_data() -> None:
    ops, _ = optimized(
        net(inputs="float[N,8] x, float[8] g", constants="float eps = {1e-5}, float[8] s = {1,1,2,2,3,3,4,4}")
    )
    assert ops == ["LayerNormalization"]


@pytest.mark.parametrize("name", ["eps", "two"])
def test_an_initializer_that_a_caller_may_replace_is_no_constant(name: str) -> None:
    body = NORM.replace("Mul(d, d)", "Pow(d, two)")
    proto = net(body, constants=CONSTANTS + ", float two = {2}")
    proto.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, []))
    out, summary = optimize_norms(proto)
    assert out.graph.node == proto.graph.node
    assert [f.reason for f in summary.findings] == [
        f"{name!r} is both an initializer and a graph input, so a caller may override it: it is not a constant"
    ]


HALF = f"eps = Cast<to=10>(e32) g = Identity(s) {NORM}"


@pytest.mark.parametrize("epsilon", ["1e-12", "1e-5"])
def test_an_epsilon_that_its_cast_makes_zero_is_told(epsilon: str) -> None:
    """A runtime that computes in float16 gives 0/0 on a constant row, the node what the author wrote: not without a
    word."""
    kinds = {"inputs": "float16[N,8] x", "outputs": "float16[N,8] y"}
    proto = net(HALF, **kinds, constants=f"float e32 = {{{epsilon}}}, float16[8] s = {{1,1,2,2,3,3,4,4}}")
    out, summary = optimize_norms(proto)
    assert np.isfinite(_run(out, {"x": np.ones((2, 8), np.float16)})[0]).all()
    (finding,) = summary.findings
    assert (finding.status, finding.epsilon) == ("fused", pytest.approx(float(epsilon), rel=1e-7))
    assert any("epsilon 1e-12 becomes 0" in note and "float16" in note for note in finding.notes) == (
        epsilon == "1e-12"
    )


def test_an_epsilon_that_is_zero_in_the_file_is_zero() -> None:
    kinds = {"inputs": "float16[N,8] x", "outputs": "float16[N,8] y"}
    proto = net(
        NORM, **kinds, constants="float16 eps = {0}, float16[8] g = {1,1,2,2,3,3,4,4}, float16[8] s = {1,1,2,2,3,3,4,4}"
    )
    (finding,) = optimize_norms(proto)[1].findings
    assert (finding.status, finding.epsilon) == ("fused", 0.0)
    assert not any("becomes 0" in note for note in finding.notes)


def test_a_norm_is_fused_without_the_shift_before_it_that_rounds() -> None:
    """Read from x on, the norm of x·1e-5 + 1000.7 has epsilon 1e5, and float64 can't tell: the norm of the sum is one
    all the same."""
    proto = net(
        f"t = Mul(x, k) w = Add(t, c) {NORM.replace('(x', '(w')}",
        constants=f"{CONSTANTS}, float k = {{1e-5}}, float c = {{1000.7}}",
    )
    out, summary = optimize_norms(proto, strict=True)
    (finding,) = summary.findings
    assert (finding.status, finding.spelling.split()[:3]) == ("fused", ["Mul", "Add", "ReduceMean"])
    assert finding.certificate is not None
    assert finding.certificate.error <= finding.certificate.bound
    assert [n.op_type for n in out.graph.node] == ["LayerNormalization"]
    assert optimize_norms(out)[0].SerializeToString(deterministic=True) == out.SerializeToString(deterministic=True)


def test_a_shape_that_the_file_does_not_state() -> None:
    proto = net()
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    ops, summary = optimized(proto)
    assert "LayerNormalization" not in ops
    assert [f.reason for f in summary.findings] == ["the type or shape of 'x' is unknown"]


def test_dims_that_the_file_does_not_state() -> None:
    proto = net()
    for dim in proto.graph.input[0].type.tensor_type.shape.dim:
        dim.Clear()
    ops, _ = optimized(proto)
    assert ops == [
        "LayerNormalization",
        "Mul",
        "Add",
    ]  # gamma of 8 need not be the size of the axis: (N, 1) would broadcast to it


@pytest.mark.parametrize(
    ("inputs", "constants"),
    [("float[0,8] x", CONSTANTS), ("float[N,0] x", "float eps = {1e-5}, float[0] g = {}, float[0] s = {}")],
)
def test_empty_inputs_are_refused_by_name(inputs: str, constants: str) -> None:
    _, summary = optimized(net(inputs=inputs, outputs=inputs.replace("x", "y"), constants=constants))
    assert [(f.status, f.reason.split(": ")[1]) for f in summary.findings] == [("refused", "nothing to normalize")]


@pytest.mark.parametrize("name", ["g", "s"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_odd_numbers_in_gamma_and_beta_stay_where_they_are(name: str, value: float) -> None:
    proto = net()
    setting(name, value)(proto)
    ops, _ = optimized(proto)
    assert ops[0] == "LayerNormalization"


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e-3])
def test_an_odd_epsilon_is_refused(value: float) -> None:
    proto = net()
    setting("eps", value)(proto)
    ops, summary = optimized(proto)
    assert "LayerNormalization" not in ops
    assert [f.status for f in summary.findings] == ["refused"]


@pytest.mark.parametrize(
    ("variance", "epsilon"), [("{0,-1}", "1e-5"), ("{0,0}", "0.0")], ids=["negative", "zero without epsilon"]
)
def test_statistics_that_give_no_finite_scale_are_refused(variance: str, epsilon: str) -> None:
    ops, summary = optimized(
        net(
            f"h = Conv(x, w) y = BatchNormalization<epsilon={epsilon}>(h, a, b, b, g)",
            inputs="float[N,8,4] x",
            outputs="float[N,2,4] y",
            constants=f"{CONV}, float[2] g = {variance}",
        )
    )
    assert ops == ["Conv", "BatchNormalization"]
    assert [(f.kind, f.reason) for f in summary.findings] == [("BatchNorm", "its scale or shift is not finite")]
