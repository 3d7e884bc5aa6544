"""Equal norms of the parts of a tensor become one norm; parts that differ in more than scale and bias stay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from normdeploy.dtypes import UNIT_ROUNDOFF
from normdeploy.rewriting.norm_optimizer import optimize_norms
from tests.support import parsed, run_onnxruntime

HEADS = 4
LAYER = "{y} = LayerNormalization<axis = -1, epsilon = 1e-5>({x}, g{i}, b{i})"
SCALED = "{y} = LayerNormalization<axis = -1, epsilon = 1e-5>({x}, g{i})"
BY_HAND = """u{i} = ReduceMean({x}, last) d{i} = Sub({x}, u{i}) q{i} = Mul(d{i}, d{i}) v{i} = ReduceMean(q{i}, last)
    e{i} = Add(v{i}, eps) r{i} = Sqrt(e{i}) n{i} = Div(d{i}, r{i}) {y} = Mul(n{i}, g{i})"""
GROUP = "{y} = GroupNormalization<num_groups = 4, epsilon = 1e-5>({x}, g{i}, b{i})"
INSTANCE = """f{i} = Reshape({x}, groups) n{i} = InstanceNormalization<epsilon = 1e-5>(f{i}, ones, zeros)
    s{i} = Reshape(n{i}, shape{i}) m{i} = Mul(s{i}, wide) {y} = Add(m{i}, wide)"""
SHAPES = """f{i} = Reshape({x}, groups) n{i} = InstanceNormalization<epsilon = 1e-5>(f{i}, ones, zeros)
    k{i} = Shape({x}) s{i} = Reshape(n{i}, k{i}) m{i} = Mul(s{i}, wide) {y} = Add(m{i}, wide)"""


def net(
    norm: str, shape: str, sizes: list[int], axis: int, parameters: Callable[[int], dict[str, np.ndarray]] | None = None
) -> onnx.ModelProto:
    """Write a Split, ``norm`` of each part, and a Concat.

    Args:
        norm: nodes that compute {y} from {x}, the part {i}.
        shape: dims of x.
        sizes: sizes of the parts.
        parameters: returns the constants of part i.
    """
    n = len(sizes)
    parts = ", ".join(f"p{i}" for i in range(n))
    norms = " ".join(norm.format(x=f"p{i}", y=f"y{i}", i=i) for i in range(n))
    ends = ", ".join(f"y{i}" for i in range(n))
    text = f"""g (float[{shape}] x) => (float[{shape}] y) {{
        {parts} = Split<axis = {axis}>(x, sizes) {norms} y = Concat<axis = {axis}>({ends}) }}"""
    held = {"sizes": np.array(sizes), "last": np.array([-1]), "eps": np.float32(1e-5), "groups": np.array([0, 4, -1])}
    held |= {"ones": np.ones(4, np.float32), "zeros": np.zeros(4, np.float32)}
    held["wide"] = np.random.default_rng(3).standard_normal((8, 1, 1)).astype(np.float32)
    for i in range(n):
        held |= (parameters or (lambda i: {}))(i)
    used = {i for node in parsed(text).graph.node for i in node.input}
    return parsed(text, **{name: value for name, value in held.items() if name in used})


def own(i: int, size: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(10 + i)
    return {f"g{i}": rng.uniform(0.5, 2, size).astype(np.float32), f"b{i}": rng.standard_normal(size, np.float32)}


def equal(i: int, size: int = 16) -> dict[str, np.ndarray]:
    return {name[0] + str(i): value for name, value in own(0, size).items()}


def optimized(proto: onnx.ModelProto, *shape: int, **how: object) -> list[str]:
    """The ops left; the numbers are at least as near to float64 as before, up to a rounding each."""
    out, _ = optimize_norms(proto, **how)  # type: ignore[arg-type]
    onnx.checker.check_model(out, full_check=True)
    assert optimize_norms(out, **how)[0].SerializeToString() == out.SerializeToString()  # type: ignore[arg-type]
    x = np.random.default_rng(5).standard_normal(shape).astype(np.float32) * 3 + 1
    (before,), (after,) = run_onnxruntime(proto, {"x": x}), run_onnxruntime(out, {"x": x})
    exact = layer_norms(proto, x) if "LayerNormalization" in {n.op_type for n in proto.graph.node} else before
    unit = UNIT_ROUNDOFF["float32"]
    assert np.abs(after - exact).max() <= np.abs(before - exact).max() + 16 * unit * np.abs(exact).max()
    return [n.op_type for n in out.graph.node]


def layer_norms(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """The layer norm of each part along axis 1 in float64."""
    held = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in proto.graph.initializer}
    ends = np.cumsum(held["sizes"])[:-1].astype(int)
    made = []
    for i, part in enumerate(np.split(x.astype(np.float64), ends, axis=1)):
        d = part - part.mean(-1, keepdims=True)
        y = d / np.sqrt((d * d).mean(-1, keepdims=True) + float(np.float32(1e-5)))
        made.append(y * held.get(f"g{i}", 1.0) + held.get(f"b{i}", 0.0))
    return np.concatenate(made, axis=1)


@pytest.mark.parametrize("shape", ["B, 4, S, 16", "2, 4, 5, 16"])
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [2, 2], [3, 1]])
def test_layer_norms_with_equal_parameters_are_one(sizes: list[int], shape: str) -> None:
    assert optimized(net(LAYER, shape, sizes, 1, equal), 2, 4, 5, 16) == ["LayerNormalization"]


@pytest.mark.parametrize("runtime", ["any", "onnxruntime", "tensorrt"])
@pytest.mark.parametrize("shape", ["B, 4, S, 16", "2, 4, 5, 16"])
def test_layer_norms_with_parameters_of_their_own_are_one_and_a_scale(shape: str, runtime: str) -> None:
    assert optimized(net(SCALED, shape, [1] * HEADS, 1, own), 2, 4, 5, 16, runtime=runtime) == [
        "LayerNormalization",
        "Mul",
    ]
    out, _ = optimize_norms(net(LAYER, shape, [1] * HEADS, 1, own), runtime=runtime)
    assert [n.op_type for n in out.graph.node] == ["LayerNormalization", "Mul", "Add"]
    held = {t.name: tuple(t.dims) for t in out.graph.initializer}
    assert [held[n.input[1]] for n in out.graph.node] == [(16,), (4, 1, 16), (4, 1, 16)]


def test_one_bias_for_all_stays_behind_the_scale() -> None:
    def one_bias(i: int) -> dict[str, np.ndarray]:
        return {f"g{i}": own(i)[f"g{i}"], f"b{i}": own(0)["b0"]}

    assert optimized(net(LAYER, "B, 4, S, 16", [1] * HEADS, 1, one_bias), 2, 4, 5, 16) == [
        "LayerNormalization",
        "Mul",
        "Add",
    ]


def test_as_many_heads_as_elements() -> None:
    assert optimized(net(SCALED, "B, 16, S, 16", [1] * 16, 1, own), 2, 16, 5, 16) == ["LayerNormalization", "Mul"]


@pytest.mark.parametrize("parameters", [equal, own])
def test_norms_by_hand_are_one(parameters: Callable[[int], dict[str, np.ndarray]]) -> None:
    ops = optimized(net(BY_HAND, "B, 4, S, 16", [1] * HEADS, 1, parameters), 2, 4, 5, 16)
    assert ops.count("LayerNormalization") == 1
    assert "Split" not in ops
    assert len(ops) <= 2


@pytest.mark.parametrize("shape", ["5, 8, h, w", "5, 8, 6, 7"])
def test_group_norms_of_chunks_of_the_batch_are_one(shape: str) -> None:
    proto = net(GROUP, shape, [2, 2, 1], 0, lambda i: equal(i, 8))
    assert optimized(proto, 5, 8, 6, 7, fuse="portable") == ["GroupNorm"]


@pytest.mark.parametrize("norm", [INSTANCE, SHAPES])
def test_group_norms_as_exported_are_one(norm: str) -> None:
    sizes = [2, 2, 1]
    proto = net(norm, "5, 8, 6, 7", sizes, 0, lambda i: {f"shape{i}": np.array([sizes[i], 8, 6, 7])})
    ops = optimized(proto, 5, 8, 6, 7)
    assert ops.count("InstanceNormalization") == 1
    assert not {"Split", "Concat"} & set(ops)


def other_epsilon(proto: onnx.ModelProto) -> None:
    proto.graph.node[2].attribute[1].f = 1e-3


def other_order(proto: onnx.ModelProto) -> None:
    proto.graph.node[-1].input[0], proto.graph.node[-1].input[1] = "y1", "y0"


def one_twice(proto: onnx.ModelProto) -> None:
    proto.graph.node[-1].input[1] = "y0"


def read_elsewhere(proto: onnx.ModelProto) -> None:
    proto.graph.output.append(onnx.helper.make_tensor_value_info("y1", onnx.TensorProto.FLOAT, None))


def joined_elsewhere(proto: onnx.ModelProto) -> None:
    proto.graph.node[-1].attribute[0].i = 2
    proto.graph.output[0].type.tensor_type.ClearField("shape")


@pytest.mark.parametrize("change", [other_epsilon, other_order, one_twice, read_elsewhere, joined_elsewhere])
def test_parts_that_differ_stay(change: Callable[[onnx.ModelProto], None]) -> None:
    proto = net(LAYER, "2, 4, 5, 16", [1] * HEADS, 1, equal)
    change(proto)
    out, _ = optimize_norms(proto)
    assert [n.op_type for n in out.graph.node] == ["Split", *["LayerNormalization"] * HEADS, "Concat"]


def test_parts_along_a_normalized_axis_stay() -> None:
    """The statistics of half a row are not those of the row."""
    proto = net(
        "{y} = LayerNormalization<axis = -1, epsilon = 1e-5>({x}, g{i})", "B, 16", [8, 8], 1, lambda i: equal(i, 8)
    )
    out, _ = optimize_norms(proto)
    assert [n.op_type for n in out.graph.node] == ["Split", *["LayerNormalization"] * 2, "Concat"]


def test_parts_without_a_norm_stay() -> None:
    out, _ = optimize_norms(net("{y} = Mul({x}, g{i})", "B, 4, S, 16", [1] * HEADS, 1, equal))
    assert [n.op_type for n in out.graph.node] == ["Split", *["Mul"] * HEADS, "Concat"]


def test_parameters_of_longer_parts_are_not_stacked() -> None:
    """Two scales for four rows would have to be repeated."""
    out, _ = optimize_norms(net(SCALED, "B, 4, S, 16", [2, 2], 1, own))
    assert [n.op_type for n in out.graph.node] == ["Split", *["LayerNormalization"] * 2, "Concat"]
