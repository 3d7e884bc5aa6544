"""Faults whose values mislead: a spot is explained where it is, or by what is wider."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import normdeploy
from normdeploy.verbs.bisect.fault_tracing import Fault

SHUFFLE = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[batch, 4, 3, 3] x) => (float[batch, 8, 3, 3] y)
<int64[5] split = {-1, 2, 4, 3, 3}, int64[4] joined = {-1, 8, 3, 3}>
{
    [lower] bent = Tanh(x)
    [both] pair = Concat <axis: int = 1> (x, bent)
    [halves] parts = Reshape(pair, split)
    [turned] mixed = Transpose <perm: ints = [0, 2, 1, 3, 4]> (parts)
    [back] y = Reshape(mixed, joined)
}
"""
LOOP = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[batch, 4] x) => (float[batch, 4] y)
<int64 rounds = {3}, bool go = {1}, float[4] shift>
{
    [steps] last = Loop (rounds, go, x) <
        body = step (int64 i, bool before, float[batch, 4] state) => (bool after, float[batch, 4] next) {
            after = Identity(before)
            [moved] sum = Add(state, shift)
            [bent] next = Tanh(sum)
        }
    >
    [root] y = Exp(last)
}
"""


def model_of(text: str, **weights: object) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text)
    kept = [t for t in model.graph.initializer if t.name not in weights]
    del model.graph.initializer[:]
    own = [numpy_helper.from_array(np.float32(value), name) for name, value in weights.items()]
    model.graph.initializer.extend([*kept, *own])
    return model


def only_fault(reference: object, model: onnx.ModelProto, folder: Path, *args: object) -> Fault:
    path = folder / "wrong.onnx"
    onnx.save(model, path)
    (fault,) = normdeploy.bisect(reference, path, *([args] if args else []), seeds=1).faults
    return fault


def node(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    return next(n for n in graph.node if n.name == name)


def test_concat_on_the_axis_that_shuffles_is_named_and_not_the_shuffle(tmp_path: Path) -> None:
    """On another axis Concat gives in memory what the model has a Transpose later."""
    wrong = model_of(SHUFFLE)
    node(wrong.graph, "both").attribute[0].i = 2
    fault = only_fault(model_of(SHUFFLE), wrong, tmp_path)
    assert (fault.kind, fault.nodes) == ("axis", ("Concat both",))


def test_inputs_of_concat_exchanged_are_an_order(tmp_path: Path) -> None:
    wrong = model_of(SHUFFLE)
    node(wrong.graph, "both").input[:] = ["bent", "x"]
    fault = only_fault(model_of(SHUFFLE), wrong, tmp_path)
    assert (fault.kind, fault.nodes) == ("order", ("Concat both",))
    assert "reads 'bent', 'x'; in the order 'x', 'bent' the result is correct" in fault.cause


def test_weight_that_a_body_sees_around_it_is_named(tmp_path: Path) -> None:
    right, wrong = (model_of(LOOP, shift=[0.5, last, 0.25, -1]) for last in (0.25, 0.3))
    fault = only_fault(right, wrong, tmp_path)
    assert (fault.kind, fault.nodes) == ("weights", ("Loop steps",))
    assert "'shift' differs from the model's: 0.3, but the model has 0.25" in fault.cause


def test_node_that_a_body_has_too_many_is_named(tmp_path: Path) -> None:
    wrong = model_of(LOOP, shift=[0.5, 0.25, 0.25, -1])
    body = next(a.g for a in node(wrong.graph, "steps").attribute if a.name == "body")
    body.node[1].output[0] = "early"
    body.node.insert(2, onnx.helper.make_node("Sin", ["early"], ["sum"], "planted"))
    fault = only_fault(model_of(LOOP, shift=[0.5, 0.25, 0.25, -1]), wrong, tmp_path)
    assert (fault.kind, fault.nodes) == ("body", ("Loop steps",))
    assert "Sin 'planted' in a body of Loop 'steps' differs from the model" in fault.cause


def test_exchanged_rows_of_a_packed_projection_are_its_weight(tmp_path: Path) -> None:
    """Queries and values in each other's place meet each other's counterparts."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 4)).eval()
    args = (torch.randn(2, 5, 4),)
    wrong = normdeploy.export(model, args).proto
    packed = next(t for t in wrong.graph.initializer if sorted(t.dims) == [8, 24])
    value = numpy_helper.to_array(packed)
    rows = value if value.shape[0] == 24 else value.T
    moved = np.concatenate([rows[16:], rows[8:16], rows[:8]])
    moved = np.ascontiguousarray(moved if value.shape[0] == 24 else moved.T)
    packed.CopyFrom(numpy_helper.from_array(moved, packed.name))
    fault = only_fault(model, wrong, tmp_path, *args)
    assert fault.kind == "weights"
    assert "differs from '1.self_attn.in_proj_weight'" in fault.cause


