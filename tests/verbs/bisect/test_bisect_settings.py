"""Attributes, ranges, inputs and written-out functions that are not the model's: the cause names them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn
from torch.nn import functional

import normdeploy
from normdeploy.verbs.bisect.fault_tracing import Fault

HEAD = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[2, 4, 7, 7] x) => (float[a, b, c, d] y)
"""
IMAGE = torch.linspace(-2, 3, 2 * 4 * 7 * 7).sin().mul(2).reshape(2, 4, 7, 7)


class Function(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)  # type: ignore[operator]


def first_fault(function: object, body: str, folder: Path) -> Fault:
    """Compare a function with an ONNX graph of the text ``body``, which declares its constants first."""
    path = folder / "wrong.onnx"
    onnx.save(onnx.parser.parse_model(HEAD + body), path)
    return normdeploy.bisect(Function(function).eval(), path, (IMAGE,), seeds=1).faults[0]


RANGE = "<int64[1] s = {0}, int64[1] e = {3}, int64[1] a = {2}>"
SIZES = "<float[4] f = {1, 1, 2, 2}>"
PADDED = "<int64[8] p = {0, 0, 0, 0, 0, 0, 1, 1}>"
ATTRIBUTES = [
    (
        lambda x: functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False).exp(),
        "{ [n] h = AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1],"
        " count_include_pad = 1> (x) y = Exp(h) }",
        "AveragePool n",
        "count_include_pad 1; with 0 the result is correct",
    ),
    (
        lambda x: functional.avg_pool2d(x, 2, 2, ceil_mode=True).sum((2, 3), keepdim=True),
        "<int64[2] axes = {2, 3}> { [n] h = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (x)"
        " y = ReduceSum (h, axes) }",
        "AveragePool n",
        "ceil_mode 0; with 1 the result is correct",
    ),
    (
        lambda x: functional.max_pool2d(functional.pad(x, (1, 0, 1, 0), value=-1e9), 2, 1).exp(),
        "{ [n] h = MaxPool <kernel_shape = [2, 2], pads = [0, 0, 1, 1]> (x) y = Exp(h) }",
        "MaxPool n",
        "pads [0, 0, 1, 1]; with [1, 1, 0, 0] the result is correct",
    ),
    (
        lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect").exp(),
        '<int64[8] p = {0, 0, 1, 1, 0, 0, 1, 1}> { [n] h = Pad <mode = "edge"> (x, p) y = Exp(h) }',
        "Pad n",
        "mode edge; with reflect the result is correct",
    ),
    (
        lambda x: functional.pad(x, (1, 0, 1, 0)).exp(),
        PADDED + " { [n] h = Pad (x, p) y = Exp(h) }",
        "Pad n",
        "with [0, 0, 1, 1, 0, 0, 0, 0] the result is correct",
    ),
    (
        lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True).exp(),
        SIZES + ' { [n] h = Resize <mode = "linear"> (x, , f) y = Exp(h) }',
        "Resize n",
        "coordinate_transformation_mode half_pixel; with align_corners the result is correct",
    ),
    (
        lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear").exp(),
        SIZES + ' { [n] h = Resize <mode = "nearest"> (x, , f) y = Exp(h) }',
        "Resize n",
        "mode nearest; with linear the result is correct",
    ),
    (
        lambda x: functional.group_norm(x, 2).exp(),
        "<float[4] one = {1, 1, 1, 1}, float[4] zero = {0, 0, 0, 0}>"
        " { [n] h = InstanceNormalization (x, one, zero) y = Exp(h) }",
        "InstanceNormalization n",
        "normalizes over 4 groups; with 2 the result is correct",
    ),
    (
        lambda x: x.cumsum(2).tanh(),
        "<int64 axis = {2}> { [n] h = CumSum <exclusive = 1> (x, axis) y = Tanh(h) }",
        "CumSum n",
        "exclusive 1; with 0 the result is correct",
    ),
]


@pytest.mark.parametrize(("function", "body", "node", "text"), ATTRIBUTES, ids=[row[3] for row in ATTRIBUTES])
def test_attribute_that_is_not_the_models_is_named(
    function: object, body: str, node: str, text: str, tmp_path: Path
) -> None:
    fault = first_fault(function, body, tmp_path)
    assert (fault.kind, fault.nodes, fault.mended) == ("attribute", (node,), True)
    assert text in fault.cause


