"""LSTMs that onnxruntime quantized inside: a right file passes, and a fault is named by the file's node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import nn

from normdeploy.loading import from_module
from normdeploy.model import LoadedModel
from normdeploy.verbs.bisect.file_bisection import search_faults
from normdeploy.verbs.verify.file_comparison import compare_files
from tests import quantized_files as files


class Tags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.cells(x)[0]))


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Path]:
    torch.manual_seed(0)
    tags = Tags().eval()
    model = from_module(tags, inputs=["x:float32[batch=1:2:4,5,8]"])
    folder = tmp_path_factory.mktemp("lstm")
    shapes = ({0: torch.export.Dim("batch", min=1, max=4)},)
    example = (torch.zeros(2, 5, 8),)
    torch.onnx.export(
        tags, example, folder / "float32.onnx", dynamo=True, verbose=False, dynamic_shapes=shapes, external_data=False
    )
    # It folds the stacked weights into initializers, which alone the quantizer takes.
    quant_pre_process(str(folder / "float32.onnx"), str(folder / "ready.onnx"), skip_symbolic_shape=True)
    # Weights of 7 bits: without VNNI onnxruntime saturates sums of two products at 16 bits.
    quantize_dynamic(folder / "ready.onnx", folder / "right.onnx", reduce_range=True, weight_type=QuantType.QInt8)
    return model, folder / "right.onnx"


def weight_scale(proto: onnx.ModelProto) -> None:
    node = next(n for n in proto.graph.node if n.op_type == "DynamicQuantizeLSTM")
    files.replace_constant(proto, node.input[8], 1.5 * files.constant(proto, node.input[8]))


def other_axis(proto: onnx.ModelProto) -> None:
    """Put the directions of the result in front of its batch's rows."""
    node = next(n for n in proto.graph.node if n.op_type == "Transpose" and len(n.attribute[0].ints) == 4)
    perm = list(node.attribute[0].ints)
    node.attribute[0].ints[:] = [*perm[:2], perm[3], perm[2]]


def test_quantized_lstm_passes(right: tuple[LoadedModel, Path]) -> None:
    model, path = right
    assert "DynamicQuantizeLSTM" in {node.op_type for node in onnx.load(path).graph.node}
    comparison = compare_files(model, path)
    assert comparison, str(comparison)


@pytest.mark.parametrize(
    ("change", "kind", "node"),
    [(weight_scale, "scale", "DynamicQuantizeLSTM"), (other_axis, "axis", "Transpose")],
    ids=["scale", "axis"],
)
def test_fault_beside_a_quantized_lstm_is_named(
    change: Callable[[onnx.ModelProto], None], kind: str, node: str, right: tuple[LoadedModel, Path]
) -> None:
    model, path = right
    bisection = search_faults(model, files.edited(path, f"{kind}.onnx", change))
    assert bisection.faults, str(bisection)
    found = bisection.faults[0]
    assert (found.kind, found.nodes[0].partition(" ")[0]) == (kind, node), str(bisection)
    assert found.nodes[0].partition(" ")[2] in {n.name for n in onnx.load(path).graph.node}
