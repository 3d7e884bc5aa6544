"""What is proved for axes of any length is proved once for all of them, and taken over for nothing that depends on a
length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from normdeploy.findings.records import Summary
from normdeploy.proof.equivalence import Equivalence
from normdeploy.proof.identity_check import Identity
from normdeploy.rewriting import certification
from normdeploy.rewriting.norm_optimizer import optimize_norms
from tests.support import run_onnxruntime

Held = list[tuple[str, np.ndarray]]


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many proofs were found, for any length and for the file's own."""
    found = {"any": 0, "own": 0}

    def counted(name: str, function: str) -> None:
        real = getattr(certification, function)

        def show(sides: Equivalence) -> Identity:
            identity: Identity = real(sides)
            found[name] += 1
            return identity

        monkeypatch.setattr(certification, function, show)

    counted("any", "prove_for_any_length")
    counted("own", "prove_identity")
    return found


def model(nodes: list[onnx.NodeProto], held: Held, shape: Sequence[int | str], out: str) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    outputs = [helper.make_tensor_value_info(out, TensorProto.FLOAT, None)]
    graph = helper.make_graph(
        nodes, "g", inputs, outputs, [numpy_helper.from_array(v.astype(np.float32), k) for k, v in held]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def checked(proto: onnx.ModelProto, shape: Sequence[int], scale: float = 1.0) -> tuple[onnx.ModelProto, Summary]:
    """Optimized, and as it was: each of a few layers rounds sums of less than 1,000 terms in float32."""
    out, summary = optimize_norms(proto)
    x = scale * np.random.default_rng(5).standard_normal(shape, dtype=np.float32)
    (before,), (after,) = run_onnxruntime(proto, {"x": x}), run_onnxruntime(out, {"x": x})
    assert np.abs(before - after).max() <= 1e-4 * np.abs(before).max()
    return out, summary


def convolutions(channels: Sequence[int], places: int = 12, stride: int = 1) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    nodes, held, at = [], list[tuple[str, np.ndarray]](), "x"
    for i, (c, o) in enumerate(itertools.pairwise(channels)):
        held.append((f"w{i}", rng.standard_normal((o, c, 3, 3)) / np.sqrt(9 * c)))
        held += [(f"{name}{i}", rng.uniform(0.5, 1.5, o)) for name in "gbmv"]
        nodes.append(helper.make_node("Conv", [at, f"w{i}"], [f"c{i}"], pads=[1, 1, 1, 1], strides=[stride] * 2))
        nodes.append(helper.make_node("BatchNormalization", [f"c{i}", *(f"{name}{i}" for name in "gbmv")], [f"n{i}"]))
        nodes.append(helper.make_node("Relu", [f"n{i}"], [at := f"y{i}"]))
    return model(nodes, held, ["n", channels[0], places, places], at)


def test_folds_of_all_widths_have_one_proof(proved: dict[str, int]) -> None:
    proto = convolutions([9, 16, 32, 24, 40, 48])
    out, summary = checked(proto, (2, 9, 12, 12))
    assert {n.op_type for n in out.graph.node} == {"Conv", "Relu"}
    assert proved == {"any": 1, "own": 0}
    assert all(f.certificate and f.certificate.method == "exact" and f.certificate.bits >= 80 for f in summary.findings)


def test_strided_folds_of_all_widths_and_images_have_one_proof(proved: dict[str, int]) -> None:
    """What a convolution makes of a length is a length that may be any, too, and so are 5 places."""
    proto = convolutions([9, 16, 32, 24], places=40, stride=2)
    checked(proto, (2, 9, 40, 40))
    assert proved == {"any": 1, "own": 0}


def test_lengths_that_a_reshape_names_keep_no_other_from_being_any(proved: dict[str, int]) -> None:
    rng, held, nodes, at = np.random.default_rng(0), list[tuple[str, np.ndarray]](), list[onnx.NodeProto](), "x"
    for i, (c, o) in enumerate(itertools.pairwise([20, 24, 40, 32])):
        held += [
            (f"w{i}", rng.standard_normal((c, o)) / np.sqrt(c)),
            *((f"{name}{i}", rng.uniform(0.5, 1.5, o)) for name in "gbmv"),
        ]
        nodes.append(helper.make_node("MatMul", [at, f"w{i}"], [f"p{i}"]))
        nodes.append(helper.make_node("Transpose", [f"p{i}"], [f"t{i}"], perm=[0, 2, 1]))
        nodes.append(helper.make_node("Reshape", [f"t{i}", "image"], [f"i{i}"]))
        nodes.append(helper.make_node("BatchNormalization", [f"i{i}", *(f"{name}{i}" for name in "gbmv")], [f"n{i}"]))
        nodes.append(helper.make_node("Reshape", [f"n{i}", "rows"], [f"r{i}"]))
        nodes.append(helper.make_node("Transpose", [f"r{i}"], [at := f"y{i}"], perm=[0, 2, 1]))
    proto = model(nodes, held, ["n", 36, 20], at)
    proto.graph.initializer.append(numpy_helper.from_array(np.array([0, 0, 6, 6]), "image"))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([0, 0, 36]), "rows"))
    out, _ = checked(proto, (2, 36, 20))
    assert "BatchNormalization" not in {n.op_type for n in out.graph.node}
    assert proved == {"any": 1, "own": 0}


