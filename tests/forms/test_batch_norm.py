"""BatchNorm folded: into every linear op, on either side, through views and Concat; what is not exact is refused; nodes
never grow."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from normdeploy.findings.records import Summary
from normdeploy.rewriting.norm_optimizer import optimize_norms

UNIT = 2.0**-24
Node = tuple[str, list[str], str] | tuple[str, list[str], str, dict[str, object]]


def values(name: str, *shape: int) -> np.ndarray:
    """Reproducible values; variances (v…) are positive, scales (a…) not near zero."""
    drawn = np.random.default_rng(sum(map(ord, name))).standard_normal(shape)
    drawn = (
        np.abs(drawn) + 0.1 if name[0] == "v" else np.sign(drawn) * (np.abs(drawn) + 0.3) if name[0] == "a" else drawn
    )
    return drawn.astype(np.float32)


def net(
    nodes: list[Node], x: list[int | str], constants: dict[str, np.ndarray], outputs: str = "y", opset: int = 17
) -> onnx.ModelProto:
    made = [helper.make_node(op, i, [o], name=f"{op}_{o}", **(rest[0] if rest else {})) for op, i, o, *rest in nodes]
    dtype = next((v.dtype for v in constants.values() if v.dtype.kind == "f"), np.dtype(np.float32))
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    graph = helper.make_graph(
        made,
        "net",
        [helper.make_tensor_value_info("x", kind, x)],
        [helper.make_tensor_value_info(o, kind, None) for o in outputs.split()],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    del proto.graph.output[:]
    inferred = {v.name: v for v in onnx.shape_inference.infer_shapes(proto).graph.value_info}
    proto.graph.output.extend(inferred.get(o) or helper.make_tensor_value_info(o, kind, None) for o in outputs.split())
    return proto


def statistics(channels: int, suffix: str = "") -> dict[str, np.ndarray]:
    return {name + suffix: values(name + suffix, channels) for name in ("a", "b", "m", "v")}


def bn(x: str, y: str, suffix: str = "", **attrs: object) -> Node:
    return ("BatchNormalization", [x, *(n + suffix for n in "abmv")], y, attrs)


def run(proto: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level, options.graph_optimization_level = 4, ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )


def optimized(proto: onnx.ModelProto, *shape: int) -> tuple[list[str], Summary]:
    """The ops left, after what holds for every fold: valid, idempotent, never more nodes, the same numbers.

    Fewer than 100 terms are summed up in either file: 256 u of the largest magnitude covers both orders of summation.
    """
    out, summary = optimize_norms(proto)
    onnx.checker.check_model(out, full_check=True)
    assert optimize_norms(out)[0].SerializeToString(deterministic=True) == out.SerializeToString(deterministic=True)
    assert len(out.graph.node) <= len(proto.graph.node)
    x = np.random.default_rng(5).standard_normal(shape, dtype=np.float32)
    for before, after in zip(run(proto, x), run(out, x), strict=True):
        assert before.shape == after.shape
        assert np.abs(before - after).max() <= 256 * UNIT * (1 + np.abs(before).max())
    assert all(f.certificate for f in summary.findings if f.status == "folded")
    return [n.op_type for n in out.graph.node], summary


PREVIOUS: dict[str, tuple[list[Node], dict[str, np.ndarray], tuple[int, ...], int]] = {
    "conv 1d": ([("Conv", ["x", "w"], "h")], {"w": values("w", 6, 4, 3)}, (2, 4, 9), 6),
    "conv 3d": (
        [("Conv", ["x", "w", "c"], "h")],
        {"w": values("w", 3, 2, 2, 2, 2), "c": values("c", 3)},
        (1, 2, 4, 4, 5),
        3,
    ),
    "one channel": ([("Conv", ["x", "w", "c"], "h")], {"w": values("w", 1, 4, 3), "c": values("c", 1)}, (2, 4, 9), 1),
    "depthwise": ([("Conv", ["x", "w"], "h", {"group": 4})], {"w": values("w", 4, 1, 3, 3)}, (2, 4, 7, 8), 4),
    "grouped, padded": (
        [("Conv", ["x", "w"], "h", {"group": 2, "pads": [1, 0, 2, 1]})],
        {"w": values("w", 6, 2, 3, 3)},
        (2, 4, 7, 8),
        6,
    ),
    "auto pad": (
        [("Conv", ["x", "w"], "h", {"auto_pad": "SAME_UPPER"})],
        {"w": values("w", 6, 4, 3, 3)},
        (2, 4, 7, 8),
        6,
    ),
    "transposed, grouped": (
        [("ConvTranspose", ["x", "w", "c"], "h", {"group": 2, "strides": [2, 2], "output_padding": [1, 1]})],
        {"w": values("w", 4, 3, 3, 3), "c": values("c", 6)},
        (2, 4, 5, 6),
        6,
    ),
    "gemm": (
        [("Gemm", ["x", "w", "c"], "h", {"alpha": 0.5, "beta": 2.0})],
        {"w": values("w", 5, 6), "c": values("c", 6)},
        (3, 5),
        6,
    ),
    "gemm, transposed": ([("Gemm", ["x", "w"], "h", {"transB": 1, "alpha": 3.0})], {"w": values("w", 6, 5)}, (3, 5), 6),
    "gemm, one bias": (
        [("Gemm", ["x", "w", "c"], "h", {"transA": 1})],
        {"w": values("w", 3, 6), "c": values("c", 1)},
        (3, 5),
        6,
    ),
    "matmul": ([("MatMul", ["x", "w"], "h")], {"w": values("w", 5, 6)}, (3, 5), 6),
    "weight on the left": ([("MatMul", ["w", "x"], "h")], {"w": values("w", 6, 5)}, (2, 5, 4), 6),
}


@pytest.mark.parametrize("name", PREVIOUS)
def test_into_the_op_before(name: str) -> None:
    nodes, constants, shape, channels = PREVIOUS[name]
    size: list[int | str] = ["N", *shape[1:]] if name != "gemm, one bias" else list(shape)
    ops, summary = optimized(net([*nodes, bn("h", "y")], size, constants | statistics(channels)), *shape)
    assert ops == [nodes[0][0]] or ops == ["MatMul", "Add"]
    assert [f.status for f in summary.findings] == ["folded"]


def test_into_a_matmul_and_its_added_bias() -> None:
    constants = {"w": values("w", 5, 6), "c": values("c", 6)} | statistics(6)
    ops, _ = optimized(
        net([("MatMul", ["x", "w"], "h"), ("Add", ["h", "c"], "z"), bn("z", "y")], ["N", 5], constants), 3, 5
    )
    assert ops == ["MatMul", "Add"]


VIEWS: dict[str, list[Node]] = {
    "flatten, LeViT": [("Reshape", ["h", "flat"], "z")],
    "transpose": [("Transpose", ["h"], "z", {"perm": [0, 2, 1]})],
    "transpose and unsqueeze": [("Transpose", ["h"], "t", {"perm": [0, 2, 1]}), ("Unsqueeze", ["t", "last"], "z")],
    "computed shape": [
        ("Shape", ["h"], "s"),
        ("Gather", ["s", "ends"], "g"),
        ("Concat", ["minus", "g"], "k", {"axis": 0}),
        ("Reshape", ["h", "k"], "z"),
    ],
}


@pytest.mark.parametrize("name", VIEWS)
def test_through_views_that_keep_the_channels(name: str) -> None:
    integers = {"flat": np.array([-1, 6]), "last": np.array([-1]), "ends": np.array([2]), "minus": np.array([-1])}
    nodes = [("MatMul", ["x", "w"], "h"), *VIEWS[name], bn("z", "y")]
    ops, summary = optimized(net(nodes, ["N", 4, 5], {"w": values("w", 5, 6)} | integers | statistics(6)), 2, 4, 5)
    assert ops[:2] == ["MatMul", "Add"]
    assert "BatchNormalization" not in ops
    assert [f.status for f in summary.findings] == ["folded"]


PLACES = {1: (9,), 2: (5, 4), 3: (3, 4, 5)}


def per_sample(before: list[Node], size: int | str, repeats: list[str]) -> list[Node]:
    """Write a BatchNormalization over (1, samples·channels, …), as torch exports an InstanceNorm with statistics.

    Args:
        before: nodes that compute h from x.
        size: number of samples, or the name of that dim.
        repeats: names of the four parameters for all samples; with a dim, Tile nodes compute these.
    """
    tiles: list[Node] = []
    if isinstance(size, str):
        tiles = [("Shape", ["h"], "samples", {"end": 1})]
        tiles += [("Tile", [name, "samples"], made) for name, made in zip("abmv", repeats, strict=True)]
    return [
        *before,
        *tiles,
        ("Reshape", ["h", "one"], "r"),
        ("BatchNormalization", ["r", *repeats], "s"),
        ("Reshape", ["s", "back"], "y"),
    ]


REPEATS = ["ra", "rb", "rm", "rv"]


def shapes_of_samples(places: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {"one": np.array([1, -1, *places]), "back": np.array([-1, 6, *places])}


def repeated_statistics(samples: int) -> dict[str, np.ndarray]:
    return {f"r{name}": np.tile(value, samples) for name, value in statistics(6).items()}


@pytest.mark.parametrize("dims", PLACES)
@pytest.mark.parametrize("size", [3, "N"])
def test_parameters_repeated_for_each_sample_are_folded(size: int | str, dims: int) -> None:
    places = PLACES[dims]
    constants = {"w": values("w", 6, 4, *[3] * dims)} | shapes_of_samples(places)
    constants |= repeated_statistics(size) if isinstance(size, int) else statistics(6)
    before: list[Node] = [("Conv", ["x", "w"], "h", {"pads": [1] * 2 * dims})]
    nodes = per_sample(before, size, REPEATS)
    ops, summary = optimized(net(nodes, [size, 4, *places], constants), 3, 4, *places)
    assert ops == ["Conv"]
    assert [(f.status, f.certificate.method if f.certificate else "") for f in summary.findings] == [
        ("folded", "exact")
    ]


@pytest.mark.parametrize("size", [3, "N"])
def test_parameters_repeated_for_each_sample_without_a_linear_op_are_one_scale_and_shift(size: int | str) -> None:
    """Near its thresholds, the whole model is compared with perturbed parameters, also if Tile reads them."""
    constants = shapes_of_samples(PLACES[2])
    constants |= repeated_statistics(size) if isinstance(size, int) else statistics(6)
    nodes = per_sample([("Relu", ["x"], "h")], size, REPEATS)
    nodes[-1] = ("Reshape", ["s", "back"], "z")
    ops, _ = optimized(net([*nodes, ("Relu", ["z"], "y")], [size, 6, *PLACES[2]], constants), 3, 6, *PLACES[2])
    assert ops == ["Relu", "Mul", "Add", "Relu"]


def test_a_scale_by_hand_repeated_for_each_sample_is_folded() -> None:
    constants = {"w": values("w", 6, 4, 1, 1), **shapes_of_samples(PLACES[2])}
    constants |= {name: np.tile(values(name, 6), 3).reshape(1, 18, 1, 1) for name in ("a", "b", "m")}
    nodes: list[Node] = [
        ("Conv", ["x", "w"], "h"),
        ("Reshape", ["h", "one"], "r"),
        ("Sub", ["r", "m"], "d"),
        ("Mul", ["d", "a"], "e"),
        ("Add", ["e", "b"], "s"),
        ("Reshape", ["s", "back"], "y"),
    ]
    ops, _ = optimized(net(nodes, [3, 4, *PLACES[2]], constants), 3, 4, *PLACES[2])
    assert ops == ["Conv"]


def test_a_scale_with_equal_rows_for_all_samples_is_folded() -> None:
    constants = {"w": values("w", 6, 4, 1, 1)}
    constants |= {name: np.tile(values(name, 1, 6, 1, 1), (3, 1, 1, 1)) for name in ("a", "b", "m")}
    nodes: list[Node] = [
        ("Conv", ["x", "w"], "h"),
        ("Sub", ["h", "m"], "d"),
        ("Mul", ["d", "a"], "e"),
        ("Add", ["e", "b"], "y"),
    ]
    ops, _ = optimized(net(nodes, [3, 4, *PLACES[2]], constants), 3, 4, *PLACES[2])
    assert ops == ["Conv"]


@pytest.mark.parametrize("name", REPEATS)
def test_parameters_that_differ_between_samples_are_not_folded(name: str) -> None:
    """The first norm of the file has parameters that repeat. In the second one, a single element differs."""
    other = {f"{n}2": v.copy() for n, v in repeated_statistics(3).items()}
    other[f"{name}2"][14] *= 1.5
    constants = {"w": values("w", 6, 6, 1, 1), **shapes_of_samples(PLACES[2])}
    nodes = per_sample([("Conv", ["x", "w"], "h")], 3, REPEATS)
    again = per_sample([("Conv", ["t", "w"], "h2")], 3, [f"{n}2" for n in REPEATS])
    renamed = {"h": "h2", "r": "r2", "s": "s2", "y": "y2"}
    nodes += [
        ("Relu", ["y"], "t"),
        *((op, [renamed.get(i, i) for i in ins], renamed.get(o, o), *more) for op, ins, o, *more in again),
    ]
    constants |= repeated_statistics(3) | other
    ops, summary = optimized(net(nodes, [3, 6, *PLACES[2]], constants, outputs="y2"), 3, 6, *PLACES[2])
    assert ops[:3] == ["Conv", "Relu", "Conv"]
    assert len(ops) > 3
    assert "Conv" in summary.findings[0].became


def test_not_through_a_view_that_mixes_the_channels() -> None:
    nodes: list[Node] = [("MatMul", ["x", "w"], "h"), ("Reshape", ["h", "shape"], "z"), bn("z", "y")]
    constants = {"w": values("w", 5, 6), "shape": np.array([0, 3, -1])} | statistics(3)
    ops, summary = optimized(net(nodes, ["N", 4, 5], constants), 2, 4, 5)
    assert ops == ["MatMul", "Reshape", "BatchNormalization"]
    assert "more axes than the output channels" in summary.findings[0].reason


def test_each_of_two_that_share_a_weight_gets_its_own() -> None:
    nodes: list[Node] = [
        ("Conv", ["x", "w"], "h"),
        bn("h", "z"),
        ("Relu", ["z"], "r"),
        ("Conv", ["r", "w"], "k"),
        bn("k", "y", "2"),
    ]
    ops, summary = optimized(
        net(nodes, ["N", 3, 4, 5], {"w": values("w", 3, 3, 1, 1)} | statistics(3) | statistics(3, "2")), 2, 3, 4, 5
    )
    assert ops == ["Conv", "Relu", "Conv"]
    assert "its own copy of a weight that 2 nodes share" in summary.findings[0].became


def test_a_weight_that_others_read_is_not_copied() -> None:
    """A tied embedding: a copy would double what is mostly the largest weight of a model."""
    nodes: list[Node] = [
        ("MatMul", ["x", "w"], "h"),
        bn("h", "y"),
        ("Abs", ["x"], "k"),
        ("Cast", ["k"], "i", {"to": TensorProto.INT64}),
        ("Gather", ["w", "i"], "g"),
    ]
    ops, summary = optimized(net(nodes, ["N", 6], {"w": values("w", 6, 6)} | statistics(6), outputs="y g"), 2, 6)
    assert ops == ["MatMul", "BatchNormalization", "Abs", "Cast", "Gather"]
    assert "Gather 'Gather_g' also reads" in summary.findings[0].reason


NEXT: dict[str, tuple[Node, dict[str, np.ndarray], tuple[int, ...]]] = {
    "conv": (("Conv", ["z", "w", "c"], "y"), {"w": values("w", 6, 4, 3), "c": values("c", 6)}, (2, 4, 9)),
    "grouped conv": (("Conv", ["z", "w"], "y", {"group": 2, "strides": [2]}), {"w": values("w", 6, 2, 3)}, (2, 4, 9)),
    "gemm": (
        ("Gemm", ["z", "w", "c"], "y", {"alpha": 0.5, "transB": 1}),
        {"w": values("w", 6, 4), "c": values("c", 6)},
        (3, 4),
    ),
    "matmul": (("MatMul", ["z", "w"], "y"), {"w": values("w", 4, 6)}, (3, 4)),
}


@pytest.mark.parametrize("name", NEXT)
def test_into_the_op_behind(name: str) -> None:
    node, constants, shape = NEXT[name]
    nodes = [("Relu", ["x"], "h"), bn("h", "z"), node]
    ops, summary = optimized(net(nodes, ["N", *shape[1:]], constants | statistics(4)), *shape)
    assert ops in (["Relu", node[0]], ["Relu", "MatMul", "Add"])
    assert summary.findings[0].became.startswith("folded into the following ")


def test_into_a_matmul_behind_whose_bias_is_added() -> None:
    nodes: list[Node] = [("Relu", ["x"], "h"), bn("h", "z"), ("MatMul", ["z", "w"], "k"), ("Add", ["k", "c"], "y")]
    ops, _ = optimized(net(nodes, ["N", 4], {"w": values("w", 4, 6), "c": values("c", 6)} | statistics(4)), 3, 4)
    assert ops == ["Relu", "MatMul", "Add"]


@pytest.mark.parametrize("computed", [False, True])
def test_into_a_linear_behind_a_flatten(computed: bool) -> None:
    shape: list[Node] = [
        ("Shape", ["z"], "s"),
        ("Gather", ["s", "first"], "g"),
        ("Concat", ["g", "minus"], "k", {"axis": 0}),
    ]
    flat: list[Node] = [*shape, ("Reshape", ["z", "k"], "f")] if computed else [("Flatten", ["z"], "f")]
    constants = {
        "w": values("w", 12, 6),
        "c": values("c", 6),
        "first": np.array([0]),
        "minus": np.array([-1]),
    } | statistics(4)
    ops, _ = optimized(
        net([("Relu", ["x"], "h"), bn("h", "z"), *flat, ("Gemm", ["f", "w", "c"], "y")], ["N", 4, 3], constants),
        2,
        4,
        3,
    )
    assert "BatchNormalization" not in ops
    assert "Mul" not in ops
    assert ops[-1] == "Gemm"


@pytest.mark.parametrize(
    ("op", "weight"),
    [(("Conv", {"pads": [1, 1]}), (6, 4, 3)), (("ConvTranspose", {"strides": [2]}), (4, 6, 3))],
    ids=["padded", "transposed"],
)
def test_a_padding_op_behind_takes_the_scale_alone(op: tuple[str, dict[str, object]], weight: tuple[int, ...]) -> None:
    nodes: list[Node] = [("Relu", ["x"], "h"), bn("h", "z"), (op[0], ["z", "w"], "y", op[1])]
    ops, summary = optimized(net(nodes, ["N", 4, 9], {"w": values("w", *weight)} | statistics(4)), 2, 4, 9)
    assert ops == ["Relu", "Add", op[0]]
    assert "its shift written as one Add" in summary.findings[0].became


def test_a_padding_op_behind_takes_all_where_there_is_no_shift() -> None:
    constants = (
        {"w": values("w", 6, 4, 3)} | statistics(4) | {"b": np.zeros(4, np.float32), "m": np.zeros(4, np.float32)}
    )
    ops, _ = optimized(
        net([("Relu", ["x"], "h"), bn("h", "z"), ("Conv", ["z", "w"], "y", {"pads": [1, 1]})], ["N", 4, 9], constants),
        2,
        4,
        9,
    )
    assert ops == ["Relu", "Conv"]


def test_a_scale_of_zero_can_not_be_divided_by() -> None:
    constants = {"w": values("w", 6, 4, 3)} | statistics(4) | {"a": np.array([1, 0, 2, 3], np.float32)}
    ops, _ = optimized(
        net([("Relu", ["x"], "h"), bn("h", "z"), ("Conv", ["z", "w"], "y", {"pads": [1, 1]})], ["N", 4, 9], constants),
        2,
        4,
        9,
    )
    assert ops == ["Relu", "BatchNormalization", "Conv"]


@pytest.mark.parametrize("between", ["Relu", "Sigmoid"])
def test_never_through_an_activation(between: str) -> None:
    nodes: list[Node] = [("Conv", ["x", "w"], "h"), (between, ["h"], "r"), bn("r", "y")]
    ops, summary = optimized(net(nodes, ["N", 4, 9], {"w": values("w", 6, 4, 3)} | statistics(6)), 2, 4, 9)
    assert ops == ["Conv", between, "BatchNormalization"]
    assert [(f.became, f.reason) for f in summary.findings] == [
        ("BatchNormalization (one scale and shift)", "no linear op precedes or follows it")
    ]


def test_a_concat_of_convs_is_split() -> None:
    nodes: list[Node] = [
        ("Conv", ["x", "w"], "h"),
        ("Conv", ["x", "u", "c"], "k", {"pads": [1, 1]}),
        ("Concat", ["h", "k"], "z", {"axis": 1}),
        bn("z", "y"),
    ]
    constants = {"w": values("w", 2, 4, 1), "u": values("u", 3, 4, 3), "c": values("c", 3)} | statistics(5)
    ops, summary = optimized(net(nodes, ["N", 4, 9], constants), 2, 4, 9)
    assert sorted(ops) == ["Concat", "Conv", "Conv"]
    assert summary.findings[0].became == "folded into Conv 'Conv_h', Conv 'Conv_k'"


def test_a_concat_with_a_part_that_can_not_take_its_share() -> None:
    nodes: list[Node] = [
        ("Conv", ["x", "w"], "h"),
        ("Relu", ["x"], "k"),
        ("Concat", ["h", "k"], "z", {"axis": 1}),
        bn("z", "y"),
    ]
    ops, summary = optimized(net(nodes, ["N", 4, 9], {"w": values("w", 2, 4, 1)} | statistics(6)), 2, 4, 9)
    assert "BatchNormalization" in ops
    assert "'k', an input of Concat 'Concat_z', can't be scaled: no linear op computes it" in summary.findings[0].reason


def test_a_convolution_that_a_concat_reads_twice_is_computed_once() -> None:
    """Its two places have scales of their own, and it can't take both."""
    nodes: list[Node] = [("Conv", ["x", "w"], "h"), ("Concat", ["h", "h"], "z", {"axis": 1}), bn("z", "y")]
    ops, summary = optimized(net(nodes, ["N", 4, 9], {"w": values("w", 3, 4, 1)} | statistics(6)), 2, 4, 9)
    assert ops.count("Conv") == 1
    assert "other nodes also read 'h', an input of Concat 'Concat_z'" in summary.findings[0].reason


