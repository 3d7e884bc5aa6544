"""An ONNX file is what another is compared with: names come from its nodes, and no PyTorch model is at hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app

TEXT = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[batch, 6] x) => (float[batch, 6] y)
<float[6, 6] weight, float[6] gamma, float[6] beta>
{
    [product] hidden = MatMul(x, weight)
    [norm] normed = LayerNormalization <axis: int = -1, epsilon: float = 0.001> (hidden, gamma, beta)
    [shares] y = Softmax <axis: int = -1> (normed)
}
"""
BODY = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[batch, 6] x) => (float[batch, 6] y)
<float[1] zero = {0}>
{
    [total] sum = ReduceSum <keepdims: int = 0> (x)
    [sign] positive = Greater(sum, zero)
    [which] only = Squeeze(positive)
    [branch] mixed = If (only) <
        then_branch = then_graph () => (float[b, 6] then_out) { [inner] then_out = Tanh(x) },
        else_branch = else_graph () => (float[b, 6] else_out) { [other] else_out = Sigmoid(x) }
    >
    [root] y = Exp(mixed)
}
"""
Plant = Callable[[onnx.GraphProto], None]


def right() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(TEXT)
    del model.graph.initializer[:]
    shapes = {"weight": (6, 6), "gamma": (6,), "beta": (6,)}
    tensors = ((name, rng.normal(1, 0.5, shape).astype(np.float32)) for name, shape in shapes.items())
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in tensors)
    return model


def node(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    return next(n for n in graph.node if n.name == name)


def epsilon(graph: onnx.GraphProto) -> None:
    next(a for a in node(graph, "norm").attribute if a.name == "epsilon").f = 0.01


def axis(graph: onnx.GraphProto) -> None:
    node(graph, "shares").attribute[0].i = 0


def weight(graph: onnx.GraphProto) -> None:
    value = numpy_helper.to_array(graph.initializer[0]).copy()
    value[1, 2] *= 1.001
    graph.initializer[0].CopyFrom(numpy_helper.from_array(value, "weight"))


def transposed(graph: onnx.GraphProto) -> None:
    value = np.ascontiguousarray(numpy_helper.to_array(graph.initializer[0]).T)
    graph.initializer[0].CopyFrom(numpy_helper.from_array(value, "weight"))


def factor(graph: onnx.GraphProto) -> None:
    graph.initializer.append(numpy_helper.from_array(np.float32([1.01]), "more"))
    node(graph, "norm").output[0] = "before"
    graph.node.insert(2, onnx.helper.make_node("Mul", ["before", "more"], ["normed"], "planted"))


def precision(graph: onnx.GraphProto) -> None:
    node(graph, "norm").output[0] = "before"
    low = onnx.helper.make_node("Cast", ["before"], ["low"], "planted", to=onnx.TensorProto.FLOAT16)
    back = onnx.helper.make_node("Cast", ["low"], ["normed"], "back", to=onnx.TensorProto.FLOAT)
    for place, added in enumerate((low, back)):
        graph.node.insert(2 + place, added)


def saved(model: onnx.ModelProto, path: Path, plant: Plant | None = None) -> Path:
    if plant is not None:
        plant(model.graph)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("plant", "kind", "named"),
    [
        (epsilon, "epsilon", "LayerNormalization norm"),
        (axis, "axis", "Softmax shares"),
        (weight, "weights", "MatMul product"),
        (transposed, "weights", "MatMul product"),
        (factor, "added", "Mul planted"),
        (precision, "precision", "Cast planted"),
    ],
)
def test_a_fault_beside_a_file_is_named_with_its_kind(plant: Plant, kind: str, named: str, tmp_path: Path) -> None:
    reference = saved(right(), tmp_path / "right.onnx")
    (fault,) = normdeploy.bisect(reference, saved(right(), tmp_path / "wrong.onnx", plant), seeds=1).faults
    assert (fault.kind, fault.nodes[0], fault.mended) == (kind, named, True)


def test_a_right_file_beside_a_file_has_no_fault(tmp_path: Path) -> None:
    reference = saved(right(), tmp_path / "right.onnx")
    found = normdeploy.bisect(reference, saved(right(), tmp_path / "same.onnx"), seeds=1)
    assert found
    assert not found.faults


HALF = """
<ir_version: 10, opset_import: ["" : 20]>
net (float16[length, batch, 6] x) => (float16[1, batch, 3] y)
<float16[1] factor, float16[1, 12, 6] w, float16[1, 12, 3] r>
{
    [scaled] twice = Mul(x, factor)
    [gates] all, last = LSTM <hidden_size: int = 3> (twice, w, r)
    [shares] y = Softmax <axis: int = -1> (last)
}
"""


def test_a_half_reference_with_an_op_that_only_a_runtime_knows_is_searched(tmp_path: Path) -> None:
    """LSTM has no float64 form and runs alone in its own type, which a tensor that is looked at must not hide."""
    models = onnx.parser.parse_model(HALF), onnx.parser.parse_model(HALF)
    rng = np.random.default_rng(0)
    values = {"factor": np.full(1, 2.0), "w": rng.standard_normal((1, 12, 6)), "r": rng.standard_normal((1, 12, 3))}
    for model in models:
        del model.graph.initializer[:]
        model.graph.initializer.extend(numpy_helper.from_array(v.astype(np.float16), k) for k, v in values.items())
    # As exporters write them: with the types of all tensors.
    models = tuple(map(onnx.shape_inference.infer_shapes, models))
    reference = saved(models[0], tmp_path / "right.onnx")
    wrong = saved(models[1], tmp_path / "wrong.onnx", axis)
    (fault,) = normdeploy.bisect(reference, wrong, seeds=1).faults
    assert (fault.kind, fault.nodes) == ("axis", ("Softmax shares",))


def test_a_reference_in_memory_is_a_file_too(tmp_path: Path) -> None:
    (fault,) = normdeploy.bisect(right(), saved(right(), tmp_path / "wrong.onnx", epsilon), seeds=1).faults
    assert "epsilon 0.01, but the model has 0.001" in fault.cause


def test_a_body_that_is_wrong_is_named_by_its_node(tmp_path: Path) -> None:
    reference = saved(onnx.parser.parse_model(BODY), tmp_path / "right.onnx")

    def plant(graph: onnx.GraphProto) -> None:
        body = node(graph, "branch").attribute[0].g
        body.node[0].op_type = "Sin"

    wrong = saved(onnx.parser.parse_model(BODY), tmp_path / "wrong.onnx", plant)
    (fault,) = normdeploy.bisect(reference, wrong, seeds=1, inputs=["x:float32[batch,6]{0.5:1}"]).faults
    assert fault.nodes == ("If branch",)
    assert fault.kind == "body"
    assert "Sin 'inner' in a body of If 'branch'" in fault.cause


def test_rules_that_pass_leave_nothing_to_find(tmp_path: Path) -> None:
    files = saved(right(), tmp_path / "right.onnx"), saved(right(), tmp_path / "wrong.onnx", epsilon)
    assert normdeploy.bisect(*files, seeds=1, tolerance="0.1:0")
    assert not normdeploy.bisect(*files, seeds=1, tolerance="1e-6:0")


def test_the_command_takes_two_files(tmp_path: Path) -> None:
    reference = saved(right(), tmp_path / "right.onnx")
    wrong = saved(right(), tmp_path / "wrong.onnx", epsilon)
    result = CliRunner().invoke(app, ["bisect", str(reference), str(wrong), "--seeds", "1", "--dim", "batch=1:2:4"])
    assert result.exit_code == 1
    assert "LayerNormalization norm" in result.output


CALLS = """
<ir_version: 10, opset_import: ["" : 20, "own" : 1]>
net (float[batch, 6] x) => (float[batch, 6] y)
<float[6] gamma>
{
    [first] h = own.block (x, gamma)
    [last] y = own.block (h, gamma)
}
<domain: "own", opset_import: ["" : 20]>
block (a, g) => (b)
{
    [scale] scaled = Mul (a, g)
    [bend] b = Tanh (scaled)
}
"""


def test_nodes_of_functions_are_looked_at(tmp_path: Path) -> None:
    models = onnx.parser.parse_model(CALLS), onnx.parser.parse_model(CALLS)
    for model, size in zip(models, (1.0, 1.5), strict=True):
        del model.graph.initializer[:]
        gamma = np.linspace(0.5, 1, 6, dtype=np.float32)
        gamma[2] *= size
        model.graph.initializer.append(numpy_helper.from_array(gamma, "gamma"))
    paths = [saved(model, tmp_path / f"{place}.onnx") for place, model in enumerate(models)]
    fault, *_ = normdeploy.bisect(*paths, seeds=1).faults
    assert fault.kind == "weights"
    assert "'gamma' differs from the model's" in fault.cause


SCAN = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[batch, 6] x) => (float[6] y, float[batch, 6] z)
<float[6] factor, int64[1] first = {0}>
{
    [begin] start = ReduceMax <keepdims: int = 0> (x, first)
    [rows] y, z = Scan <num_scan_inputs: int = 1, body = each (float[6] s, float[6] row) =>
        (float[6] next, float[6] out) { next = Add (s, row)  out = Mul (next, factor) }> (start, x)
}
"""


