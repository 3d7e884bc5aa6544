"""Small graphs to be made half precision, and what is asked of the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from normdeploy.findings.precision_report import PrecisionReport
from normdeploy.precision.emulated_half import emulate_half
from tests.support import run_onnxruntime


def text(
    body: str, inputs: str = "float[2,4] x", outputs: str = "float[2,4] y", opset: int = 21, **weights: Any
) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> g ({inputs}) => ({outputs}) {{ {body} }}'
    )
    for name, value in weights.items():
        value = np.asarray(value)
        proto.graph.initializer.append(
            numpy_helper.from_array(value.astype(np.float32) if value.dtype == np.float64 else value, name)
        )
    onnx.checker.check_model(proto, full_check=True)
    return proto


X = np.array([[1, -2, 3, 0.5], [0.25, 4, -1, 2]], np.float32)


def types(proto: onnx.ModelProto) -> dict[str, str]:
    """Tensor -> its type."""
    inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True)
    held = {t.name: t.data_type for t in proto.graph.initializer}
    values = [*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output]
    kinds = held | {v.name: v.type.tensor_type.elem_type for v in values}
    return {name: onnx.helper.tensor_dtype_to_np_dtype(kind).name for name, kind in kinds.items()}


def node(proto: onnx.ModelProto, op: str) -> onnx.NodeProto:
    return next(n for n in proto.graph.node if n.op_type == op)


def reasons(account: PrecisionReport) -> dict[str, str]:
    """Op -> kind of its island."""
    return {island.op: island.kind for island in account.islands}


def runs(proto: onnx.ModelProto, to: str, feeds: Mapping[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
    """The outputs by runtime; ``feeds`` are float32."""
    found = {"stepwise": run_onnxruntime(emulate_half(proto), feeds)}
    if to == "fp16":
        half = {k: v.astype(np.float16) if v.dtype == np.float32 else v for k, v in feeds.items()}
        found |= {f"onnxruntime, optimizer {on}": run_onnxruntime(proto, half, optimized=on) for on in (False, True)}
    return found
