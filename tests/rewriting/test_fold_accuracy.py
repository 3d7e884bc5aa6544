"""Folds that would cost accuracy are not made, and those that cost none all are."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import normdeploy
from normdeploy.forms import batch_norm
from normdeploy.graphs.graph import Graph
from normdeploy.graphs.region import Refusal
from normdeploy.recognition.affine_chains import find_affine_chains
from normdeploy.rewriting import fold_accuracy
from normdeploy.rewriting.norm_optimizer import optimize_norms
from tests.support import run_onnxruntime

EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
Node = tuple[str, list[str], str, dict[str, object]]


def net(
    nodes: list[Node], shape: list[int | str], constants: dict[str, np.ndarray], dtype: str = "float32"
) -> onnx.ModelProto:
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    graph = helper.make_graph(
        [helper.make_node(op, i, [o], name=f"{op}_{o}", **attrs) for op, i, o, attrs in nodes],
        "net",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(kind), shape)],
        [helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(kind), None)],
        [numpy_helper.from_array(v.astype(kind), name) for name, v in constants.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return onnx.shape_inference.infer_shapes(proto)


def standardized(
    ratio: float, dtype: str = "float32", linear: str = "MatMul", bad: slice = slice(None)
) -> onnx.ModelProto:
    """(x − mean)/std before a linear op, with mean/std = ratio in the channels ``bad`` and 0.1 in the others."""
    rng = np.random.default_rng(7)
    std = rng.uniform(0.5, 2, 32)
    mean = 0.1 * std
    mean[bad] = ratio * std[bad]
    weight = rng.standard_normal((32, 16))
    if linear == "Conv":
        held = {"m": mean[:, None, None], "s": std[:, None, None], "w": weight.T[..., None, None]}
        shape: list[int | str] = ["B", 32, 3, 3]
    else:
        held, shape = {"m": mean, "s": std, "w": weight}, ["B", 32]
    nodes: list[Node] = [("Sub", ["x", "m"], "d", {}), ("Div", ["d", "s"], "h", {}), (linear, ["h", "w"], "y", {})]
    return net(nodes, shape, held, dtype)


def drawn(proto: onnx.ModelProto, rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Inputs that the file's mean and deviation state, in its type, and the result in float64."""
    held = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    mean, std, weight = (held[n].astype(np.float64) for n in "msw")
    spatial = (3, 3) if mean.ndim == 3 else ()
    x = (mean + std * np.random.default_rng(1).standard_normal((rows, 32, *spatial))).astype(held["m"].dtype)
    y = (x.astype(np.float64) - mean) / std
    return x, np.einsum("bchw,oc->bohw", y, weight[..., 0, 0]) if spatial else y @ weight


@pytest.mark.parametrize("linear", ["MatMul", "Conv", "Gemm"])
@pytest.mark.parametrize("ratio", [10.0, 1e4, 1e6])
def test_a_standardization_is_not_folded_where_that_cancels(ratio: float, linear: str) -> None:
    """Folded, the error grew from 1e-6 to 9e-3 at 1e4 and to 0.6 at 1e6. What is allowed: the rule itself."""
    proto = standardized(ratio, linear=linear)
    out, summary = optimize_norms(proto)
    (finding,) = summary.findings
    assert [n.op_type for n in out.graph.node] == ["Add", linear]  # its scale alone is folded
    assert finding.status == "folded"
    assert "would lose accuracy: for inputs with its stored statistics, the error in channel" in finding.reason
    x, exact = drawn(proto)
    before, after = (np.abs(run_onnxruntime(p, {"x": x})[0] - exact) for p in (proto, out))
    channel = (0, *range(2, exact.ndim))
    assert (after.max(channel) <= 4 * before.max(channel) + 4 * EPSILON["float32"] * np.abs(exact).max(channel)).all()