@pytest.mark.parametrize("places", [32, 48])
def test_groups_as_many_as_rows_are_told_apart_from_these(places: int) -> None:
    """32 groups of an image of 32×32 take no more points than of one of 48×48: 1,152; one for each group and row would
    be 11,616."""
    rng = np.random.default_rng(0)
    held = [
        ("one", np.ones(32)),
        ("none", np.zeros(32)),
        ("g", rng.standard_normal((64, 1, 1))),
        ("b", rng.standard_normal((64, 1, 1))),
    ]
    nodes = [
        helper.make_node("Reshape", ["x", "groups"], ["r"]),
        helper.make_node("InstanceNormalization", ["r", "one", "none"], ["i"]),
        helper.make_node("Reshape", ["i", "image"], ["s"]),
        helper.make_node("Mul", ["s", "g"], ["t"]),
        helper.make_node("Add", ["t", "b"], ["y"]),
    ]
    proto = model(nodes, held, ["n", 64, places, places], "y")
    proto.graph.initializer.append(numpy_helper.from_array(np.array([0, 32, -1]), "groups"))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([0, 64, places, places]), "image"))
    _, summary = checked(proto, (2, 64, places, places))
    assert [f.certificate.cases for f in summary.findings if f.certificate] == [1152]


def test_equal_lengths_are_other_templates_than_different_ones(proved: dict[str, int]) -> None:
    """16 to 16 channels: what holds there may be a matter of both being one."""
    checked(convolutions([9, 16, 16, 24, 24, 40]), (2, 9, 12, 12))
    assert proved == {"any": 2, "own": 0}


def test_a_kernel_has_no_length_that_may_be_any(proved: dict[str, int]) -> None:
    rng = np.random.default_rng(0)
    held = [("w", rng.standard_normal((16, 1, 9, 9)) / 9)] + [(name, rng.uniform(0.5, 1.5, 16)) for name in "gbmv"]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], group=16),
        helper.make_node("BatchNormalization", ["c", *"gbmv"], ["y"]),
    ]
    out, _ = checked(model(nodes, held, ["n", 16, 20, 20], "y"), (2, 16, 20, 20))
    assert [n.op_type for n in out.graph.node] == ["Conv"]