BATCH_STATISTICS = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[2, 3, 5, 5] x) => (float[2, 3, 5, 5] y)
<int64[3] axes = {0, 2, 3}, float[1] epsilon = {1e-5}, float[3, 1, 1] gamma, float[3, 1, 1] beta>
{
    mean = ReduceMean(x, axes)
    centered = Sub(x, mean)
    square = Mul(centered, centered)
    variance = ReduceMean(square, axes)
    sum = Add(variance, epsilon)
    root = Sqrt(sum)
    whitened = Div(centered, root)
    scaled = Mul(whitened, gamma)
    y = Add(scaled, beta)
}
"""


def test_batch_statistics_written_out_are_training_mode(tmp_path: Path) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3)
    norm(torch.randn(4, 3, 5, 5) * 3 + 1)
    norm.eval()
    columns = {"gamma": norm.weight, "beta": norm.bias}
    own = {name: value.detach().numpy().reshape(3, 1, 1) for name, value in columns.items()}
    fault = only_fault(norm, model_of(BATCH_STATISTICS, **own), tmp_path, torch.randn(2, 3, 5, 5))
    assert fault.kind == "training mode"
    assert "the model's stored 'running_mean' and 'running_var'" in fault.cause


NORMALIZED = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[2, 3, 5, 5] x) => (float[2, 3, 5, 5] y)
<float[3, 1, 1] mu, float[3, 1, 1] sd>
{
    [centered] c = Sub(x, mu)
    [scaled] s = Div(c, sd)
    [bent] y = Tanh(s)
}
"""


def test_mean_and_deviation_of_reversed_channels_are_said_to_be(tmp_path: Path) -> None:
    mean, deviation = np.reshape([0.485, 0.456, 0.406], (3, 1, 1)), np.reshape([0.229, 0.224, 0.225], (3, 1, 1))
    right = model_of(NORMALIZED, mu=mean, sd=deviation)
    # Of other names, so that no tensor between the two nodes is known.
    renamed = NORMALIZED.replace(" c ", " d ").replace("(c,", "(d,").replace(" s ", " t ").replace("(s)", "(t)")
    fault = only_fault(right, model_of(renamed, mu=mean[::-1], sd=deviation[::-1]), tmp_path)
    assert (fault.kind, fault.nodes) == ("weights", ("Sub centered",))
    assert "'mu' is 'mu' with its channels reversed; 'sd' is 'sd' with its channels reversed" in fault.cause


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = nn.functional.linear(x, self.gate)
        return gate * torch.sigmoid(gate) * nn.functional.linear(x, self.up)


