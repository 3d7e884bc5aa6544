"""Files that do not run on the model's inputs: the node that stops them is named."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.verbs.bisect.file_bisection import Bisection

HEAD = '<ir_version: 9, opset_import: ["" : 18]> net (float[n, 16] x) => '
SQUARE = "(float[n, 4, 4] y) <int64[3] s = {-1, 4, 4}> { h = Tanh (x) [square] y = Reshape (h, s) }"
FLAT = """(float[n, 16] y) <int64[3] s = {-1, 4, 4}, int64[2] t = {-1, 16}>
{ [square] h = Reshape (x, s) [bent] a = Tanh (h) [flat] b = Reshape (a, t) [sum] y = Add (b, x) }"""


def bisected(right: str, wrong: str, folder: Path) -> Bisection:
    onnx.save(onnx.parser.parse_model(HEAD + wrong), folder / "wrong.onnx")
    return normdeploy.bisect(onnx.parser.parse_model(HEAD + right), folder / "wrong.onnx", seeds=1)


def test_batch_baked_into_a_reshape_is_its_constant(tmp_path: Path) -> None:
    found = bisected(SQUARE, SQUARE.replace("{-1, 4, 4}", "{1, 4, 4}"), tmp_path)
    (fault,) = found.faults
    assert (fault.kind, fault.nodes, fault.mended) == ("attribute", ("Reshape square",), True)
    assert fault.cause == "Reshape 'square' has 's' [1, 4, 4] (model: [-1, 4, 4])"
    assert (found.notes, found.not_searched) == ((), ())


def test_batch_baked_into_two_reshapes_is_two_faults(tmp_path: Path) -> None:
    wrong = FLAT.replace("{-1, 4, 4}", "{2, 4, 4}").replace("{-1, 16}", "{2, 16}")
    faults = bisected(FLAT, wrong, tmp_path).faults
    assert [fault.nodes for fault in faults] == [("Reshape square",), ("Reshape flat",)]
    assert faults[-1].mended


def test_node_that_only_stops_the_file_is_named_with_the_reason(tmp_path: Path) -> None:
    right = "(float[n, 16] y) <float[1, 1] c = {1.5}> { [sum] y = Add (x, c) }"
    wrong = "(float[n, 16] y) <float[2, 1] c = {1.5, 1.5}> { [sum] y = Add (x, c) }"
    found = bisected(right, wrong, tmp_path)
    (fault,) = found.faults
    assert (fault.kind, fault.nodes) == ("unknown", ("Add sum",))
    assert "does not run on these inputs" in fault.cause
    assert found.notes == ()


def test_model_that_runs_at_one_size_alone_is_searched_there(tmp_path: Path) -> None:
    right = "(float[n, 4, 4] y) <int64[3] s = {1, 4, 4}, float c = {0.5}> { h = Reshape (x, s) [part] y = Mul (h, c) }"
    (fault,) = bisected(right, right.replace("0.5", "0.6"), tmp_path).faults
    assert (fault.kind, fault.nodes, fault.mended) == ("number", ("Mul part",), True)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, 3), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).flatten(1))


@pytest.mark.parametrize("shape", ["1, -1", "1, 12"])
def test_flatten_of_one_sample_is_the_shape_whoever_stops(shape: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, sample = Flat().eval(), torch.randn(3, 2, 4, 4)
    text = f"""<ir_version: 9, opset_import: ["" : 18]> net (float[n, 2, 4, 4] x) => (float[n, 5] output)
    <int64[2] s = {{{shape}}}>
    {{ h = Conv (x, W, b) [flat] f = Reshape (h, s) [head] output = Gemm <transB = 1> (f, V, c) }}"""
    wrong = onnx.parser.parse_model(text)
    names = zip("WbVc", model.parameters(), strict=True)
    wrong.graph.initializer.extend(onnx.numpy_helper.from_array(p.detach().numpy(), n) for n, p in names)
    onnx.save(wrong, tmp_path / "wrong.onnx")
    dims = torch.export.Dim("n", min=2, max=8)
    program = torch.export.export(model, (sample,), dynamic_shapes=({0: dims},))
    (fault,) = normdeploy.bisect(program, tmp_path / "wrong.onnx", seeds=1).faults
    assert (fault.kind, fault.nodes, fault.mended) == ("attribute", ("Reshape flat",), True)
