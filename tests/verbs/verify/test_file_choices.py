"""Pairs of the ordering operators of a model and a file, and the file's choices."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from normdeploy.loading import from_module
from normdeploy.model import LoadedModel
from normdeploy.storage.shared_weights import Weights, share_array
from normdeploy.verbs.verify.file_choices import ChoiceReader, pair_choices

FILE = """<ir_version: 8, opset_import: ["" : 17]>
net (float[b, 5] x) => (float[b, 2] y, int64[b, 1] z) {
  two = Constant<value_ints = [2]>()
  values, picks = TopK(x, two)
  y = GatherElements<axis = 1>(x, picks)
  z = ArgMax<axis = 1>(x)
}"""


class Chooser(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.gather(1, x.topk(2).indices), x.argmax(1, keepdim=True)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return from_module(Chooser().eval(), inputs=["x[b,5]"])


def test_operators_are_paired_with_indices_in_their_order(model: LoadedModel) -> None:
    paired = pair_choices(model, onnx.parser.parse_model(FILE))
    assert paired is not None
    assert paired.tensors == ("picks", "z")
    assert [operator.name for operator in paired.operators] == ["topk", "argmax"]


@pytest.mark.parametrize(
    "change",
    [
        ("z = ArgMax", "z = ArgMin"),
        ("z = ArgMax<axis = 1>(x)", "z = Slice(picks, one, two, one) one = Constant<value_ints = [1]>()"),
        ("z = ArgMax", "w = ArgMax<axis = 1>(y) u = Add(w, w) z = ArgMax"),
    ],
)
def test_files_with_other_operators_are_not_paired(change: tuple[str, str], model: LoadedModel) -> None:
    assert pair_choices(model, onnx.parser.parse_model(FILE.replace(*change))) is None


def test_indices_that_nothing_reads_are_left_out(model: LoadedModel) -> None:
    text = FILE.replace("values, picks", "unread, none = TopK(x, two) values, picks")
    paired = pair_choices(model, onnx.parser.parse_model(text))
    assert paired is not None
    assert paired.tensors == ("picks", "z")


def test_choices_are_read_from_onnxruntime(model: LoadedModel) -> None:
    feeds = {"x": np.array([[1, 5, 2, 4, 3]], np.float32)}
    proto = onnx.parser.parse_model(FILE)
    with ChoiceReader(model, lambda: proto, optimize=True, provider="cpu") as reader:
        picks = reader.read(feeds)
    assert picks is not None
    assert [value.tolist() for value in picks] == [[[1, 3]], [[1]]]
    # The reader changes a copy of the file.
    assert [v.name for v in proto.graph.output] == ["y", "z"]


def test_choices_are_read_if_a_weight_is_shared_in_memory(model: LoadedModel) -> None:
    """The check of an export reads the choices of a file that is not written yet."""
    text = (
        FILE.replace("{", "<float[5] shift = {5, 0, 0, 0, 0}> {", 1)
        .replace("TopK(x", "TopK(s")
        .replace("ArgMax<axis = 1>(x", "ArgMax<axis = 1>(s")
    )
    proto = onnx.parser.parse_model(text.replace("two = C", "s = Add(x, shift) two = C"))
    weights: Weights = {}
    (shift,) = proto.graph.initializer
    share_array(shift, np.array(numpy_helper.to_array(shift)), weights)
    with ChoiceReader(model, lambda: proto, optimize=False, provider="cpu") as reader:
        picks = reader.read({"x": np.array([[1, 5, 2, 4, 3]], np.float32)})
    assert picks is not None
    assert [value.tolist() for value in picks] == [[[0, 1]], [[0]]]


def test_input_that_the_file_refuses_gives_no_choices(model: LoadedModel) -> None:
    with ChoiceReader(model, lambda: onnx.parser.parse_model(FILE), optimize=False, provider="cpu") as reader:
        assert reader.read({"x": np.zeros((1, 4), np.float32)}) is None
