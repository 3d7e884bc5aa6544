"""Sessions run files that onnxruntime runs, whatever the processor."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser

from normdeploy.sessions import open_session


def test_scales_of_channels_without_zero_points_run() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> net (float[2, 3] x) => (float[2, 2] y)
        <int8[3, 2] codes = {1, 2, 3, 4, 5, 100}, float[2] scale = {0.5, 2}> {
            w = DequantizeLinear <axis = 1> (codes, scale)
            y = MatMul (x, w)
        }"""
    session = open_session(onnx.parser.parse_model(text).SerializeToString(), optimize=True)
    (y,) = session.run(None, {"x": np.ones((2, 3), np.float32)})
    # (1 + 3 + 5) / 2 and (2 + 4 + 100) * 2, which float32 holds.
    assert y.tolist() == [[4.5, 212.0]] * 2
