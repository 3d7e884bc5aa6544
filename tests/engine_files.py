"""Files about engines in the form that TensorRT's tools write, and the ONNX file that belongs to them.

The names of kernels and their lists of ONNX nodes are those of a TensorRT-RTX 1.7 engine of ``write_model``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx

BY_HAND = ("mean", "centered", "squared", "variance", "shifted", "root", "divided", "scaled", "out")
UNIT = "\x1f"


def write_model(path: Path) -> Path:
    """A LayerNorm by hand, a linear layer and a LayerNormalization: x (8, 16) to y (8, 4)."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        net (float[8, 16] x) => (float[8, 4] y) <int64[1] last = {-1}, float eps = {0.00001}> {
            mean_y = ReduceMean(x, last)
            centered_y = Sub(x, mean_y)
            squared_y = Mul(centered_y, centered_y)
            variance_y = ReduceMean(squared_y, last)
            shifted_y = Add(variance_y, eps)
            root_y = Sqrt(shifted_y)
            divided_y = Div(centered_y, root_y)
            scaled_y = Mul(divided_y, gamma)
            out_y = Add(scaled_y, beta)
            linear_y = Gemm(out_y, weight, bias)
            y = LayerNormalization<axis = -1>(linear_y, gamma2, beta2)
        }""")
    draw = np.random.default_rng(0)
    for name, shape in (("gamma", 16), ("beta", 16), ("weight", (16, 4)), ("bias", 4), ("gamma2", 4), ("beta2", 4)):
        value = draw.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    for node in model.graph.node:
        node.name = "ln" if node.op_type == "LayerNormalization" else node.output[0].removesuffix("_y")
    onnx.save(model, path)
    return path


def metadata(*nodes: str) -> str:
    """Metadata of a compiled kernel."""
    return UNIT.join(f"[ONNX Layer: {node}]" for node in nodes)


def tensor(name: str, stated: str = "Float") -> dict[str, Any]:
    """Input or output of a layer, in the form of TensorRT 10."""
    return {"Name": name, "Location": "Device", "Dimensions": [8, 16], "Format/Datatype": stated}


def layer(name: str, layer_type: str, inputs: list[Any], outputs: list[Any], **more: Any) -> dict[str, Any]:
    """Layer in the form of detailed verbosity."""
    return {"Name": name, "LayerType": layer_type, "Inputs": inputs, "Outputs": outputs, "StreamId": 0} | more


def compiled_layers() -> list[dict[str, Any]]:
    """Layers of the engine: each norm is one kernel."""
    return [
        layer(
            "__myl_MoveMeanSubMulMeanAddSqrtMulDivAdd_myl0_0",
            "kgen",
            [tensor("x"), tensor("__mye1_dconst")],
            [tensor("__myln_k_arg__bb1_2")],
            Metadata=metadata(*BY_HAND),
        ),
        layer(
            "__myl_FcAdd_myl0_1",
            "fusion",
            [tensor("__myln_k_arg__bb1_2")],
            [tensor("linear")],
            Metadata=metadata("linear"),
        ),
        layer(
            "__myl_MeanSubMulMeanAddSqrtDivMulAdd_myl0_2",
            "kgen",
            [tensor("linear")],
            [tensor("y")],
            Metadata=metadata("ln"),
        ),
    ]


def save(path: Path, document: Any) -> Path:
    """Write JSON."""
    path.write_text(json.dumps(document))
    return path


def info(layers: list[Any]) -> dict[str, Any]:
    """Layers as TensorRT 8.2 to 10 writes them."""
    return {"Layers": layers, "Bindings": ["x", "y"]}


def profile(times: dict[str, float]) -> list[dict[str, Any]]:
    """Times as trtexec writes them."""
    total = sum(times.values())
    records = [
        {"name": name, "timeMs": 100 * ms, "averageMs": ms, "medianMs": ms, "percentage": 100 * ms / total}
        for name, ms in times.items()
    ]
    return [{"count": 100}, *records]