def test_two_batch_norms_in_a_row() -> None:
    nodes: list[Node] = [("Conv", ["x", "w"], "h"), bn("h", "z"), bn("z", "y", "2")]
    ops, _ = optimized(
        net(nodes, ["N", 4, 9], {"w": values("w", 6, 4, 3)} | statistics(6) | statistics(6, "2")), 2, 4, 9
    )
    assert ops == ["Conv"]


def test_between_two_convs_the_first_takes_it() -> None:
    nodes: list[Node] = [("Conv", ["x", "w"], "h"), bn("h", "z"), ("Conv", ["z", "u"], "y", {"pads": [1, 1]})]
    ops, _ = optimized(
        net(nodes, ["N", 4, 9], {"w": values("w", 6, 4, 3), "u": values("u", 2, 6, 3)} | statistics(6)), 2, 4, 9
    )
    assert ops == ["Conv", "Conv"]


def test_a_frozen_batch_norm() -> None:
    nodes: list[Node] = [("Conv", ["x", "w"], "h"), ("Mul", ["h", "s"], "t"), ("Add", ["t", "p"], "y")]
    ops, _ = optimized(
        net(nodes, ["N", 4, 9], {"w": values("w", 6, 4, 3), "s": values("s", 6, 1), "p": values("p", 6, 1)}), 2, 4, 9
    )
    assert ops == ["Conv"]


