"""GroupNormalization as two passes is the operator of both opsets, and keeps its digits at a large mean."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

from normdeploy.graphs.two_pass_group_norm import expand_group_norms
from normdeploy.ort_sessions.session import open_session

GROUPS, SPATIAL, EPSILON = 2, (3, 5), 0.01
ROUNDING = 2.0**-23
TEXT = """<ir_version: 8, opset_import: ["": OPSET]>
net (float[n, 6, h, w] x, float[FACTORS] scale, float[FACTORS] bias) => (float[n, 6, h, w] y) {
    y = GroupNormalization <num_groups = 2, epsilon = 0.01> (x, scale, bias)
}"""


def expected(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The formula of the operator's page in float64."""
    groups = x.astype(np.float64).reshape(len(x), GROUPS, -1)
    normal = (groups - groups.mean(-1, keepdims=True)) / np.sqrt(groups.var(-1, keepdims=True) + EPSILON)
    lines = normal.reshape(len(x), len(scale), -1)
    return (lines * scale[:, None] + bias[:, None]).reshape(x.shape)


@pytest.mark.parametrize(("opset", "factors"), [(18, GROUPS), (21, 6)])
@pytest.mark.parametrize("offset", [0.0, 3000.0])
def test_two_passes_are_the_operator(opset: int, factors: int, offset: float) -> None:
    proto = onnx.parser.parse_model(TEXT.replace("OPSET", str(opset)).replace("FACTORS", str(factors)))
    rng = np.random.default_rng(opset)
    feeds = {
        "x": (rng.normal(size=(2, 6, *SPATIAL)) + offset).astype(np.float32),
        "scale": rng.normal(size=factors).astype(np.float32),
        "bias": rng.normal(size=factors).astype(np.float32),
    }
    made = expand_group_norms(proto)
    assert made is not None
    (y,) = open_session(made.SerializeToString()).run(None, feeds)
    right = expected(feeds["x"], feeds["scale"], feeds["bias"])
    # Half a rounding of the mean moves x − mean by that part of the offset; some ten operations round the rest.
    allowed = ROUNDING * (offset + 16) * (np.abs(right).max() + np.abs(feeds["scale"]).max())
    assert np.abs(y - right).max() <= allowed


def test_a_file_without_the_operator_is_left() -> None:
    assert (
        expand_group_norms(
            onnx.parser.parse_model(
                '<ir_version: 8, opset_import: ["": 21]> n (float[2] x) => (float[2] y) { y = Relu (x) }'
            )
        )
        is None
    )
