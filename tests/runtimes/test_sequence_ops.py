"""Ops on sequences in float64, against onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime
import pytest

from normdeploy.runtimes.float64_evaluator import Float64Evaluator, inferred_dtypes

HEAD = '<ir_version: 10, opset_import: ["" : 18]> net (float[4, 3] x) => (float[a, b] y) '
FILES = {
    "of single rows": "{ parts = SplitToSequence <axis = 0, keepdims = 0> (x) y = ConcatFromSequence "
    "<axis = 1, new_axis = 1> (parts) }",
    "of equal parts": "<int64 size = {2}, int64 last = {-1}> "
    "{ parts = SplitToSequence <axis = 0> (x, size) y = SequenceAt (parts, last) }",
    "of stated parts": "<int64[2] sizes = {1, 3}, int64 last = {1}> "
    "{ parts = SplitToSequence <axis = 0> (x, sizes) y = SequenceAt (parts, last) }",
    "inserted and erased": "<int64 first = {0}> { none = SequenceEmpty () bent = Tanh (x) "
    "one = SequenceInsert (none, x) two = SequenceInsert (one, bent, first) "
    "three = SequenceInsert (two, x) fewer = SequenceErase (three, first) "
    "y = ConcatFromSequence <axis = 0> (fewer) }",
    "counted": "{ bent = Tanh (x) pair = SequenceConstruct (x, bent) count = SequenceLength (pair) "
    "number = Cast <to = 1> (count) y = Mul (x, number) }",
    "grown by a loop": "<int64 rounds = {3}, bool go = {1}> { none = SequenceEmpty () last = Loop (rounds, go, none) "
    "<body = step (int64 i, bool before, seq(float[4, 3]) state) => (bool after, seq(float[4, 3]) next) { "
    "after = Identity (before) number = Cast <to = 1> (i) more = Add (x, number) "
    "next = SequenceInsert (state, more) }> "
    "y = ConcatFromSequence <axis = 1> (last) }",
}


@pytest.mark.parametrize("name", FILES)
def test_a_sequence_is_computed_as_onnxruntime_does(name: str) -> None:
    model = onnx.parser.parse_model(HEAD + FILES[name])
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    exact = Float64Evaluator(model, inferred_dtypes(model))
    values = exact.evaluate_nodes(exact.nodes_between(["y"]), {"x": x.astype(np.float64)})
    np.testing.assert_allclose(values["y"], expected, rtol=1e-6)
    assert not exact.narrow


def test_a_loop_that_is_tried_in_anothers_place_ends(tmp_path: object) -> None:
    """Without its condition a Loop may run for ever."""
    from normdeploy.runtimes.float64_evaluator import NodeChange, NotEvaluated

    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> net (float[3] x) => (float[3] y) <bool go = {1}> '
        "{ y = Loop (, go, x) <body = step (int64 i, bool before, float[3] state) => (bool after, float[3] next) "
        "{ limit = Constant <value_int = 5> () after = Less (i, limit) next = Tanh (state) }> }"
    )
    exact = Float64Evaluator(model, inferred_dtypes(model))
    endless = onnx.NodeProto()
    endless.CopyFrom(model.graph.node[0])
    endless.attribute[0].g.node[1].CopyFrom(onnx.helper.make_node("Identity", ["before"], ["after"]))
    with pytest.raises(NotEvaluated, match="more than 64 iterations"):
        exact.evaluate_nodes([0], {"x": np.ones(3)}, NodeChange(nodes={0: endless}))
