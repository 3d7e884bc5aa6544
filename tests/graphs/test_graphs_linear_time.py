"""Work that grows with a file grows no faster than the file: counted, not timed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from normdeploy import optimize
from normdeploy.evaluate import evaluation_budget, evaluator
from normdeploy.graphs import file_graph
from normdeploy.graphs.graph import Graph
from normdeploy.graphs.local_functions import open_functions
from normdeploy.graphs.shape_inference import infer_types
from tests.work import count_calls

NORM = (  # op, inputs, output
    "ReduceMean x axes m, Sub x m c, Mul c c s, ReduceMean s axes v, Add v eps e, Sqrt e r, Div c r y"
)


def model(nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    held = {
        "axes": np.array([-1]),
        "eps": np.float32(1e-5),
        "zero": np.float32(0),
        "w": np.linspace(0.5, 1.5, 8, dtype=np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 8])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def norm(start: str) -> list[onnx.NodeProto]:
    nodes = []
    for step in NORM.split(", "):
        op, *inputs, output = step.split()
        nodes.append(helper.make_node(op, [start if i == "x" else i for i in inputs], [output]))
    return nodes


def scales(n: int) -> onnx.ModelProto:
    """Each step multiplies by another link of a chain of constants."""
    nodes, x, k = [], "x", "w"
    for i in range(n):
        nodes += [helper.make_node("Add", [k, "zero"], [f"k{i}"]), helper.make_node("Mul", [x, f"k{i}"], [f"p{i}"])]
        x, k = f"p{i}", f"k{i}"
    return model([*nodes, *norm(x)])


def fan(n: int) -> onnx.ModelProto:
    """One Sum of as many branches as there are."""
    branches = [helper.make_node("Neg", ["x"], [f"k{i}"]) for i in range(n)]
    return model([*branches, helper.make_node("Sum", [b.output[0] for b in branches], ["sum"]), *norm("sum")])


def test_four_times_the_branches_are_four_times_the_work() -> None:
    optimize(fan(2))  # imports
    small = count_calls(lambda: optimize(fan(100)))
    large = count_calls(lambda: optimize(fan(400)))
    assert large < 5 * small


def test_each_link_of_a_chain_of_constants_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: Counter[str] = Counter()
    apply = file_graph.FileGraph.evaluate_node

    def count(graph: file_graph.FileGraph, node: Any, inputs: Any) -> Any:
        computed[node.outputs[0].name] += 1
        return apply(graph, node, inputs)

    monkeypatch.setattr(file_graph.FileGraph, "evaluate_node", count)
    optimize(scales(60))
    assert computed["k59"] == 1
    assert max(computed.values()) == 1


def test_constants_that_take_too_long_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_budget, "IN_ALL", 40 * evaluation_budget.A_NODE)
    optimize(scales(100))
    proto = model(
        [helper.make_node("Add", ["w", "zero"], ["k0"]), helper.make_node("Mul", ["x", "k0"], ["p"]), *norm("p")]
    )
    monkeypatch.setattr(evaluation_budget, "IN_ALL", 0)
    graph = Graph(proto)
    (k,) = (t for n in graph.nodes for t in n.outputs if t.name == "k0")
    assert graph.is_constant(k)
    assert graph.known_value(k) is None
    with pytest.raises(evaluator.UnsupportedOp, match="more than 0 steps"):
        graph.value(k)
    monkeypatch.setattr(evaluation_budget, "IN_ALL", 2**32)
    monkeypatch.setattr(evaluation_budget, "AT_ONCE", 7)
    with pytest.raises(evaluator.UnsupportedOp, match="8 elements; the limit is 7"):
        Graph(proto).value(next(t for n in graph.nodes for t in n.outputs if t.name == "k0"))


def test_a_function_as_a_model_holds_the_functions_that_it_calls() -> None:
    proto = model([helper.make_node("f0", ["x"], ["a"], domain="c"), helper.make_node("f2", ["a"], ["y"], domain="c")])
    proto.opset_import.add(domain="c", version=1)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("c", 1)]
    for name, called in (("f0", ("f1", "c")), ("f1", ("Neg", "")), ("f2", ("Neg", ""))):
        node = helper.make_node(called[0], ["a"], ["b"], domain=called[1])
        proto.functions.append(helper.make_function("c", name, ["a"], ["b"], [node], opsets))
    held = {nested.place: [f.name for f in nested.model.functions] for nested in open_functions(proto)}
    assert held == {"function c.f0": ["f1"], "function c.f1": [], "function c.f2": []}


@pytest.mark.parametrize(("length", "values"), [(8, True), (2**26, False)])
def test_inference_writes_out_no_long_vectors(monkeypatch: pytest.MonkeyPatch, length: int, values: bool) -> None:
    """With data_prop it notes each element of a vector, of floats too: 10 GB for two additions of 2**26."""
    proto = model(
        [helper.make_node("ConstantOfShape", ["length"], ["v"]), helper.make_node("Add", ["v", "eps"], ["y"])]
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.array([length]), "length"))
    asked = []
    infer = onnx.shape_inference.infer_shapes

    def spy(model: onnx.ModelProto, data_prop: bool = False) -> onnx.ModelProto:
        asked.append(data_prop)
        return infer(model, data_prop=data_prop and length < 2**20)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", spy)
    assert infer_types(proto)["v"][1] == (length,)
    assert asked[-1] is values
