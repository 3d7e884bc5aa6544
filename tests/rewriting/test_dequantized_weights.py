"""A BatchNorm behind a layer of stored codes: folded into the scales, beside onnx's reference; lookalikes refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from normdeploy.errors import ExportError
from normdeploy.findings.records import Finding
from normdeploy.rewriting import dequantized_weights
from normdeploy.rewriting.norm_optimizer import optimize_norms

RNG = np.random.default_rng(0)
OUTPUTS, INPUTS = 6, 4
UNIT = 2.0**-24
CODES = RNG.integers(-127, 128, (OUTPUTS, INPUTS, 3, 3)).astype(np.int8)
SCALES = RNG.uniform(0.005, 0.02, OUTPUTS).astype(np.float32)


def constants(channels: int = OUTPUTS, negative: bool = True, **more: Any) -> dict[str, Any]:
    """Of a BatchNormalization, and those of ``more``; its gamma is negative in every second channel."""
    gamma = RNG.uniform(0.5, 2, channels) * (np.where(np.arange(channels) % 2, 1, -1) if negative else 1)
    statistics = {"mean": RNG.standard_normal(channels) * 0.3, "var": RNG.uniform(0.5, 2, channels)}
    floats = {"gamma": gamma, "beta": RNG.standard_normal(channels), **statistics}
    return {name: v.astype(np.float32) for name, v in floats.items()} | more


def net(
    nodes: list[onnx.NodeProto], constants: dict[str, Any], x: list[Any], outputs: str = "y", opset: int = 21
) -> onnx.ModelProto:
    held = [
        v if isinstance(v, TensorProto) else numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()
    ]
    ends = [helper.make_tensor_value_info(o, TensorProto.FLOAT, [None] * len(x)) for o in outputs.split()]
    graph = helper.make_graph(nodes, "net", [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)], ends, held)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def conv(
    q: str = "q", axis: int | None = 0, op: str = "Conv", zero: str = "z", bias: str = "", y: str = "y", **attrs: Any
) -> list[onnx.NodeProto]:
    """DequantizeLinear, the layer and its BatchNormalization."""
    own = {} if axis is None else {"axis": axis}
    return [
        helper.make_node("DequantizeLinear", [q, "s", *([zero] if zero else [])], [f"w{y}"], **own),
        helper.make_node(op, ["x", f"w{y}", *([bias] if bias else [])], [f"c{y}"], name=f"layer {y}", **attrs),
        helper.make_node("BatchNormalization", [f"c{y}", "gamma", "beta", "mean", "var"], [y]),
    ]


def reference(proto: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    """onnx's reference implementation; of transposed convolutions onnxruntime, since onnx 1.23's leaves out the bias of
    those in groups."""
    if any(n.op_type == "ConvTranspose" for n in proto.graph.node):
        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        return list(session.run(None, {"x": x}))
    return list(ReferenceEvaluator(proto).run(None, {"x": x}))


def folded(proto: onnx.ModelProto, shape: tuple[int, ...]) -> tuple[onnx.ModelProto, Finding]:
    """What is left, checked: no BatchNormalization, codes stay codes, scales positive, the numbers of onnx's reference.

    Each product of up to 36 terms is rounded in another order, and each scale once: 256 units of the largest magnitude.
    """
    out, summary = optimize_norms(proto)
    (finding,) = summary.findings
    assert (finding.status, finding.reason) == ("folded", ""), finding
    assert finding.certificate
    assert "BatchNormalization" not in {n.op_type for n in out.graph.node}
    onnx.checker.check_model(out, full_check=True)
    held = {t.name: t for t in out.graph.initializer}
    linear = next(n for n in out.graph.node if n.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul"))
    made = next(n for n in out.graph.node if n.op_type == "DequantizeLinear" and n.output[0] in linear.input)
    kinds = {t.data_type for t in proto.graph.initializer}
    assert held[made.input[0]].data_type in kinds
    assert (numpy_helper.to_array(held[made.input[1]]).astype(np.float64) > 0).all()
    x = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    before, after = (reference(p, x) for p in (proto, out))
    for old, new in zip(before, after, strict=True):
        assert np.abs(old - new).max() <= 256 * UNIT * (1 + np.abs(old).max())
    assert optimize_norms(out)[0].SerializeToString(deterministic=True) == out.SerializeToString(deterministic=True)
    return out, finding


def refusal(proto: onnx.ModelProto) -> str:
    out, summary = optimize_norms(proto)
    dequantized = [n.input[0] for n in proto.graph.node if n.op_type == "DequantizeLinear"]
    assert [n.input[0] for n in out.graph.node if n.op_type == "DequantizeLinear"] == dequantized
    assert "BatchNormalization" in {n.op_type for n in out.graph.node}
    return "; ".join(f.reason for f in summary.findings)


def code(kind: Any, shape: tuple[int, ...], low: int = -7, high: int = 8) -> np.ndarray:
    return np.random.default_rng(3).integers(low, high, shape).astype(kind)


Z = np.zeros(OUTPUTS, np.int8)
ONE = np.float32(0.01)


@pytest.mark.parametrize("bias", ["", "float", "int32"])
@pytest.mark.parametrize("per_channel", [True, False])
def test_scale_goes_into_scales_and_shift_into_the_bias(per_channel: bool, bias: str) -> None:
    s, z, axis = (SCALES, Z, 0) if per_channel else (ONE, np.int8(0), None)
    held = constants(q=CODES, s=s, z=z, float=RNG.standard_normal(OUTPUTS).astype(np.float32))
    held |= {"bq": RNG.integers(-9999, 9999, OUTPUTS).astype(np.int32), "bs": (SCALES * np.float32(0.02))}
    more = [helper.make_node("DequantizeLinear", ["bq", "bs"], ["int32"], axis=0)] if bias == "int32" else []
    used = {k: v for k, v in held.items() if (k != "float" or bias == k) and (k[0] != "b" or k == "beta" or more)}
    out, finding = folded(
        net([*more, *conv(axis=axis, bias=bias, pads=[1] * 4)], used, ["n", INPUTS, 8, 8]), (2, INPUTS, 8, 8)
    )
    assert [n.op_type for n in out.graph.node] == ["DequantizeLinear", "Conv"]
    assert "the codes of 3 channels negated" in finding.became
    shapes = {tuple(t.dims) for t in out.graph.initializer}
    assert shapes == {CODES.shape, (OUTPUTS,)}  # one scale for all becomes one for each channel


def test_the_stored_scales_are_the_exact_ones_rounded_once() -> None:
    held = constants(q=CODES, s=SCALES, z=Z)
    out, _ = folded(net(conv(), held, ["n", INPUTS, 8, 8]), (2, INPUTS, 8, 8))
    wide = {k: np.asarray(v, np.longdouble) for k, v in held.items()}
    a = wide["gamma"] / np.sqrt(wide["var"] + np.longdouble(np.float32(1e-5)))
    made = next(n for n in out.graph.node if n.op_type == "DequantizeLinear")
    q, s = (next(numpy_helper.to_array(t) for t in out.graph.initializer if t.name == n) for n in made.input[:2])
    np.testing.assert_array_equal(s, (np.abs(a) * wide["s"]).astype(np.float32))
    np.testing.assert_array_equal(q, np.sign(a).astype(int).reshape(-1, 1, 1, 1) * CODES.astype(int))


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("kind", ["int4", "float8_e4m3fn", "uint8"])
def test_other_codes(kind: str, positive: bool) -> None:
    """Of uint8 with a zero point of 100 codes are mirrored at that."""
    q = code(getattr(ml_dtypes, kind, np.uint8), CODES.shape, *((1, 200) if kind == "uint8" else ()))
    z = np.zeros(OUTPUTS, q.dtype) if kind != "uint8" else np.full(OUTPUTS, 100, np.uint8)
    folded(net(conv(), constants(negative=not positive, q=q, s=SCALES, z=z), ["n", INPUTS, 8, 8]), (1, INPUTS, 8, 8))


@pytest.mark.parametrize("op", ["Gemm", "Gemm transposed", "MatMul", "MatMul left"])
@pytest.mark.parametrize("block", [0, 2])
def test_products(op: str, block: int) -> None:
    rows = op != "Gemm" and op != "MatMul"
    shape = (OUTPUTS, 8) if rows else (8, OUTPUTS)
    axis, inner = (0, 1) if rows else (1, 0)
    scales = np.random.default_rng(1).uniform(
        0.005, 0.02, [n // (block or 1) if i == inner else n for i, n in enumerate(shape)]
    )
    scales = scales if block else SCALES
    own: dict[str, Any] = {"axis": inner, "block_size": block} if block else {"axis": axis}
    held = constants(q=code(np.int8, shape, -127, 128), s=scales.astype(np.float32), z=np.zeros(scales.shape, np.int8))
    if op == "Gemm transposed":
        held["c"] = RNG.standard_normal(OUTPUTS).astype(np.float32)
    inputs = ["w", "x"] if op == "MatMul left" else ["x", "w"]
    attrs: dict[str, Any] = {"transB": 1, "alpha": 0.5, "beta": 2.0} if op == "Gemm transposed" else {}
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], **own),
        helper.make_node(op.split()[0], [*inputs, *(["c"] if "c" in held else [])], ["m"], **attrs),
        helper.make_node("BatchNormalization", ["m", "gamma", "beta", "mean", "var"], ["y"]),
    ]
    x: list[Any] = ["n", 8, 3] if op == "MatMul left" else ["n", 8]
    folded(net(nodes, held, x), tuple(2 if n == "n" else n for n in x))


@pytest.mark.parametrize(("groups", "axis"), [(1, 1), (1, None), (2, None), (4, 0)])
def test_transposed_convolutions(groups: int, axis: int | None) -> None:
    """The output channels lie on axis 1 of the weight; in groups of one channel each, axis 0 tells them apart as
    well. Two channels in each of two groups are told apart by none."""
    per = 1 if groups == 4 else 3
    channels = groups * per
    s = ONE if axis is None else SCALES[: (4 if axis == 0 else per)]
    held = constants(channels, q=code(np.int8, (4, per, 3, 3), -127, 128), s=s, z=np.zeros(np.shape(s), np.int8))
    proto = net(conv(op="ConvTranspose", axis=axis, group=groups), held, ["n", 4, 5, 5])
    if groups == 2:
        assert "in 2 groups has one scale per index of axis 1 of its weight" in refusal(proto)
    else:
        folded(proto, (2, 4, 5, 5))


def test_groups_of_a_convolution() -> None:
    held = constants(q=code(np.int8, (OUTPUTS, 2, 3, 3), -127, 128), s=SCALES, z=Z)
    folded(net(conv(group=2), held, ["n", INPUTS, 8, 8]), (2, INPUTS, 8, 8))


def test_a_channel_of_gamma_zero_has_codes_zero_and_a_scale() -> None:
    held = constants(q=CODES, s=SCALES, z=Z)
    held["gamma"][2] = 0
    folded(net(conv(), held, ["n", INPUTS, 8, 8]), (2, INPUTS, 8, 8))


def test_a_shared_weight_and_one_that_is_read_elsewhere() -> None:
    held = constants(q=CODES, s=SCALES, z=Z)
    first, other = conv(y="y"), conv(y="t")[1:]
    other[0].input[1] = "wy"
    _, summary = optimize_norms(net([*first, *other], held, ["n", INPUTS, 8, 8], "y t"))
    assert [f.status for f in summary.findings] == ["folded", "folded"]
    mean = helper.make_node("ReduceMean", ["x"], ["mx"])
    both = net([*first, mean, helper.make_node("Mul", ["wy", "mx"], ["t"])], held, ["n", INPUTS, 8, 8], "y t")
    assert "Mul '' also reads" in refusal(both)
    out, _ = folded(net(first, held, ["n", INPUTS, 8, 8], "y wy"), (2, INPUTS, 8, 8))  # an output keeps its own
    assert [n.op_type for n in out.graph.node].count("DequantizeLinear") == 2


def test_minus_128_has_no_counterpart() -> None:
    q = CODES.copy()
    q[0, 0, 0, 0] = -128
    proto = net(conv(), constants(q=q, s=SCALES, z=Z), ["n", INPUTS, 8, 8])
    assert "1 codes of Conv 'layer y' (for example -128) would exceed the range of int8" in refusal(proto)
    folded(net(conv(), constants(negative=False, q=q, s=SCALES, z=Z), ["n", INPUTS, 8, 8]), (2, INPUTS, 8, 8))


def test_a_zero_point_too_far_from_the_middle() -> None:
    q = code(np.uint8, CODES.shape, 0, 256)
    proto = net(conv(), constants(q=q, s=SCALES, z=np.full(OUTPUTS, 3, np.uint8)), ["n", INPUTS, 8, 8])
    assert "would exceed the range of uint8" in refusal(proto)


def test_other_ways_in_which_it_is_none() -> None:
    one = constants(q=CODES, s=ONE, z=np.int8(0))
    old = net(conv(axis=None), one, ["n", INPUTS, 8, 8], opset=12)
    assert "DequantizeLinear of opset 12 supports only one scale for all channels" in refusal(old)
    blocks = constants(
        q=CODES,
        s=np.full((OUTPUTS // 2, INPUTS, 3, 3), 0.01, np.float32),
        z=np.zeros((OUTPUTS // 2, INPUTS, 3, 3), np.int8),
    )
    nodes = conv()
    nodes[0].attribute.append(helper.make_attribute("block_size", 2))
    assert "its scale varies within blocks of 2" in refusal(net(nodes, blocks, ["n", INPUTS, 8, 8]))
    scaled = constants(q=CODES, s=SCALES[:INPUTS], z=Z[:INPUTS])
    assert "one scale per index of axis 1" in refusal(net(conv(axis=1), scaled, ["n", INPUTS, 8, 8]))


def test_rounding_between_the_layer_and_its_norm() -> None:
    held = constants(q=CODES, s=SCALES, z=Z, so=np.float32(0.1), zo=np.int8(0))
    nodes = conv()
    nodes[2].input[0] = "cd"
    nodes[2:2] = [
        helper.make_node("QuantizeLinear", ["cy", "so", "zo"], ["cq"]),
        helper.make_node("DequantizeLinear", ["cq", "so", "zo"], ["cd"]),
    ]
    assert "its input is quantized" in refusal(net(nodes, held, ["n", INPUTS, 8, 8]))


def test_weights_that_are_quantized_when_the_model_runs() -> None:
    held = constants(f=CODES.astype(np.float32), s=SCALES, z=Z)
    nodes = [helper.make_node("QuantizeLinear", ["f", "s", "z"], ["q"], axis=0), *conv()]
    assert "is dequantized from a value that is not constant" in refusal(net(nodes, held, ["n", INPUTS, 8, 8]))


def test_codes_that_are_not_what_was_proved_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = dequantized_weights.rescaled_parts

    def wrong(graph: Any, share: Any, codes: Any) -> Any:
        q, step, attrs = parts(graph, share, codes)  # type: ignore[misc]
        return np.where(np.arange(q.size).reshape(q.shape) == 7, q + 1, q), step, attrs

    monkeypatch.setattr(dequantized_weights, "rescaled_parts", wrong)
    with pytest.raises(ExportError, match="differ from the proved weight"):
        optimize_norms(net(conv(), constants(q=CODES, s=SCALES, z=Z), ["n", INPUTS, 8, 8]))
