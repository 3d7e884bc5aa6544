"""One node in float64: operands that do not fit it are no crash."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from normdeploy.runtimes.float64_evaluator import Float64Evaluator, NotEvaluated, inferred_dtypes


def exact_of(text: str) -> Float64Evaluator:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
    return Float64Evaluator(proto, inferred_dtypes(proto))


SOFTMAX = "(float[2, 3] x) => (float[2, 3] y) { y = Softmax(x) }"
UNSQUEEZE = "(float[2] x, int64[1] axes) => (float[2, 1] y) { y = Unsqueeze(x, axes) }"
GATHER = "(float[2] x, int64[1] i) => (float[1] y) { y = Gather(x, i) }"


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        (UNSQUEEZE, [np.ones(2), np.array([1.5])]),
        (UNSQUEEZE, [np.ones(2), np.array([7])]),
        (GATHER, [np.ones(2), np.array([5])]),
        (GATHER, [np.ones(2), np.array([np.inf])]),
        (SOFTMAX, [np.array([[1, 2, 3], [4, 5, 6]])]),
    ],
    ids=["axis 1.5", "axis 7", "index 5", "index Inf", "integers"],
)
def test_operands_that_do_not_fit_are_no_crash(text: str, operands: list[Any]) -> None:
    """As where bisect tries another op or operand: onnxruntime may know what to make of them, else nobody does."""
    exact = exact_of(text)
    try:
        (made,) = exact.evaluate_node(exact.nodes[0], operands, {})
    except NotEvaluated:
        return
    assert np.isfinite(np.asarray(made)).all()