def layer_norms(widths: Sequence[int], counts: Sequence[int], ddof: int = 0) -> onnx.ModelProto:
    """Layer norms that add up and multiply by 1/count, a MatMul to the next width between."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    held: Held = [("e", np.float32([1e-5]))]
    at = "x"
    for i, (width, count) in enumerate(zip(widths, counts, strict=True)):
        p = f"n{i}_"
        held += [(p + "c", np.float32(1 / count)), (p + "d", np.float32(1 / (count - ddof)))]
        held += [(p + "g", rng.uniform(0.5, 1.5, width)), (p + "b", rng.standard_normal(width))]
        nodes += [
            helper.make_node("ReduceSum", [at, "last"], [p + "s"]),
            helper.make_node("Mul", [p + "s", p + "c"], [p + "u"]),
            helper.make_node("Sub", [at, p + "u"], [p + "z"]),
            helper.make_node("Mul", [p + "z", p + "z"], [p + "q"]),
            helper.make_node("ReduceSum", [p + "q", "last"], [p + "t"]),
            helper.make_node("Mul", [p + "t", p + "d"], [p + "v"]),
            helper.make_node("Add", [p + "v", "e"], [p + "w"]),
            helper.make_node("Sqrt", [p + "w"], [p + "r"]),
            helper.make_node("Div", [p + "z", p + "r"], [p + "h"]),
            helper.make_node("Mul", [p + "h", p + "g"], [p + "m"]),
            helper.make_node("Add", [p + "m", p + "b"], [at := p + "y"]),
        ]
        if i + 1 < len(widths):
            held.append((p + "k", rng.standard_normal((width, widths[i + 1]))))
            nodes += [
                helper.make_node("Relu", [at], [p + "a"]),
                helper.make_node("MatMul", [p + "a", p + "k"], [at := p + "o"]),
            ]
    made = model(nodes, held, ["n", widths[0]], at)
    made.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "last"))
    return made


def test_a_count_that_stands_in_the_graph_is_that_of_its_own_length_alone() -> None:
    right, wrong = layer_norms([16, 32, 64], [16, 32, 64]), layer_norms([16, 32, 64], [16, 16, 64])
    assert sum(n.op_type == "LayerNormalization" for n in checked(right, (7, 16))[0].graph.node) == 3
    assert sum(n.op_type == "LayerNormalization" for n in checked(wrong, (7, 16))[0].graph.node) == 2


def test_parameters_that_depend_on_a_length_are_those_of_each(proved: dict[str, int]) -> None:
    """γ·√((n−1)/n) of an unbiased variance: no proof for any length may hand on the first one's."""
    out, _ = checked(layer_norms([16, 32, 64], [16, 32, 64], ddof=1), (7, 16))
    assert sum(n.op_type == "LayerNormalization" for n in out.graph.node) == 3
    assert proved["own"] == 3
    assert proved["any"] == 0


def test_without_such_lengths_the_own_ones_are_asked(proved: dict[str, int]) -> None:
    """An unbiased variance over an open axis divides by its length less one: nothing is proved of that for any
    length."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["u"], axes=[-1]),
        helper.make_node("Sub", ["x", "u"], ["d"]),
        helper.make_node("Mul", ["d", "d"], ["q"]),
        helper.make_node("ReduceSum", ["q", "last"], ["s"]),
        helper.make_node("Shape", ["x"], ["n"], start=1, end=2),
        helper.make_node("Cast", ["n"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["f", "one"], ["m"]),
        helper.make_node("Div", ["s", "m"], ["v"]),
        helper.make_node("Add", ["v", "e"], ["w"]),
        helper.make_node("Sqrt", ["w"], ["r"]),
        helper.make_node("Div", ["d", "r"], ["y"]),
    ]
    proto = model(nodes, [("one", np.float32([1])), ("e", np.float32([1e-5]))], [5, "n"], "y")
    proto.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "last"))
    _, summary = optimize_norms(proto, fuse="portable")
    assert [f.status for f in summary.findings] == ["fused"], summary.findings
    assert proved == {"any": 0, "own": 1}