GATED = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[2, 4] x) => (float[2, 3] y)
<float[4, 3] one, float[4, 3] other>
{
    [asked] a = MatMul(x, one)
    [open] s = Sigmoid(a)
    [silu] f = Mul(a, s)
    [carried] u = MatMul(x, other)
    [joined] y = Mul(f, u)
}
"""


def test_two_weights_in_each_others_place_are_named(tmp_path: Path) -> None:
    """Each is a weight of the model, so only both together are wrong."""
    model = Gated().eval()
    gate, up = (weight.detach().numpy().T for weight in (model.gate, model.up))
    fault = only_fault(model, model_of(GATED, one=up, other=gate), tmp_path, torch.randn(2, 4))
    assert fault.kind == "weights"
    assert "'one' and 'other' are exchanged" in fault.cause


LEAKY = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[batch, 6] x) => (float[batch, 6] y)
<float half = {0.3}>
{
    [bent] b = LeakyRelu <alpha: float = 0.2> (x)
    [scaled] s = Mul(b, half)
    [root] y = Exp(s)
}
"""


@pytest.mark.parametrize(
    ("own", "other", "kind", "node_name", "text"),
    [
        ("0.2", "0.05", "attribute", "LeakyRelu bent", "alpha 0.05 (model: 0.2)"),
        ("{0.3}", "{0.7}", "number", "Mul scaled", "'half' 0.7; with 0.3 the result is correct"),
    ],
)
def test_single_number_is_named(own: str, other: str, kind: str, node_name: str, text: str, tmp_path: Path) -> None:
    fault = only_fault(model_of(LEAKY), model_of(LEAKY.replace(own, other)), tmp_path)
    assert (fault.kind, fault.nodes) == (kind, (node_name,))
    assert text in fault.cause


def test_slope_that_is_left_to_its_default_is_solved_for(tmp_path: Path) -> None:
    """A module's slope is no attribute to compare with."""
    model = nn.Sequential(nn.Linear(6, 6), nn.LeakyReLU(0.2), nn.Linear(6, 6)).eval()
    wrong = normdeploy.export(model, (torch.randn(2, 6),)).proto
    del next(n for n in wrong.graph.node if n.op_type == "LeakyRelu").attribute[:]
    fault = only_fault(model, wrong, tmp_path, torch.randn(2, 6))
    assert fault.kind == "number"
    assert "has alpha 0.01; with 0.2 the result is correct" in fault.cause


def test_number_that_the_model_computes_is_solved_for(tmp_path: Path) -> None:
    """No constant of the model is the right one: 0.3 is 0.5 · 0.6 there."""
    split = LEAKY.replace("float half = {0.3}", "float one = {0.5}, float two = {0.6}")
    split = split.replace("[scaled] s = Mul(b, half)", "[first] w = Mul(b, one)\n    [second] s = Mul(w, two)")
    fault = only_fault(model_of(split), model_of(LEAKY.replace("{0.3}", "{0.7}")), tmp_path)
    assert (fault.kind, fault.nodes) == ("number", ("Mul scaled",))


@pytest.mark.parametrize(("right", "wrong", "node_name"), [("Exp", "Tanh", "root"), ("Mul", "Div", "scaled")])
def test_operator_in_another_ones_place_is_named(right: str, wrong: str, node_name: str, tmp_path: Path) -> None:
    fault = only_fault(model_of(LEAKY), model_of(LEAKY.replace(right, wrong)), tmp_path)
    assert (fault.kind, fault.nodes) == ("operator", (f"{wrong} {node_name}",))
    assert f"but the model has {right}" in fault.cause


PARTS = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[3, batch, 4] x) => (float[batch, 4] y)
<int64 first = {0}, int64 second = {1}>
{
    [left] a = Gather <axis: int = 0> (x, first)
    [right] b = Gather <axis: int = 0> (x, second)
    [joined] s = Sub(a, b)
    [root] y = Exp(s)
}
"""


def test_gather_of_another_index_is_named(tmp_path: Path) -> None:
    fault = only_fault(model_of(PARTS), model_of(PARTS.replace("{1}", "{2}")), tmp_path)
    assert (fault.kind, fault.nodes) == ("order", ("Gather right",))
    assert "uses index 2; with 1 the result is correct" in fault.cause