def test_an_input_that_is_an_output_too() -> None:
    nodes: list[Node] = [("Conv", ["x", "w"], "h"), bn("h", "y")]
    ops, summary = optimized(
        net(nodes, ["N", 4, 9], {"w": values("w", 6, 4, 3)} | statistics(6), outputs="y h"), 2, 4, 9
    )
    assert ops == ["Conv", "BatchNormalization"]
    assert "other nodes also read 'h', which follows Conv 'Conv_h'" in summary.findings[0].reason


def test_a_weight_that_a_caller_may_replace() -> None:
    proto = net([("Conv", ["x", "w"], "h"), bn("h", "y")], ["N", 4, 9], {"w": values("w", 6, 4, 3)} | statistics(6))
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [6, 4, 3]))
    ops, summary = optimized(proto, 2, 4, 9)
    assert ops == ["Conv", "BatchNormalization"]
    assert "the weight of Conv 'Conv_h' is not constant" in summary.findings[0].reason


def test_two_batch_norms_with_the_same_statistics() -> None:
    nodes: list[Node] = [
        ("Conv", ["x", "w"], "h"),
        bn("h", "z"),
        ("Relu", ["z"], "r"),
        ("Conv", ["r", "u"], "k"),
        bn("k", "y"),
    ]
    ops, _ = optimized(
        net(nodes, ["N", 4, 9], {"w": values("w", 6, 4, 3), "u": values("u", 6, 6, 3)} | statistics(6)), 2, 4, 9
    )
    assert ops == ["Conv", "Relu", "Conv"]


