"""A call whose tensors bear names of the function's inputs: the network that TensorRT-RTX's parser makes, and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import normdeploy
from normdeploy.engines.parser_input import implement_requested_norms

OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("my", 1)]


def net(given: tuple[str, str] = ("a", "X"), nested: bool = False) -> onnx.ModelProto:
    """Relu(in1) − Sigmoid(in2) by a function of the inputs X and R, as (X, X_given, R) would be; ``nested``: called in
    another function's If."""
    node = helper.make_node
    function = helper.make_function("my", "F", ["X", "R"], ["Y"], [node("Sub", ["X", "R"], ["Y"])], OPSETS)
    functions, call = [function], node("F", list(given), ["out"], domain="my", name="call")
    if nested:
        branches = [
            helper.make_graph(
                [node("F", ["p", "X"], [o], domain="my")], o, [], [helper.make_empty_tensor_value_info(o)]
            )
            for o in ("then", "else")
        ]
        body = [
            node("Identity", ["q"], ["X"]),
            node("Constant", [], ["one"], value=helper.make_tensor("one", TensorProto.BOOL, [], [True])),
            node("If", ["one"], ["Y"], then_branch=branches[0], else_branch=branches[1]),
        ]
        functions.append(helper.make_function("my", "G", ["p", "q"], ["Y"], body, OPSETS))
        call = node("G", ["a", "b"], ["out"], domain="my", name="call")
    second = "b" if nested else given[1]
    nodes = [node("Relu", ["in1"], ["a"]), node("Sigmoid", ["in2"], [second]), call]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in ("in1", "in2", "out")]
    graph = helper.make_graph(nodes, "g", ends[:2], ends[2:])
    return helper.make_model(graph, functions=functions, opset_imports=OPSETS, ir_version=10)


def subtracted(proto: onnx.ModelProto) -> list[list[str]]:
    """By which layers the two inputs of each subtraction in the parser's network are made."""
    trt = pytest.importorskip("tensorrt_rtx")
    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network(0)
    assert trt.OnnxParser(network, logger).parse(proto.SerializeToString())
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    makers = {layer.get_output(k).name: layer.type.name for layer in layers for k in range(layer.num_outputs)}
    kinds = {layer.get_output(0).name: _activation(trt, layer) for layer in layers if layer.type.name == "ACTIVATION"}
    return [
        [(kinds | {n: m for n, m in makers.items() if n not in kinds})[layer.get_input(k).name] for k in range(2)]
        for layer in layers
        if layer.type.name == "ELEMENTWISE"
    ]


def _activation(trt: Any, layer: Any) -> str:
    layer.__class__ = trt.IActivationLayer
    return str(layer.type).rpartition(".")[2]


def read(path: Path) -> onnx.ModelProto:
    """What the parser is given when the file is built."""
    proto = onnx.load(path)
    changed, _ = implement_requested_norms(path, proto, "native", "tensorrt-rtx", "", {}, None)
    return changed or proto


def test_the_parser_itself_subtracts_a_tensor_from_itself() -> None:
    """TensorRT-RTX 1.7. Where this fails it has learnt it, and `apart_from` may go."""
    assert subtracted(net(("a", "b"))) == [["RELU", "SIGMOID"]]
    assert subtracted(net()) == [["RELU", "RELU"]]


@pytest.mark.parametrize("nested", [False, True])
def test_build_gives_the_function_what_the_call_gives(nested: bool, tmp_path: Path) -> None:
    onnx.save(net(nested=nested), tmp_path / "in.onnx")
    made = read(tmp_path / "in.onnx")
    onnx.checker.check_model(made)
    assert onnx.load(tmp_path / "in.onnx") == net(nested=nested)  # the user's file stays
    if not nested:
        assert subtracted(made) == [["RELU", "SIGMOID"]]
        assert normdeploy.build(tmp_path / "in.onnx", tmp_path / "x.engine", compute_capabilities=["8.9"])
    x, y = np.random.default_rng(0).standard_normal((2, 2, 3)).astype(np.float32)
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    right = np.maximum(x, 0) - 1 / (1 + np.exp(-y))
    np.testing.assert_allclose(session.run(None, {"in1": x, "in2": y})[0], right, rtol=0, atol=2.0**-22)
    inner = made.functions[0]
    assert not set(inner.input) & {"a", "X", "p"}


def test_a_file_without_such_a_call_is_built_as_it_is(tmp_path: Path) -> None:
    onnx.save(net(("a", "b")), tmp_path / "in.onnx")
    assert (
        implement_requested_norms(tmp_path / "in.onnx", net(("a", "b")), "native", "tensorrt-rtx", "", {}, None)[0]
        is None
    )


def test_check_names_it_for_tensorrt_alone(tmp_path: Path) -> None:
    onnx.save(net(), tmp_path / "in.onnx")
    for runtime, rules in (
        ("tensorrt-rtx", ["misbound"]),
        ("tensorrt", ["misbound"]),
        ("any", []),
        ("onnxruntime", []),
    ):
        (file,) = normdeploy.check(tmp_path / "in.onnx", fail_on="all", runtime=runtime).files
        assert [p.rule for p in file.findings] == rules
    (file,) = normdeploy.check(tmp_path / "in.onnx", runtime="tensorrt-rtx").files
    assert (
        "F is called with 'X', which is also the name of an input of its function my.F(X, R)"
        in file.findings[0].message
    )
