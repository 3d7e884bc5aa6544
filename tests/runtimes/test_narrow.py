"""Nodes of a reference file that have no float64 form."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import parser

import normdeploy

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
    assert str(comparison).endswith(f"in float64 but for {named}"), str(comparison)


def test_another_result_beside_such_a_node_is_no_rounding(tmp_path: Path) -> None:
    path = saved("y = Det(x)", tmp_path / "m.onnx")
    wrong = saved("d = Det(x) k = Constant<value_float = 1.00001>() y = Mul(d, k)", tmp_path / "wrong.onnx")
    assert not normdeploy.verify(path, wrong)
