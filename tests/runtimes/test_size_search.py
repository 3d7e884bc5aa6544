"""References whose dims nobody states, and which do not run at the sizes that are guessed first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

import normdeploy

CONVOLUTIONS = """<ir_version: 8, opset_import: ["": 17]> net (float[batch,2,height,width] x) => (float[b,2,h,w] y)
  { a = Conv (x, weight)  b = Relu (a)  c = Conv (b, weight)  d = Relu (c)  y = Conv (d, weight) }"""
FRAMES = """<ir_version: 8, opset_import: ["": 17]> net (float[batch,samples] x) => (float[n,frame] y)
  <int64[2] shape = {-1, 400}> { frames = Reshape (x, shape)  y = Softmax <axis = 1> (frames) }"""

ONE = """<ir_version: 8, opset_import: ["": 17]> net (float[batch,4] x) => (float[n,m] y)
  <int64[3] shape = {1, 2, 2}, int64[2] flat = {1, 4}> {
    square = Reshape (x, shape)  turned = Transpose <perm = [0, 2, 1]> (square)  y = Reshape (turned, flat) }"""


def saved(text: str, folder: Path) -> Path:
    proto = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).standard_normal((2, 2, 5, 5)).astype(np.float32) / 7
    if "weight" in text:
        proto.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    path = folder / "net.onnx"
    onnx.save(proto, path)
    return path


@pytest.mark.parametrize(
    ("text", "at"),
    [(CONVOLUTIONS, "batch=2, height=16, width=16"), (FRAMES, "batch=2, samples=400"), (ONE, "batch=1")],
    ids=["13 pixels at least", "multiples of 400", "a batch of one"],
)
def test_a_reference_that_does_not_run_at_the_guessed_sizes_runs_at_others(text: str, at: str, tmp_path: Path) -> None:
    path = saved(text, tmp_path)
    comparison = normdeploy.verify(path, path, seeds=2)
    assert comparison, str(comparison)
    assert f"seed 0, {at}" in comparison.cases
    assert f"seed 1, {at}" in comparison.cases


def test_so_does_its_half_file(tmp_path: Path) -> None:
    path, half = saved(CONVOLUTIONS, tmp_path), tmp_path / "half.onnx"
    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), half)
    assert normdeploy.verify(path, half, seeds=1)
