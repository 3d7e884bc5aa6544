"""What the tests share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime as ort

from normdeploy.ort_sessions.session import EXACT_INTEGERS

LAYER_NORM = """g (float[2, 4] x) => (float[2, 4] y) <int64[1] axes = {-1}, float e = {1e-5}> {
    m = ReduceMean<keepdims = 1>(x, axes)  d = Sub(x, m)  s = Mul(d, d)  v = ReduceMean<keepdims = 1>(s, axes)
    w = Add(v, e)  r = Sqrt(w)  y = Div(d, r)
}"""
"""A layer norm by hand, for ``parsed``."""


def parsed(text: str, opset: int = 21, ir: int = 10, **constants: np.ndarray) -> onnx.ModelProto:
    """A graph written as text, with these initializers besides."""
    proto = onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}]> {text}')
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    return proto


def run_onnxruntime(
    proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray], optimized: bool = False
) -> list[np.ndarray]:
    """The outputs of onnxruntime's CPU provider, its own optimizer off unless asked for, in a single thread."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    for name, value in EXACT_INTEGERS.items():
        options.add_session_config_entry(name, value)
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    return [np.asarray(v) for v in session.run(None, {k: v for k, v in feeds.items() if k in wanted})]
