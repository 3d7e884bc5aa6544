"""A wrong output that holds integers or bools: the fault before it is named, and once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper, numpy_helper

import normdeploy
from normdeploy.verbs.bisect.fault_tracing import Fault

HEAD = '<ir_version: 9, opset_import: ["" : 18]> net (float[n, 16] x) => '
LABEL = "(int64[n] y) { [dense] h = MatMul (x, A) [bent] r = Relu (h) [label] y = ArgMax <axis = 1, keepdims = 0> (r) }"
ABOVE = "(bool[n, 16] y) <float limit = {0.5}> { [dense] h = MatMul (x, A) [above] y = Greater (h, limit) }"
BEST = "(int64[n, 3] y) <int64[1] k = {3}> { [dense] h = MatMul (x, A) [best] v, y = TopK (h, k) }"
ENDS = "(float[n, 3] v, int64[n, 3] y) <int64[1] k = {3}> { [dense] h = Sin (x) [best] v, y = TopK (h, k) }"
FORK = """(float[n, 16] y)
{ [dense] h = MatMul (x, A) [bent] r = Relu (h) [one] a = Tanh (r) [two] b = Exp (r) [both] y = Mul (a, b) }"""


def model_of(body: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEAD + body)
    if "A" in {name for node in model.graph.node for name in node.input}:
        weight = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32) / 4
        model.graph.initializer.append(numpy_helper.from_array(weight, "A"))
    return model


def node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(n for n in model.graph.node if n.name == name)


def only_fault(right: onnx.ModelProto, wrong: onnx.ModelProto, folder: Path) -> Fault:
    onnx.save(wrong, folder / "wrong.onnx")
    found = normdeploy.bisect(right, folder / "wrong.onnx")
    assert found.notes == ()
    (fault,) = found.faults
    assert fault.mended
    return fault


@pytest.mark.parametrize("body", [LABEL, ABOVE, BEST], ids=["label", "bools", "indices"])
def test_weight_that_only_integers_show_is_the_fault(body: str, tmp_path: Path) -> None:
    wrong = model_of(body)
    weight = numpy_helper.to_array(wrong.graph.initializer[-1]).copy()
    weight[:, 3] *= 1.2
    wrong.graph.initializer[-1].CopyFrom(numpy_helper.from_array(weight, "A"))
    fault = only_fault(model_of(body), wrong, tmp_path)
    assert (fault.kind, fault.nodes, fault.wrong) == ("weights", ("MatMul dense",), "file")
    assert "16 of 256 numbers differ" in fault.cause


def test_activation_before_a_label_is_the_fault(tmp_path: Path) -> None:
    wrong = model_of(LABEL)
    node(wrong, "bent").op_type = "Abs"
    fault = only_fault(model_of(LABEL), wrong, tmp_path)
    assert (fault.kind, fault.nodes) == ("operator", ("Abs bent",))
    assert fault.cause == "Abs 'bent', but the model has Relu"


def test_node_of_two_wrong_results_is_one_fault(tmp_path: Path) -> None:
    wrong = model_of(ENDS)
    node(wrong, "best").attribute.append(helper.make_attribute("largest", 0))
    fault = only_fault(model_of(ENDS), wrong, tmp_path)
    assert (fault.kind, fault.nodes) == ("attribute", ("TopK best",))
    assert fault.cause == "TopK 'best' has largest 0 (model: 1)"


def test_operator_in_front_of_two_readers_is_one_fault(tmp_path: Path) -> None:
    wrong = model_of(FORK)
    node(wrong, "bent").op_type = "LeakyRelu"
    fault = only_fault(model_of(FORK), wrong, tmp_path)
    assert (fault.kind, fault.nodes) == ("operator", ("LeakyRelu bent",))
    assert fault.cause == "LeakyRelu 'bent', but the model has Relu"


def scaled(offset: list[float]) -> onnx.ModelProto:
    """Return the label of inputs that are shifted and scaled first, as converters of scikit-learn write it."""
    model = model_of(LABEL)
    scaler = helper.make_node(
        "Scaler", ["x"], ["shifted"], "scaler", domain="ai.onnx.ml", offset=offset, scale=[1.5] * len(offset)
    )
    node(model, "dense").input[0] = "shifted"
    model.graph.node.insert(0, scaler)
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    return model


def test_entry_of_a_long_attribute_is_told_by_its_place(tmp_path: Path) -> None:
    offset = [i / 10 for i in range(16)]
    fault = only_fault(scaled(offset), scaled([*offset[:5], 9.0, *offset[6:]]), tmp_path)
    assert (fault.kind, fault.nodes) == ("attribute", ("Scaler scaler",))
    assert fault.cause == "Scaler 'scaler' has offset[5] 9 (model: 0.5)"


def test_attribute_that_differs_in_all_entries_is_told_by_the_first(tmp_path: Path) -> None:
    offset = [i / 10 + 0.5 for i in range(16)]
    fault = only_fault(scaled(offset), scaled([0.0] * 16), tmp_path)
    assert fault.cause.startswith("Scaler 'scaler' has offset[0] 0 (model: 0.5), offset[1] 0")
    assert fault.cause.endswith("(16 of 16 entries differ)")
