"""``inspect --html``: the graph around each norm, as it stands and as optimize would write it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx
import onnx.parser

import normdeploy
from normdeploy.findings.records import DiagramBox, NormDiagram
from normdeploy.reports.report import Report
from normdeploy.reports.report_page import render_page
from tests.cli.test_app import layer_norm_by_hand, run


def drawn(boxes: tuple[DiagramBox, ...]) -> list[str]:
    """Each box with those that it reads, the norm's own in capitals."""
    text = [box.op.upper() if box.own else box.op or box.name for box in boxes]
    return [f"{text[i]}({', '.join(text[k] for k in box.inputs)})" for i, box in enumerate(boxes)]


def test_a_norm_before_and_after_with_what_is_beside_it(tmp_path: Path) -> None:
    """Constants, and shapes, are left out; ends of the graph are named; a reader behind the norm is drawn."""
    proto = onnx.load(layer_norm_by_hand(tmp_path / "in.onnx"))
    proto.graph.node.append(onnx.helper.make_node("Relu", ["y"], ["z"]))
    proto.graph.output[0].name = "z"
    (picture,) = normdeploy.inspect(proto).pictures
    assert (picture.kind, picture.status, picture.tensors) == ("LayerNorm", "fused", ("y",))
    assert drawn(picture.before) == [
        "x()",
        "REDUCEMEAN(x)",
        "SUB(x, REDUCEMEAN)",
        "POW(SUB)",
        "REDUCEMEAN(POW)",
        "ADD(REDUCEMEAN)",
        "SQRT(ADD)",
        "DIV(SUB, SQRT)",
        "MUL(DIV)",
        "ADD(MUL)",
        "Relu(ADD)",
    ]
    assert drawn(picture.after) == ["x()", "LAYERNORMALIZATION(x)", "Relu(LAYERNORMALIZATION)"]


def test_norms_that_look_alike_are_one_picture() -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[4, 8] x) => (float[4, 8] y) <float[8] w = {1, 1, 1, 1, 1, 1, 1, 1}>
        { a = Relu(x) b = LayerNormalization(a, w) c = Relu(b) d = LayerNormalization(c, w) y = Relu(d) }"""
    (picture,) = normdeploy.inspect(onnx.parser.parse_model(text)).pictures
    assert picture.tensors == ("b", "d")
    assert drawn(picture.before) == ["Relu()", "LAYERNORMALIZATION(Relu)", "Relu(LAYERNORMALIZATION)"]
    assert picture.after == (), "kept as it is"


def test_the_page_shows_them(tmp_path: Path) -> None:
    done = run("inspect", layer_norm_by_hand(tmp_path / "in.onnx"), "--html", tmp_path / "page.html", "-q")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    text = (tmp_path / "page.html").read_text()
    assert text.count('<svg class="graph"') == 2
    assert 'aria-label="ReduceMean Sub Pow ReduceMean Add Sqrt Div Mul Add"' in text
    assert "the form that optimize would write" in text


def test_names_in_pictures_are_escaped(tmp_path: Path) -> None:
    summary = normdeploy.inspect(layer_norm_by_hand(tmp_path / "in.onnx"))
    hostile = "</text><script>alert(1)</script>"
    picture = NormDiagram(
        hostile, hostile, "fused", (hostile,), (DiagramBox("", hostile), DiagramBox(hostile, inputs=(0,), own=True)), ()
    )
    text = render_page(json.loads(Report("inspect", {}, replace(summary, pictures=(picture,))).to_json()))
    assert "<script" not in text
    assert "&lt;/text&gt;&lt;scrip" in text


def test_of_many_readers_the_first_are_drawn() -> None:
    """In the graph's order: a set of names has another one in each process, and two runs drew different neighbours."""
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]> g (float[4, 8] x)
        => (float[4, 8] y, float[4, 8] a, float[4, 8] b, float[4, 1] c, float[4, 1] d) <float eps = {1e-5},
        int64[1] ax = {-1}>
        { m = ReduceMean(x, ax) s = Sub(x, m) q = Mul(s, s) v = ReduceMean(q, ax) e = Add(v, eps) r = Sqrt(e)
        y = Div(s, r)
          a = Sin(s) b = Cos(q) c = Tan(v) d = Exp(e) }""")
    (picture,) = normdeploy.inspect(proto).pictures
    assert [box.op for box in picture.before if box.op and not box.own] == ["Sin", "Cos", "Tan"]
