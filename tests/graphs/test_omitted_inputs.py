"""Inputs left out by an empty name, on which onnxruntime's optimizer crashes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

import normdeploy
from normdeploy.errors import RuntimeCrash
from normdeploy.graphs.omitted_inputs import has_omitted_inputs, remove_omitted_inputs

HEAD = '<ir_version: 8, opset_import: ["": 17, "my": 1]> g (float[n,5] x) => (float[n,5] y)'
GAMMA = "float[5] g = {1, 2, 3, 4, 5}"
FUNCTION = '<domain: "my", opset_import: ["": 17]>'
NORM = f"{FUNCTION} LN (X, G, B) => (Y) {{ Y = LayerNormalization(X, G, B) }}"
EMPTY = f'{HEAD} <{GAMMA}> {{ y = my.LN(x, g, "") }} {NORM}'
SHORT = f"{HEAD} <{GAMMA}> {{ y = my.LN(x, g) }} {NORM}"
PLAIN = f'{HEAD} <{GAMMA}> {{ y = LayerNormalization(x, g, "") }}'
BOTH = f'{HEAD} <{GAMMA}> {{ a = my.LN(x, g, g) y = my.LN(a, g, "") }} {NORM}'
NESTED = f"""{HEAD} <{GAMMA}> {{ y = my.outer(x, g) }}
    <domain: "my", opset_import: ["": 17, "my": 1]> outer (X, G, B) => (Y) {{ Y = my.LN(X, G, B) }} {NORM}"""
MIDDLE = f"""{HEAD} <float top = {{0.5}}> {{ y = my.cut(x, "", top) }}
    {FUNCTION} cut (X, L, H) => (Y) {{ Y = Clip(X, L, H) }}"""
CASES = {"empty": EMPTY, "short": SHORT, "plain": PLAIN, "both": BOTH, "nested": NESTED, "middle": MIDDLE}


def run(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize("text", CASES.values(), ids=CASES)
def test_without_omitted_same_results_and_nothing_left_out(text: str) -> None:
    proto = parser.parse_model(text)
    before = proto.SerializeToString(deterministic=True)
    written = remove_omitted_inputs(proto)
    onnx.checker.check_model(written, full_check=True)
    assert proto.SerializeToString(deterministic=True) == before
    assert not has_omitted_inputs(written)
    x = np.random.default_rng(0).standard_normal((3, 5), dtype=np.float32)
    np.testing.assert_array_equal(run(written, x), run(proto, x))


def test_without_omitted_input_given_as_output_is_left_alone() -> None:
    text = f"{HEAD} <{GAMMA}> {{ y, z = my.two(x) }} {FUNCTION} two (X, B) => (Y, B) {{ Y = Relu(X) }}"
    proto = parser.parse_model(text)
    assert [node.op_type for node in remove_omitted_inputs(proto).graph.node] == ["two"]


@pytest.mark.parametrize("text", [EMPTY, SHORT, PLAIN, BOTH], ids=["empty", "short", "plain", "both"])
def test_optimize_norm_without_bias_opens_in_onnxruntime(tmp_path: Path, text: str) -> None:
    """Open the written file by `verify`, which runs onnxruntime's optimizer, too."""
    onnx.save(parser.parse_model(text), tmp_path / "in.onnx")
    result = normdeploy.optimize(tmp_path / "in.onnx", output=tmp_path / "out.onnx")
    assert {finding.status for finding in result.summary.findings} == {"kept"}
    assert "can't be inlined" not in str(result.summary.findings)
    assert normdeploy.verify(tmp_path / "in.onnx", tmp_path / "out.onnx")


def test_verify_norm_with_empty_bias_names_the_crash(tmp_path: Path) -> None:
    onnx.save(parser.parse_model(PLAIN), tmp_path / "in.onnx")
    verdict = normdeploy.verify(tmp_path / "in.onnx", tmp_path / "in.onnx")
    assert not verdict
    assert "onnxruntime crashes (SIGSEGV)" in str(verdict)
    with pytest.raises(RuntimeCrash, match="rewrite the file with normdeploy optimize"):
        normdeploy.run(tmp_path / "in.onnx", {"x": np.ones((2, 5), np.float32)})


REQUIRED = {
    "a scale": f"{HEAD} <{GAMMA}> {{ y = my.LN(g) }} {FUNCTION} LN (X, G) => (Y) {{ Y = LayerNormalization(X, G) }}",
    "a term": f"{HEAD} {{ y = my.sum(x) }} {FUNCTION} sum (X, R) => (Y) {{ Y = Add(X, R) }}",
    "a part": f"{HEAD} {{ y = my.join(x) }} {FUNCTION} join (X, R) => (Y) {{ Y = Concat<axis = 0>(X, R) }}",
    "in an outer call": f"""{HEAD} {{ y = my.outer(x) }}
        {FUNCTION} sum (X, R) => (Y) {{ Y = Add(X, R) }}
        <domain: "my", opset_import: ["": 17, "my": 1]> outer (X, R) => (Y) {{ Y = my.sum(X, R) }}""",
}


@pytest.mark.parametrize("text", REQUIRED.values(), ids=REQUIRED)
def test_a_call_without_a_required_input_is_not_made_invalid(text: str) -> None:
    """onnx's checker accepts such a call, but no node without the input."""
    proto = parser.parse_model(text)
    onnx.checker.check_model(proto)
    onnx.checker.check_model(remove_omitted_inputs(proto))