@pytest.mark.parametrize("ratio", [0.0, 0.5, 2.0])
def test_a_standardization_is_folded_where_it_costs_little(ratio: float) -> None:
    out, summary = optimize_norms(standardized(ratio))
    assert [f.reason for f in summary.findings] == [""]
    assert {n.op_type for n in out.graph.node} <= {"MatMul", "Add"}
    assert len(out.graph.node) < 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_type_is_judged_in_its_own_arithmetic(dtype: str) -> None:
    """In float64 nothing is folded: the scale is measured in float64 too, and shift/scale is the mean but for its last
    digits."""
    out, summary = optimize_norms(standardized(100.0, dtype))
    assert f"({dtype}) would grow from" in summary.findings[0].reason
    assert [n.op_type for n in out.graph.node] == (
        ["Sub", "Div", "MatMul"] if dtype == "float64" else ["Add", "MatMul"]
    )
    out, summary = optimize_norms(standardized(0.5, dtype))
    assert summary.findings[0].status == "folded"
    assert not summary.findings[0].reason


def test_one_channel_of_many_counts() -> None:
    """A bound relative to all channels together would let the one through that a single output reads."""
    rng = np.random.default_rng(2)
    mean, std, weight = np.zeros(512), rng.uniform(0.5, 2, 512), rng.standard_normal((512, 256))
    mean[300], weight[300] = 1e4, 0
    weight[:, 77] = 0
    weight[300, 77] = 1e-3
    nodes: list[Node] = [("Sub", ["x", "m"], "d", {}), ("Div", ["d", "s"], "h", {}), ("MatMul", ["h", "w"], "y", {})]
    _, summary = optimize_norms(net(nodes, ["B", 512], {"m": mean, "s": std, "w": weight}))
    assert "the error in channel 77" in summary.findings[0].reason


def test_folding_into_the_op_before_is_judged_too() -> None:
    """x passes a depthwise convolution by powers of two without an error, and Sub is exact too: folded, both are
    not."""
    rng = np.random.default_rng(3)
    mean, std = np.full((8, 1, 1), 1e4) + rng.uniform(0, 1, (8, 1, 1)), rng.uniform(0.5, 2, (8, 1, 1))
    nodes: list[Node] = [
        ("Conv", ["x", "w"], "z", {"group": 8}),
        ("Sub", ["z", "m"], "d", {}),
        ("Div", ["d", "s"], "y", {}),
    ]
    proto = net(nodes, ["B", 8, 2, 2], {"w": np.full((8, 1, 1, 1), 2.0), "m": mean, "s": std})
    out, summary = optimize_norms(proto)
    assert [n.op_type for n in out.graph.node] == ["Conv", "Sub", "Div"]
    assert [f.status for f in summary.findings] == ["refused"]
    assert "would lose accuracy" in summary.findings[0].reason


def test_a_scale_and_shift_stays_in_the_order_that_is_accurate() -> None:
    mean, std, gain = (np.array(v)[:, None, None] for v in ([3e4, 6e4], [1.1, 3.3], [0.7, 1.3]))
    nodes: list[Node] = [("Sub", ["x", "m"], "d", {}), ("Div", ["d", "s"], "h", {}), ("Mul", ["h", "g"], "y", {})]
    out, summary = optimize_norms(net(nodes, ["B", 2, 2, 2], {"m": mean, "s": std, "g": gain}))
    assert [n.op_type for n in out.graph.node] == ["Sub", "Div", "Mul"]
    assert "as one scale and shift, it would lose accuracy" in summary.findings[0].reason


def folded(model: torch.nn.Module, seed: int, spread: float, least: float = 0.01) -> list[tuple[str, str]]:
    """(status, reason) of each BatchNorm, whose statistics and parameters are random."""
    torch.manual_seed(seed)
    for layer in model.eval().modules():
        if isinstance(layer, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
            layer.running_mean.normal_(0, spread)  # type: ignore[union-attr]
            layer.running_var.uniform_(least, 2)  # type: ignore[union-attr]
            layer.weight.data.normal_(1, 0.5)
            layer.bias.data.normal_()
    return [(f.status, f.reason) for f in normdeploy.export(model, (torch.randn(1, 3, 32, 32),)).summary.findings]


@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_every_batch_norm_behind_a_linear_op_is_folded(spread: float) -> None:
    """Its a·z + b multiplies the rounding of z by a, as the folded weights do, whatever its statistics."""
    nn = torch.nn
    for seed in range(3):
        model = nn.Sequential(
            *(nn.Conv2d(3, 32, 7, stride=2, padding=3), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 1), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.ConvTranspose2d(64, 16, 2, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(16 * 32 * 32, 10), nn.BatchNorm1d(10)),
        )
        assert folded(model, seed, spread) == [("folded", "")] * 5


@pytest.mark.parametrize("groups", [1, 32])
def test_a_filter_of_zeros_costs_nothing(groups: int) -> None:
    """EfficientNet-Lite0 has two: their result is the bias at any input."""
    nn = torch.nn
    conv = nn.Conv2d(32, 32, 3, groups=groups)
    conv.weight.data[16] = 0
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), conv, nn.BatchNorm2d(32))
    assert folded(model, 0, 1.0) == [("folded", "")]