def test_a_weight_that_constants_compute() -> None:
    nodes: list[Node] = [("Mul", ["w", "two"], "w2"), ("Conv", ["x", "w2"], "h"), bn("h", "y")]
    ops, _ = optimized(
        net(nodes, ["N", 4, 9], {"w": values("w", 6, 4, 3), "two": np.float32(2)} | statistics(6)), 2, 4, 9
    )
    assert ops == ["Conv"]


@pytest.mark.parametrize("variance", [0.0, 1e-12, 1e12])
def test_extreme_variances_are_folded_in_float64(variance: float) -> None:
    constants = {"w": values("w", 6, 4, 3)} | statistics(6) | {"v": np.full(6, variance, np.float32)}
    ops, _ = optimized(net([("Conv", ["x", "w"], "h"), bn("h", "y", epsilon=1e-12)], ["N", 4, 9], constants), 2, 4, 9)
    assert ops == ["Conv"]


def test_what_overflows_or_vanishes_in_half_precision_is_not_folded() -> None:
    half = {k: v.astype(np.float16) for k, v in ({"w": values("w", 6, 4, 3)} | statistics(6)).items()}
    nodes: list[Node] = [("Conv", ["x", "w"], "h"), bn("h", "y")]
    for change in (
        {"v": np.zeros(6, np.float16), "a": np.full(6, 6e4, np.float16)},
        {"a": np.full(6, 6e-8, np.float16), "v": np.full(6, 6e4, np.float16)},
    ):
        out, summary = optimize_norms(net(nodes, ["N", 4, 9], half | change))
        assert [n.op_type for n in out.graph.node] == ["Conv", "BatchNormalization"]
        assert "is out of range for float16" in summary.findings[0].reason


