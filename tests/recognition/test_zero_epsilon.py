"""A norm without epsilon is noted where a constant row gives NaN, and only there."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from normdeploy.rewriting.norm_optimizer import optimize_norms
from normdeploy.verbs.inspect.norm_census import take_census
from tests.support import parsed

CONSTANT = "epsilon is 0: a constant row gives NaN, as in the original"
ZEROS = "epsilon is 0: a row of zeros gives NaN, as in the original"
VARIANCE = """
    m = ReduceMean<axes=[-1]>(x)  d = Sub(x, m)  q = Mul(d, d)  v = ReduceMean<axes=[-1]>(q)
"""
NORM = f"{VARIANCE} s = Sqrt(v)  n = Div(d, s)"
HEAD = "g (float[4, 8] x) => (float[4, 8] y) <float[8] w = {1,2,3,4,5,6,7,8}, float[1] z = {0}, float[1] e = {0.01}>"


def model(body: str) -> onnx.ModelProto:
    return parsed(f"{HEAD} {{ {body} }}", opset=17)


def notes(proto: onnx.ModelProto) -> list[str]:
    """Notes about an epsilon of 0, which inspect and optimize must both give."""
    told = [
        [note for finding in summary.findings for note in finding.notes if "epsilon is 0" in note]
        for summary in (take_census(proto), optimize_norms(proto)[1])
    ]
    assert told[0] == told[1]
    return told[0]


def result_on_zeros(proto: onnx.ModelProto) -> np.ndarray:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": np.zeros((4, 8), np.float32)})
    return np.asarray(y)


@pytest.mark.parametrize(
    ("body", "note"),
    [
        (f"{NORM} y = Mul(n, w)", CONSTANT),
        ("y = LayerNormalization<epsilon=0.0>(x, w)", CONSTANT),
        ("q = Mul(x, x)  v = ReduceMean<axes=[-1]>(q)  s = Sqrt(v)  y = Div(x, s)", ZEROS),
    ],
    ids=["by hand", "one node", "rms"],
)
def test_norm_without_epsilon_is_noted_and_gives_nan(body: str, note: str) -> None:
    proto = model(body)
    assert notes(proto) == [note]
    assert np.isnan(result_on_zeros(proto)).all()
    assert np.isnan(result_on_zeros(optimize_norms(proto)[0])).all()


@pytest.mark.parametrize(
    "body",
    [
        f"{NORM} c = Greater(v, z)  y = Where(c, n, z)",
        f"{NORM} r = Mul(n, w)  c = IsNaN(r)  y = Where(c, z, r)",
        f"{VARIANCE} s = Sqrt(v)  t = Max(s, e)  y = Div(d, t)",
        f"{VARIANCE} a = Add(v, e)  s = Sqrt(a)  y = Div(d, s)",
    ],
    ids=["where", "nan to num", "clamped", "epsilon"],
)
def test_guarded_norm_is_not_noted_and_gives_a_number(body: str) -> None:
    proto = model(body)
    assert notes(proto) == []
    assert np.isfinite(result_on_zeros(proto)).all()
