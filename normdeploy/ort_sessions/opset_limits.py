"""Find the newest opset that the installed onnxruntime loads."""

from __future__ import annotations

from functools import cache

import onnx
import onnxruntime
from onnx import TensorProto, helper

# Oldest opset to try. Every supported onnxruntime loads it.
_OLDEST = 18


def describe_unloadable_opset(opset: int) -> str:
    """Describe why the installed onnxruntime loads no file of this opset.

    Returns:
        for example "onnxruntime 1.31.1 loads opsets up to 26, and the file has opset 28"; "" if it loads the opset.
    """
    if _loads_opset(opset):
        return ""
    # The search goes up, because a broken file may claim any opset.
    newest = _OLDEST
    while _loads_opset(newest + 1):
        newest += 1
    return f"onnxruntime {onnxruntime.__version__} loads opsets up to {newest}, and the file has opset {opset}"


@cache
def _loads_opset(opset: int) -> bool:
    """Load a file that contains only an Identity node."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "probe",
        [value],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )
    probe = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    probe.ir_version = onnx.helper.find_min_ir_version_for(list(probe.opset_import), ignore_unknown=True)
    options = onnxruntime.SessionOptions()
    # Fatal errors alone are logged, because the failure is the answer.
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:
        # onnxruntime's exceptions share no base class.
        return False
    return True
