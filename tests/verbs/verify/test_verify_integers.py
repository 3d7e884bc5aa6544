"""Integer inputs of which nothing is stated: the numbers that files compare them with are tried, and those of the
example call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from normdeploy import verify

BRANCHES = """<ir_version: 8, opset_import: ["" : 16]>
net (float[4] x, int64 rate) => (float[4] y) {
  known = Constant<value_int = 16000>()
  is_known = OP(rate, known)
  y = If<then_branch = a () => (float[4] p) { p = Relu(x) },
         else_branch = b () => (float[4] q) { q = Tanh(x) }>(is_known)
}"""


def written(path: Path, text: str) -> Path:
    onnx.save(onnx.parser.parse_model(text), path)
    return path


@pytest.mark.parametrize("op", ["Equal", "Greater"])
@pytest.mark.parametrize("change", [("Relu", "Neg"), ("16000", "8000"), ("16000", "16001")])
def test_a_branch_that_hangs_on_an_integer_is_run(op: str, change: tuple[str, str], tmp_path: Path) -> None:
    text = BRANCHES.replace("OP", op)
    reference = written(tmp_path / "right.onnx", text)
    assert verify(reference, written(tmp_path / "same.onnx", text), seeds=1)
    assert not verify(reference, written(tmp_path / "wrong.onnx", text.replace(*change)), seeds=1)


class Padded(torch.nn.Module):
    """Sums the first elements of each row; ``most`` of them at most."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        return (x * (places < lengths[:, None]) * (places < self.most)).sum(1)


def test_integers_as_large_as_those_of_the_example_call_are_tried(tmp_path: Path) -> None:
    args = torch.ones(2, 6), torch.tensor([6, 3])
    for most, right in [(6, True), (4, False)]:
        path = tmp_path / f"{most}.onnx"
        torch.onnx.export(Padded(most).eval(), args, path, dynamo=False, input_names=["x", "lengths"])
        assert bool(verify(Padded(6).eval(), path, args, seeds=2)) is right


@pytest.mark.parametrize(("dtype", "wrong"), [("int64", "Mod<fmod = 1>"), ("int32", "Mod<fmod = 1>"), ("int64", "Min")])
def test_integers_that_are_no_sizes_and_no_rows_take_both_signs(dtype: str, wrong: str, tmp_path: Path) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17]> net ({dtype}[n] i) => ({dtype}[n] y)
      <{dtype} three = {{3}}> {{ y = OP (i, three) }}"""
    right = text.replace("OP", "Mod" if "Mod" in wrong else "Identity").replace("Identity (i, three)", "Identity (i)")
    reference = written(tmp_path / "right.onnx", right)
    assert verify(reference, written(tmp_path / "same.onnx", right), seeds=1)
    assert not verify(reference, written(tmp_path / "wrong.onnx", text.replace("OP", wrong)), seeds=1)


def test_rows_of_a_table_are_not_drawn_beyond_it(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> net (int64[n] i) => (float[n] y)
      <float[3] table = {1, 2, 3}> { y = Gather (table, i) }"""
    reference = written(tmp_path / "right.onnx", text)
    comparison = verify(reference, reference, seeds=1)
    assert comparison
    assert not any("i from" in case for case in comparison.cases)


def test_pixels_of_8_bits_take_every_value_of_their_type(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> net (uint8[n,4] image) => (float[n,4] y) {
      narrow = Cast<to = KIND> (image)
      y = Cast<to = 1> (narrow) }"""
    reference = written(tmp_path / "right.onnx", text.replace("KIND", "5"))  # int16 holds all pixels
    assert verify(reference, written(tmp_path / "same.onnx", text.replace("KIND", "6")), seeds=1)
    assert not verify(reference, written(tmp_path / "wrong.onnx", text.replace("KIND", "3")), seeds=1)


@pytest.mark.parametrize("threshold", [0, 1024])
def test_constants_in_external_data_are_read_from_the_files_own_folder(
    threshold: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = BRANCHES.replace("OP", "Equal").replace("known = Constant<value_int = 16000>()", "known = Identity (large)")
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.int64(16000), "large"))
    onnx.save(proto, tmp_path / "inside.onnx")
    outside = tmp_path / "outside.onnx"
    onnx.save(proto, outside, save_as_external_data=True, location="outside.data", size_threshold=threshold)
    monkeypatch.chdir("/")
    comparison = verify(tmp_path / "inside.onnx", outside, seeds=1)
    assert comparison
    assert any("rate around 16000" in case for case in comparison.cases)
