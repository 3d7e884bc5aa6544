"""A model that draws random numbers is not verified, and its export says so."""

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional

import normdeploy
from normdeploy.errors import InputError, TrainingModeError
from normdeploy.verbs.verify.random_draws import random_nodes_of_file


class Draws(torch.nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.enc, self.draw = torch.nn.Linear(12, 8), draw

    def forward(self, x):
        return self.draw(self.enc(x))


def unused(y):
    torch.randn_like(y)
    return functional.dropout(y, 0.5, training=False)


@pytest.mark.parametrize(
    ("draw", "op"),
    [
        (lambda y: y + torch.randn_like(y), "aten.randn_like"),
        (lambda y: y * torch.bernoulli(torch.sigmoid(y)), "aten.bernoulli"),
        (lambda y: torch.rand_like(y) < y, "aten.rand_like"),
    ],
)
def test_verify_model_that_draws_refused_by_name(draw, op, tmp_path):
    net, x = Draws(draw).eval(), torch.randn(2, 12)
    result = normdeploy.export(net, x, output=tmp_path / "m.onnx")
    assert any(op in note and "random" in note for note in result.notes)
    with pytest.raises(InputError, match=op):
        normdeploy.verify(net, tmp_path / "m.onnx", x)


def test_verify_reference_file_that_draws_refused_by_name(tmp_path):
    normdeploy.export(Draws(lambda y: y + torch.randn_like(y)).eval(), torch.randn(2, 12), output=tmp_path / "m.onnx")
    with pytest.raises(InputError, match="RandomNormalLike"):
        normdeploy.verify(tmp_path / "m.onnx", tmp_path / "m.onnx")


def test_export_dropout_in_training_refused(tmp_path):
    net = Draws(lambda y: functional.dropout(y, 0.5, training=True)).eval()
    with pytest.raises(TrainingModeError, match="dropout"):
        normdeploy.export(net, torch.randn(2, 12), output=tmp_path / "m.onnx")


@pytest.mark.parametrize("training", [True, False])
def test_draws_of_file_dropout_only_in_training(training):
    drop = onnx.helper.make_node("Dropout", ["x", "", "on"], ["y"], name="drop")
    value = onnx.helper.make_tensor_value_info("x", 1, [2])
    on = onnx.numpy_helper.from_array(np.array(training), "on")
    graph = onnx.helper.make_graph([drop], "g", [value], [], [on])
    assert random_nodes_of_file(onnx.helper.make_model(graph)) == (("Dropout 'drop'",) if training else ())


def test_verify_draw_not_used_verified(tmp_path):
    net, x = Draws(unused).eval(), torch.randn(2, 12)
    result = normdeploy.export(net, x, output=tmp_path / "m.onnx")
    assert not any("random" in note for note in result.notes)
    assert normdeploy.verify(net, tmp_path / "m.onnx", x)
