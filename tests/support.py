"""What the tests share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime as ort


def run_onnxruntime(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray], optimized: bool = False) -> list[np.ndarray]:
    """The outputs of onnxruntime's CPU provider, its own optimizer off unless asked for, in a single thread."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    return [np.asarray(v) for v in session.run(None, {k: v for k, v in feeds.items() if k in wanted})]
