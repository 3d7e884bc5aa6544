"""Nodes of a reference file that have no float64 form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

import normdeploy
from normdeploy.runtimes.onnx_float64 import OnnxFloat64Runner

TEXT = """<ir_version: 10, opset_import: ["": 20]>
g (float[3,4,4] x) => (float[a] y) <float zero = {{0.0}}, int64[2] axes = {{1, 2}}> {{ {body} }}"""
BRANCHES = """s = ReduceSum<keepdims = 0>(x) c = Greater(s, zero)
y = If(c) <then_branch = t () => (float[a] d) {{ m = MatMul(x, x) d = Det(m) {more} }},
else_branch = e () => (float[a] r) {{ r = ReduceSum<keepdims = 0>(x, axes) }}>"""


def saved(body: str, path: Path) -> Path:
    onnx.save(parser.parse_model(TEXT.format(body=body)), path)
    return path


@pytest.mark.parametrize(
    ("body", "named"),
    [("y = Det(x)", "Det 'y'"), (BRANCHES.format(more=""), "Det 'd' in then_branch of If 'y'")],
    ids=["main graph", "body"],
)
def test_a_node_without_a_float64_form_is_named_with_its_body(body: str, named: str, tmp_path: Path) -> None:
    path = saved(body, tmp_path / "m.onnx")
    comparison = normdeploy.verify(path, path)
    assert comparison, comparison.table()
    assert any(note.startswith(f"no float64 form: {named}; ") for note in comparison.notes), comparison.notes
    assert str(comparison).endswith(f"in float64 except for {named}"), str(comparison)


def test_another_result_beside_such_a_node_is_no_rounding(tmp_path: Path) -> None:
    path = saved("y = Det(x)", tmp_path / "m.onnx")
    wrong = saved("d = Det(x) k = Constant<value_float = 1.00001>() y = Mul(d, k)", tmp_path / "wrong.onnx")
    assert not normdeploy.verify(path, wrong)


@pytest.mark.parametrize(
    "body", ["m = MaxPool<kernel_shape = [2]>(x) y = Flatten(m)", "s = Sin(x) y = Trilu(s)", "y = LogSoftmax(x)"]
)
def test_a_node_with_a_float64_kernel_is_run_in_it(body: str, tmp_path: Path) -> None:
    head = '<ir_version: 10, opset_import: ["": 20]> g (float[n,4,4] x) => (float[a,b,c] y)'
    proto = parser.parse_model(
        f"{head} {{ {body} }}".replace("[a,b,c] y", "[a,b] y" if "Flatten" in body else "[a,b,c] y")
    )
    runner = OnnxFloat64Runner(proto)
    # Float32 has no such number, and any step in it would round it.
    x = np.full((1, 4, 4), 1 / 3)
    (y,) = runner.infer({"x": x}).values()
    assert not runner.describe_narrow_nodes()
    assert y.dtype == np.float64
    assert not (y == y.astype(np.float32))[y != 0].any()