def test_a_node_of_several_outputs_is_searched(tmp_path: Path) -> None:
    """A trial puts another node in its place, which writes the first output alone."""
    models = onnx.parser.parse_model(SCAN), onnx.parser.parse_model(SCAN)
    for model, size in zip(models, (1.0, 1.001), strict=True):
        factor = (np.linspace(0.5, 1, 6) * size).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(factor, "factor"))
    paths = [saved(model, tmp_path / f"{place}.onnx") for place, model in enumerate(models)]
    (fault,) = normdeploy.bisect(*paths, seeds=1).faults
    assert fault.nodes == ("Scan rows",)
    assert "'factor' differs from the model's" in fault.cause


GRU = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[length, batch, 6] x) => (float[length, 1, batch, 3] y)
<float[1, 9, 6] w, float[1, 9, 3] r>
{
    [gates] y = GRU <hidden_size: int = 3> (x, w, r)
}
"""


def test_weights_of_another_size_are_no_initial_state(tmp_path: Path) -> None:
    models = onnx.parser.parse_model(GRU), onnx.parser.parse_model(GRU)
    for model, size in zip(models, (1.0, 1.01), strict=True):
        rng = np.random.default_rng(0)
        del model.graph.initializer[:]
        w, r = (rng.standard_normal((1, 9, n)).astype(np.float32) for n in (6, 3))
        w[0, 1, 2] *= size
        model.graph.initializer.extend([numpy_helper.from_array(w, "w"), numpy_helper.from_array(r, "r")])
    paths = [saved(model, tmp_path / f"{place}.onnx") for place, model in enumerate(models)]
    (fault,) = normdeploy.bisect(*paths, seeds=1).faults
    assert fault.nodes == ("GRU gates",)
    assert "'w' differs from the model's" in fault.cause