def test_attribute_left_to_its_default_is_named(tmp_path: Path) -> None:
    body = "{ [n] h = Softmax (x) y = Exp(h) }"
    fault = first_fault(lambda x: x.softmax(1).exp(), body, tmp_path)
    assert (fault.kind, fault.nodes) == ("axis", ("Softmax n",))
    assert "axis -1; with 1 the result is correct" in fault.cause


def test_small_epsilon_of_a_model_in_doubles_is_named(tmp_path: Path) -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (double[batch, 16] x) => (double[batch, 3] y) {
      [n] h = LayerNormalization <epsilon = 1e-9> (x, gamma, beta)
      y = MatMul (h, w)
    }
    """
    for name, epsilon in (("right.onnx", 1e-9), ("wrong.onnx", 1e-8)):
        model = onnx.parser.parse_model(text)
        for weight, shape in (("gamma", 16), ("beta", 16), ("w", (16, 3))):
            value = np.random.default_rng(len(weight)).standard_normal(shape)
            model.graph.initializer.append(numpy_helper.from_array(value, weight))
        next(a for a in model.graph.node[0].attribute if a.name == "epsilon").f = epsilon
        onnx.save(model, tmp_path / name)
    (fault,) = normdeploy.bisect(tmp_path / "right.onnx", tmp_path / "wrong.onnx", seeds=1).faults
    assert (fault.kind, fault.nodes) == ("epsilon", ("LayerNormalization n",))


def test_attributes_of_a_reference_file_are_named_beside_the_files(tmp_path: Path) -> None:
    text = HEAD + "{ [n] h = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x) y = Exp(h) }"
    right, wrong = onnx.parser.parse_model(text), onnx.parser.parse_model(text)
    wrong.graph.node[0].attribute.append(helper.make_attribute("count_include_pad", 1))
    for model, name in ((right, "right.onnx"), (wrong, "wrong.onnx")):
        onnx.save(model, tmp_path / name)
    (fault,) = normdeploy.bisect(tmp_path / "right.onnx", tmp_path / "wrong.onnx", seeds=1).faults
    assert (fault.kind, fault.nodes) == ("attribute", ("AveragePool n",))
    assert fault.cause.endswith("has count_include_pad 1 (model: 0)")


ORDERS = [
    (
        lambda x: x[:, :, 1:4].exp(),
        RANGE + " { [n] h = Slice (x, s, e, a) y = Exp(h) }",
        "Slice n",
        "uses 0:3 of axis 2; with 1:4 the result is correct",
    ),
    (
        lambda x: x[:, :, 1:4].exp(),
        RANGE.replace("{0}", "{1}") + " { [n] h = Slice (x, s, e, a) y = Exp(h) }",
        "Slice n",
        "uses 1:3 of axis 2; with 1:4 the result is correct",
    ),
    (
        lambda x: x[:, :, [0, 2, 4]].exp(),
        "<int64[3] i = {0, 1, 3}> { [n] h = Gather <axis = 2> (x, i) y = Exp(h) }",
        "Gather n",
        "uses indices [0, 1, 3]; with [0, 2, 4] the result is correct",
    ),
    (
        lambda x: x[:, 2:].exp() - x[:, :2].tanh(),
        "{ [n] a, b = Split <axis = 1, num_outputs = 2> (x) c = Exp(a) d = Tanh(b) y = Sub(c, d) }",
        "Split n",
        "returns 'a', 'b'; in the order 'b', 'a' the result is correct",
    ),
]


@pytest.mark.parametrize(("function", "body", "node", "text"), ORDERS, ids=[row[3] for row in ORDERS])
def test_other_range_or_order_is_named(function: object, body: str, node: str, text: str, tmp_path: Path) -> None:
    fault = first_fault(function, body, tmp_path)
    assert (fault.kind, fault.nodes) == ("order", (node,))
    assert text in fault.cause


FUNCTIONS = [
    (
        lambda x: functional.gelu(x).exp(),
        "<float r = {0.70710678}, float one = {1.0}, float b = {0.044715}, float c = {0.7978845608}, float h = {0.5}>"
        " { q = Mul(x, x) q3 = Mul(q, x) s = Mul(q3, b) t = Add(x, s) u = Mul(t, c) v = Tanh(u) w = Add(v, one)"
        " p = Mul(x, w) g = Mul(p, h) y = Exp(g) }",
        "approximation",
        "the file computes GELU (tanh) of 'x', the model GELU (erf)",
    ),
    (
        lambda x: functional.gelu(x).exp(),
        "<float k = {1.702}> { a = Mul(x, k) b = Sigmoid(a) g = Mul(x, b) y = Exp(g) }",
        "approximation",
        "the file computes GELU (sigmoid of 1.702 x) of 'x', the model GELU (erf)",
    ),
    (
        lambda x: functional.gelu(x).exp(),
        "{ b = Sigmoid(x) g = Mul(x, b) y = Exp(g) }",
        "operator",
        "the file computes SiLU of 'x', the model GELU (erf)",
    ),
    (
        lambda x: functional.leaky_relu(x, 0.2).exp(),
        "{ [n] g = Relu(x) y = Exp(g) }",
        "operator",
        "the file computes ReLU of 'x', the model LeakyReLU with slope 0.2",
    ),
    (
        lambda x: x.clamp(-0.5, 0.5).exp(),
        "{ [n] g = Relu(x) y = Exp(g) }",
        "operator",
        "the file computes ReLU of 'x', the model Clip (min -0.5, max 0.5)",
    ),
]


@pytest.mark.parametrize(("function", "body", "kind", "text"), FUNCTIONS, ids=[row[3] for row in FUNCTIONS])
def test_function_that_is_written_out_is_named(
    function: object, body: str, kind: str, text: str, tmp_path: Path
) -> None:
    fault = first_fault(function, body, tmp_path)
    assert (fault.kind, fault.mended) == (kind, True)
    assert text in fault.cause


def test_residual_of_another_tensor_is_named(tmp_path: Path) -> None:
    body = "{ a = Tanh(x) b = Exp(a) [n] c = Add(x, b) y = Sin(c) }"
    fault = first_fault(lambda x: (x.tanh() + x.tanh().exp()).sin(), body, tmp_path)
    assert (fault.kind, fault.nodes) == ("input", ("Add n",))
    assert "Add 'n' reads 'x'; with 'tanh' instead the result is correct" in fault.cause


def test_scale_that_is_missing_before_softmax_is_solved_for(tmp_path: Path) -> None:
    body = "{ [n] h = Softmax (x) y = Exp(h) }"
    fault = first_fault(lambda x: (x * 0.3).softmax(-1).exp(), body, tmp_path)
    assert (fault.kind, fault.nodes) == ("number", ("Softmax n",))
    assert "an input scale of 1; with 0.3 the result is correct" in fault.cause


BRANCHES = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[2, 4] x, bool first) => (float[2, 4] y)
{
    [choice] h = If (first) <
        then_branch = one () => (float[2, 4] a) { a = Sin(x) },
        else_branch = two () => (float[2, 4] b) { b = Exp(x) }
    >
    y = Tanh(h)
}
"""
COUNTED = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[2, 4] x) => (float[2, 4] y)
<int64 rounds = {3}, bool go = {1}>
{
    [steps] h = Loop (rounds, go, x) <
        body = step (int64 i, bool before, float[2, 4] state) => (bool after, float[2, 4] next) {
            after = Identity(before)
            next = Sin(state)
        }
    >
    y = Tanh(h)
}
"""


def only_fault_of_files(right: onnx.ModelProto, wrong: onnx.ModelProto, folder: Path) -> Fault:
    for model, name in ((right, "right.onnx"), (wrong, "wrong.onnx")):
        onnx.save(model, folder / name)
    (fault,) = normdeploy.bisect(folder / "right.onnx", folder / "wrong.onnx", seeds=1).faults
    return fault


def test_branches_of_if_in_each_others_place_are_named(tmp_path: Path) -> None:
    right, wrong = onnx.parser.parse_model(BRANCHES), onnx.parser.parse_model(BRANCHES)
    one, other = wrong.graph.node[0].attribute
    one.name, other.name = other.name, one.name
    fault = only_fault_of_files(right, wrong, tmp_path)
    assert (fault.kind, fault.nodes) == ("order", ("If choice",))
    assert fault.cause == "the branches of If 'choice' are exchanged"


def test_integer_that_is_not_the_references_is_named_with_both_values(tmp_path: Path) -> None:
    right, wrong = (onnx.parser.parse_model(COUNTED.replace("{3}", f"{{{count}}}")) for count in (3, 4))
    fault = only_fault_of_files(right, wrong, tmp_path)
    assert (fault.kind, fault.nodes) == ("attribute", ("Loop steps",))
    assert "has 'rounds' 4 (model: 3)" in fault.cause