def test_batch_statistics_are_left_alone_with_their_reason() -> None:
    nodes: list[Node] = [("Conv", ["x", "w"], "h"), ("BatchNormalization", ["h", *"abmv"], "y", {"training_mode": 1})]
    proto = net(nodes, ["N", 4, 9], {"w": values("w", 6, 4, 3)} | statistics(6))
    out, summary = optimize_norms(proto)
    assert [n.op_type for n in out.graph.node] == ["Conv", "BatchNormalization"]
    assert "training mode" in summary.findings[0].reason


def test_a_batch_norm_whose_root_is_folded_already() -> None:
    """What onnxruntime and torch's optimizer leave of one by hand: no root tells any more what it was, but two nodes do
    for four."""
    constants = {name: values(name, 4, 1, 1) for name in ("mean", "against", "gamma", "beta")}
    nodes: list[Node] = [
        ("Sub", ["x", "mean"], "d"),
        ("Div", ["d", "against"], "h"),
        ("Mul", ["h", "gamma"], "g"),
        ("Add", ["g", "beta"], "y"),
    ]
    ops, summary = optimized(net(nodes, ["N", 4, 5, 6], constants), 2, 4, 5, 6)
    assert ops == ["Mul", "Add"]
    assert [(f.kind, f.status) for f in summary.findings] == [("scale and shift", "folded")]


def test_a_preprocessing_of_two_nodes_is_left_alone() -> None:
    constants = {name: values(name, 4, 1, 1) for name in ("mean", "against")}
    nodes: list[Node] = [("Sub", ["x", "mean"], "d"), ("Div", ["d", "against"], "y")]
    ops, summary = optimized(net(nodes, ["N", 4, 5, 6], constants), 2, 4, 5, 6)
    assert ops == ["Sub", "Div"]
    assert not summary.findings
