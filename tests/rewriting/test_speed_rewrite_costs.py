"""What rewrites that are made for speed alone cost in accuracy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from normdeploy.compare.verdict import Verdict
from normdeploy.rewriting import norm_optimizer, rounding_verdicts
from normdeploy.rewriting.rounding_verdicts import RoundingTrial, TrialOutcome
from normdeploy.rewriting.speed_rewrite_costs import describe_cost

LAYER = "p = MatMul(x, w) y = Add(p, b)"
SUM = "s = Add(x, z) y = LayerNormalization(s, g, c)"
ATTENTION = "t = Transpose<perm = [0, 1, 3, 2]>(x) p = MatMul(x, t) q = Softmax<axis = -1>(p) y = MatMul(q, x)"


def graph(body: str, inputs: str) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    text = f'<ir_version: 10, opset_import: ["": 23]> g ({inputs}) => (float[] y) {{ {body} }}'
    proto = parser.parse_model(text)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    held = {"w": (24, 40), "b": (40,), "g": (24,), "c": (24,)}
    for name, shape in held.items():
        if any(name in node.input for node in proto.graph.node):
            value = rng.standard_normal(shape).astype(np.float32)
            proto.graph.initializer.append(numpy_helper.from_array(value, name))
    return proto


@pytest.mark.parametrize(
    ("body", "inputs", "written"),
    [
        (LAYER, "float[N,7,24] x", "Gemm"),
        (SUM, "float[1,64,24] x, float[1,64,24] z", "Sum"),
        (ATTENTION, "float[1,2,8,4] x", "Attention"),
    ],
    ids=["linear layer", "sum", "attention"],
)
def test_a_rewrite_that_onnxruntime_runs_with_a_larger_error_is_taken_back(
    body: str, inputs: str, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = graph(body, inputs)
    made, _ = norm_optimizer.optimize_norms(proto, runtime="onnxruntime")
    assert written in [node.op_type for node in made.graph.node]

    verdicts = rounding_verdicts.run_trials

    def larger(trials: Sequence[RoundingTrial]) -> list[TrialOutcome]:
        ops = [{node.op_type for node in trial.after.nodes} for trial in trials]
        lossy = TrialOutcome(1e-7, Verdict(3e-6, 1e-6))
        return [lossy if written in found else verdict for found, verdict in zip(ops, verdicts(trials), strict=True)]

    monkeypatch.setattr(rounding_verdicts, "run_trials", larger)
    kept, summary = norm_optimizer.optimize_norms(proto, runtime="onnxruntime")
    assert written not in [node.op_type for node in kept.graph.node]
    told = next(finding for finding in summary.findings if finding.status == "undone")
    assert "its error in onnxruntime is 3e-06; the error of the original nodes is 1e-07" in told.reason


@pytest.mark.parametrize(
    ("verdict", "stays"),
    [
        (TrialOutcome(1e-7, Verdict(1e-7, 2e-7)), True),
        (TrialOutcome(1e-7, Verdict(3e-7, 2e-7)), False),
        (TrialOutcome(missing="not compared"), True),
        (TrialOutcome(gross="it can't be run"), False),
    ],
)
def test_what_costs_too_much(verdict: TrialOutcome, stays: bool) -> None:
    assert bool(describe_cost(verdict)) != stays
