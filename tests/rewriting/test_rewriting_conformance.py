"""onnx's own test generator as a conformance suite: its norm ops, as nodes and written out as functions ("_expanded").

The files have scale and bias as graph inputs, shapes that are computed by nodes, and the case's own inputs and expected
outputs. ``optimize`` must give one norm node, and the expected outputs must still hold.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx.backend.test.case.node import collect_testcases

from normdeploy.rewriting.norm_optimizer import optimize_norms
from tests.support import run_onnxruntime

NAMES = ("layer_normalization", "rms_normalization", "group_normalization", "mvn")
NORMS = (
    "LayerNormalization",
    "RMSNormalization",
    "GroupNormalization",
    "InstanceNormalization",
    "MeanVarianceNormalization",
)
CASES = [c for c in collect_testcases(None) if any(n in c.name for n in NAMES)]


def test_all_cases_are_there() -> None:
    assert len(CASES) == 102
    assert sum("_expanded" in c.name for c in CASES) == 61


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_one_norm_node_and_the_expected_outputs(case: onnx.backend.test.case.TestCase) -> None:
    out, summary = optimize_norms(case.model)
    # onnx 1.23's inference can't read the function body of MeanVarianceNormalization, in its own case neither
    onnx.checker.check_model(out, full_check=case.name != "test_mvn")
    norms = Counter(n.op_type for n in out.graph.node if n.op_type in NORMS)
    assert sum(norms.values()) == 1, (norms, summary.findings)
    if "mvn" in case.name:
        assert norms == {"MeanVarianceNormalization": 1}
    inputs, expected = case.data_sets[0]
    feeds = {i.name: np.asarray(v) for i, v in zip(out.graph.input, inputs, strict=True)}
    for got, wanted in zip(run_onnxruntime(out, feeds), expected, strict=True):
        # the case's own tolerance; onnx's runner uses these two as well
        np.testing.assert_allclose(got, wanted, rtol=case.rtol, atol=max(case.atol, 1e-6))
