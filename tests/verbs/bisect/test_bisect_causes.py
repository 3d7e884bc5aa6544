"""Causes that no single node shows: other preprocessing, the weights of another state, a state that is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import numpy_helper
from onnx.helper import make_node

import normdeploy
from normdeploy.verbs.bisect.file_bisection import Bisection

TEXT = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[batch, 3, 5, 5] x) => (float[batch, 4] y)
<float[4, 3, 3, 3] weight, float[4] bias, float[4, 4] mix, float[4] shift>
{
    [conv] inner = Conv(x, weight, bias)
    [relu] positive = Relu(inner)
    [pool] pooled = GlobalAveragePool(positive)
    [flat] rows = Flatten(pooled)
    [out] y = Gemm(rows, mix, shift)
}
"""
MEAN = np.float32([0.485, 0.456, 0.406]).reshape(3, 1, 1)
DEVIATION = np.float32([0.229, 0.224, 0.225]).reshape(3, 1, 1)
Change = Callable[[onnx.GraphProto], None]


def right() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(TEXT)
    shapes = {"weight": (4, 3, 3, 3), "bias": (4,), "mix": (4, 4), "shift": (4,)}
    del model.graph.initializer[:]
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(0, 0.5, shape).astype(np.float32), name))
    return model


def in_front(graph: onnx.GraphProto, *nodes: onnx.NodeProto) -> None:
    """Let the convolution read what ``nodes`` make of x."""
    graph.node[0].input[0] = nodes[-1].output[0]
    for place, node in enumerate(nodes):
        graph.node.insert(place, node)


def constant(graph: onnx.GraphProto, name: str, value: object) -> str:
    graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
    return name


def channels_last(graph: onnx.GraphProto) -> None:
    dims = graph.input[0].type.tensor_type.shape.dim
    for dim, size in zip(dims[1:], (5, 5, 3), strict=True):
        dim.dim_value = size
    in_front(graph, make_node("Transpose", ["x"], ["first"], perm=[0, 3, 1, 2]))


def of_bytes(graph: onnx.GraphProto) -> None:
    in_front(graph, make_node("Div", ["x", constant(graph, "most", 255)], ["unit"]))


def normalizing(graph: onnx.GraphProto) -> None:
    off = make_node("Sub", ["x", constant(graph, "mean", MEAN)], ["centered"])
    in_front(graph, off, make_node("Div", ["centered", constant(graph, "deviation", DEVIATION)], ["normal"]))


def blue_first(graph: onnx.GraphProto) -> None:
    order = numpy_helper.from_array(np.array([2, 1, 0]), "order")
    graph.initializer.append(order)
    in_front(graph, make_node("Gather", ["x", "order"], ["turned"], axis=1))


def bisected(change: Change, folder: Path) -> Bisection:
    reference, wrong = right(), right()
    change(wrong.graph)
    for model, name in ((reference, "right.onnx"), (wrong, "wrong.onnx")):
        onnx.save(model, folder / name)
    return normdeploy.bisect(folder / "right.onnx", folder / "wrong.onnx", seeds=1, dims=["batch=1:2:4"])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (channels_last, "expects x.transpose(0, 2, 3, 1), but"),
        (of_bytes, "expects 255 * x, but"),
        (normalizing, "expects (x * std + mean) (mean and std of ImageNet), but"),
        (blue_first, "expects x[:, ::-1], but"),
    ],
)
def test_other_preprocessing_is_named_by_what_the_file_takes(change: Change, text: str, tmp_path: Path) -> None:
    (fault,) = bisected(change, tmp_path).faults
    assert (fault.kind, fault.tensor, fault.mended) == ("preprocessing", "x", True)
    assert text in fault.cause


def detector(epsilon: float) -> onnx.ModelProto:
    """Boxes of a convolution behind a norm, chosen by their scores: the indices alone are the output."""
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        net (float[batch, 3, 16, 16] x) => (int64[n, 3] y)
        <int64[1] most = {{20}}, float[1] overlap = {{0.5}}, float[1] least = {{0.3}}, int64[3] of_boxes = {{0, 4, -1}},
         int64[3] of_scores = {{0, 3, -1}}, int64[2] parts = {{4, 3}}>
        {{ f = Conv <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x, w1, b1)
           g = InstanceNormalization <epsilon = {epsilon}> (f, gamma, beta) r = Relu(g) h = Conv(r, w2, b2)
           boxes, scores = Split <axis = 1> (h, parts) rows = Reshape(boxes, of_boxes) s = Reshape(scores, of_scores)
           q = Sigmoid(s) u = Sigmoid(rows) t = Transpose <perm = [0, 2, 1]> (u)
           y = NonMaxSuppression(t, q, most, overlap, least) }}""")
    rng = np.random.default_rng(1)
    sizes = {"w1": ((8, 3, 3, 3), 0.4), "b1": ((8,), 0.2), "gamma": ((8,), 1.0), "beta": ((8,), 0.3)}
    sizes |= {"w2": ((7, 8, 1, 1), 0.8), "b2": ((7,), 0.3)}
    for name, (shape, size) in sizes.items():
        value = (size * rng.standard_normal(shape)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    return proto


def test_an_epsilon_that_a_large_input_hides_is_no_preprocessing(tmp_path: Path) -> None:
    """Of 255 times x the norm hardly knows its epsilon, so that the indices are right then."""
    for name, epsilon in (("right", 1e-5), ("wrong", 0.05)):
        onnx.save(detector(epsilon), tmp_path / f"{name}.onnx")
    found = normdeploy.bisect(tmp_path / "right.onnx", tmp_path / "wrong.onnx", dims=["batch=1:2:4"])
    assert [fault.kind for fault in found.faults] == ["epsilon"]


def test_weights_of_another_state_are_one_fault(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        rng = np.random.default_rng(1)
        for tensor in graph.initializer:
            value = numpy_helper.to_array(tensor)
            other = value + rng.normal(0, 0.1, value.shape).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(other, tensor.name))

    (fault,) = bisected(change, tmp_path).faults
    assert (fault.kind, fault.mended) == ("stale weights", True)
    assert "and 3 more differ from the model's" in fault.cause


def test_one_wrong_weight_is_no_other_state(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        value = numpy_helper.to_array(graph.initializer[2])
        graph.initializer[2].CopyFrom(numpy_helper.from_array(value * np.float32(1.1), "mix"))

    (fault,) = bisected(change, tmp_path).faults
    assert (fault.kind, fault.nodes) == ("weights", ("Gemm out",))


class Stateful(torch.nn.Module):
    """A GRU that starts from a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.GRU(4, 3, batch_first=True)
        self.register_buffer("start", torch.randn(1, 1, 3))
        self.starts = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.start.expand(-1, x.shape[0], -1).contiguous() if self.starts else None
        return self.layer(x, state)[0]


def test_a_state_that_the_file_leaves_out_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path, x = Stateful().eval(), tmp_path / "stateless.onnx", torch.randn(2, 5, 4)
    model.starts = False
    torch.onnx.export(model, (x,), path, dynamo=False, input_names=["x"], output_names=["output"])
    model.starts = True
    (fault,) = normdeploy.bisect(model, path, (x,), seeds=1).faults
    assert (fault.kind, fault.mended) == ("state", True)
    assert "starts from zeros, but the model starts from 'start'" in fault.cause
