"""Refusals are values with a kind: what follows depends on that, never on the words of the reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx.parser
import pytest

from normdeploy.graphs.region import Refusal, RefusalKind
from normdeploy.rewriting.norm_optimizer import optimize_norms

ROOT = Path(__file__).resolve().parents[2]
NORM = """m = ReduceMean <axes = [-1]> (x) d = Sub (x, m) s = Mul (d, d) v = ReduceMean <axes = [-1]> (s) e = Add (v,
eps) r = Sqrt (e)
n = Div (d, r)"""


def test_no_control_flow_reads_a_reason() -> None:
    found = {
        str(path): [*_readers(ast.parse(path.read_text()))] for path in sorted((ROOT / "normdeploy").rglob("*.py"))
    }
    assert len(found) > 300
    assert {path: lines for path, lines in found.items() if lines} == {}


def _readers(tree: ast.AST) -> Iterator[int]:
    """Lines that look for a text in a reason, cut it, or ask how it begins."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            text = any(isinstance(side, ast.Constant) and isinstance(side.value, str) and side.value for side in sides)
            if text and any(_is_reason(side) for side in sides):
                yield node.lineno
        sliced = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
        searched = isinstance(node, ast.Attribute) and node.attr in ("startswith", "endswith", "find")
        if isinstance(node, ast.Subscript | ast.Attribute) and (sliced or searched) and _is_reason(node.value):
            yield node.lineno


def _is_reason(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "reason"


def test_a_reader_of_reasons_is_found() -> None:
    lines = (
        'if "no " not in made.reason[:3]:',
        'if f.reason.startswith("no"):',
        'if "clamped" in f.reason:',
        'if f.reason == "no op":',
    )
    assert all([*_readers(ast.parse(f"{line} pass"))] for line in lines)
    assert not [*_readers(ast.parse('if not f.reason or f.reason == "" or f.reason == other.reason: pass'))]


def test_an_opset_that_cant_be_raised_is_told_with_the_norms_that_need_it() -> None:
    """onnx's converter would remove the file's functions, and Softmax means something else from opset 13 on."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 11, "own": 1]> f (float[2,3,4] x) => (float[2,3,4] y, float[2,3,4] z)
        <float eps = {{0.001}}> {{ {NORM} y = Softmax (n) z = own.twice (x) }}
        <domain: "own", opset_import: ["": 11]> twice (a) => (b) {{ c = Softmax (a) b = Add (c, c) }}"""
    )
    _, summary = optimize_norms(proto)
    (reason,) = [f.reason for f in summary.findings]
    assert (
        reason
        == "its node needs opset 17, but the file has opset 11 (onnx's converter would remove the file's functions)"
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = BatchNormalization (x, w, w, w, w)", "no linear op precedes or follows it"),
        (
            "c = Conv (x, k) a = Relu (c) y1 = BatchNormalization (c, w, w, w, w) y = Add (a, y1)",
            "other nodes also read 'c', which follows Conv 'c_conv'",
        ),
    ],
)
def test_a_linear_op_that_cant_take_a_scale_is_told_before_those_that_are_not_there(body: str, reason: str) -> None:
    held = "float[3] w = {1, 2, 3}, float[3,3,1,1] k = {1,2,3,4,5,6,7,8,9}"
    head = f'<ir_version: 8, opset_import: ["": 17]> f (float[2,3,4,4] x) => (float[2,3,4,4] y) <{held}>'
    proto = onnx.parser.parse_model(f"{head} {{ {body} }}")
    for node in proto.graph.node:
        node.name = f"{node.output[0]}_{node.op_type.lower()}"
    _, summary = optimize_norms(proto)
    (finding,) = summary.findings
    assert finding.reason == reason


def test_a_refusal_is_false_and_plain_unless_it_says_more() -> None:
    assert not Refusal("because")
    assert Refusal("because").kind is RefusalKind.PLAIN