def test_every_batch_norm_before_a_linear_op_is_folded() -> None:
    """Means of up to some five deviations: with more, the sums of W·a·z get so much larger than their results that
    folding costs digits."""
    nn = torch.nn
    for seed in range(3):
        model = nn.Sequential(
            nn.BatchNorm2d(3), nn.Conv2d(3, 32, 3), nn.Flatten(), nn.BatchNorm1d(28800), nn.Linear(28800, 10)
        )
        assert folded(model, seed, 1.0, 0.5) == [("folded", "")] * 2


def test_hostile_sizes_cost_nothing() -> None:
    """The window of a convolution is evaluated without its strides and dilations: 30,000 apart it would have 215
    GiB."""
    rng = np.random.default_rng(5)
    spread = {"dilations": [30000, 30000], "strides": [20000, 20000]}
    nodes: list[Node] = [("Mul", ["x", "g"], "h", {}), ("Conv", ["h", "w"], "y", spread)]
    held = {"g": rng.uniform(1, 2, (4, 1, 1)), "w": rng.standard_normal((2048, 4, 5, 5))}
    graph = Graph(net(nodes, ["B", 4, "H", "W"], held))
    chains = find_affine_chains(graph, graph.nodes[0])
    assert not isinstance(chains, Refusal)
    chain = next(iter(chains))
    made = batch_norm.fold_into_next(graph, chain)
    assert isinstance(made, batch_norm.AffineFold)
    tracemalloc.start()
    assert fold_accuracy.drop_costly_fold(graph, chain, made) is made
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2**20


@pytest.mark.parametrize("after", [np.inf, -np.inf, np.nan])
def test_what_a_fold_makes_no_number_of_is_the_worst_loss(after: float) -> None:
    """Where the nodes before give none either, nothing is lost."""
    exact, channels = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([5, 7])
    made = exact.copy()
    made[1, 1] = after
    loss = fold_accuracy.worst_channel(exact, exact, made, np.dtype(np.float32), channels, "it")
    assert loss is not None
    assert (loss.channel, loss.before, loss.after.error) == (7, 0.0, np.inf)
    assert fold_accuracy.worst_channel(exact, made, made, np.dtype(np.float32), channels, "it") is None


def test_inputs_are_spread_as_the_statistics_state() -> None:
    """By the deviation, the root of the variance; without statistics, so that what comes out is a unit wide."""
    text = """<ir_version: 9, opset_import: ["" : 21]> net (float[B, 2, H] x) => (float[B, 2, H] y)
        <float[2] g = {3, 5}, float[2] s = {1, 2}, float[2] m = {10, -4}, float[2] v = {4, 0.25},
        float[2, 1] k = {8, -2}>
        { i = Relu(x) n = BatchNormalization <epsilon = 0.0> (i, g, s, m, v) y = Mul(i, k) }"""
    graph = Graph(onnx.parser.parse_model(text))
    for op, mean, spread in (("BatchNormalization", [10, -4], [2, 0.5]), ("Mul", [0, 0], [0.125, 0.5])):
        node = next(n for n in graph.nodes if n.op == op)
        chain = next(iter(find_affine_chains(graph, node)))
        a, b = (np.broadcast_to(v.reshape(-1), 2) for v in (chain.scale, chain.shift))
        stated = fold_accuracy.stated_affine(graph, chain, a, b, 1, 2)
        np.testing.assert_allclose(stated.mean, mean)
        np.testing.assert_allclose(stated.spread, spread)
