"""What ``verify`` prints of a result that no number can measure."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.reports.report import Report
from normdeploy.reports.report_page import render_page

HEAD = '<ir_version: 8, opset_import: ["": 18]> net (float[2, 3] x) => '
CONSTANTS = "<float zero = {0.0}, float one = {1.0}> "
RIGHT = HEAD + "(float[2, 3] y) { y = Neg(x) }"


def saved(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        onnx.save(onnx.parser.parse_model(text), folder / f"{name}.onnx")


@pytest.mark.parametrize(
    ("wrong", "error", "reason"),
    [
        (
            "(float[2, 3] y) " + CONSTANTS + "{ n = Div(zero, zero) p = Neg(x) y = Add(p, n) }",
            "nan",
            "nan where the reference is",
        ),
        (
            "(float[2, 3] y) " + CONSTANTS + "{ n = Div(one, zero) p = Neg(x) y = Add(p, n) }",
            "inf",
            "inf where the reference is",
        ),
        ("(float[1, 6] y) <int64[2] s = {1, 6}> { p = Neg(x) y = Reshape(p, s) }", "nan", "its shape is"),
        ("(float[2, 3] y) <int64[2] s = {4, 4}> { p = Neg(x) q = Reshape(p, s) y = Mul(q, q) }", "nan", "does not run"),
    ],
    ids=["NaN", "infinite", "another shape", "it does not run"],
)
def test_the_error_of_what_is_no_number_is_none(
    wrong: str, error: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, right=RIGHT, wrong=HEAD + wrong)
    np.savez("in.npz", x=np.ones((2, 3), np.float32))
    arguments = ["verify", "right.onnx", "wrong.onnx", "--inputs", "in.npz", "--report", "r.json", "--html", "r.html"]
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, arguments)
    assert done.exit_code == 1, done.output
    rows = [line.split() for line in done.output.splitlines() if "(optimizer" in line and " fail " in line]
    assert [row[row.index("fail") - 3 : row.index("fail") - 1] for row in rows] == [[error, error]] * 2, done.output
    results = [r for r in json.loads(Path("r.json").read_text())["parity"]["results"] if r["file"]]
    assert {(r["max_abs_error"], r["max_rel_error"], r["verdict"]) for r in results} == {(error, error, "fail")}
    assert all(reason in r["reason"] for r in results), results
    assert f">{error}<" in Path("r.html").read_text()


def test_no_word_of_eager_where_the_reference_is_a_file(tmp_path: Path) -> None:
    """An overflow in the reference itself, a half file beside it, and the page's rule."""
    saved(tmp_path, right=RIGHT, a=RIGHT.replace("y = Neg(x)", "h = Mul(x, x) g = Mul(h, h) y = Div(g, h)"))
    saved(tmp_path, b=RIGHT.replace("y = Neg(x)", "h = Mul(x, x) g = Mul(h, h) y = Sub(g, g)"))
    comparison = normdeploy.verify(
        tmp_path / "a.onnx", tmp_path / "b.onnx", feeds={"x": np.full((2, 3), 1e10, np.float32)}
    )
    reasons = [r.reason for r in comparison.results if r.file]
    assert any(
        "; the reference itself also fails here (" in reason and "the reference itself exceeds" in reason
        for reason in reasons
    )
    assert any(note.startswith("the reference itself exceeds the range of float32") for note in comparison.notes)
    normdeploy.optimize(tmp_path / "right.onnx", tmp_path / "half.onnx", precision="fp16")
    half = normdeploy.verify(tmp_path / "right.onnx", tmp_path / "half.onnx")
    assert any("the reference itself also ran in float16" in note for note in half.notes)
    for found in (comparison, half):
        document = json.loads(Report("verify", {}, sections={"parity": found.to_json()}).to_json())
        assert "eager" not in "".join((*found.notes, str(found), *(r.reason for r in found.results)))
        assert "the reference&#39;s own error there" in render_page(document)


def test_an_altered_weight_is_told_though_every_run_passes(tmp_path: Path) -> None:
    """One row of a table that the inputs do not reach."""
    table = np.random.default_rng(0).normal(size=(3000, 4)).astype(np.float32)
    changed = table.copy()
    changed[2711, 2] *= np.float32(1.001)
    text = '<ir_version: 8, opset_import: ["": 18]> net (int64[n] i) => (float[n, 4] y) { y = Gather(table, i) }'
    for name, values in (("right", table), ("wrong", changed)):
        proto = onnx.parser.parse_model(text)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, "table"))
        onnx.save(proto, tmp_path / f"{name}.onnx")
    right, wrong = str(tmp_path / "right.onnx"), str(tmp_path / "wrong.onnx")
    told = CliRunner().invoke(app, ["verify", right, wrong, "--input", "i=0:2000"])
    assert told.exit_code == 1
    assert "weight table: 1 of 12000 elements" in " ".join(told.output.split())
    assert "NOT verified" in told.output
