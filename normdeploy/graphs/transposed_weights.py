"""Pass column-major weights to onnxruntime without a copy.

onnxruntime expects row-major matrices. But FusedMatMul and Gemm can transpose their second factor. With a row-major W,
x·Wᵀ sums the same products in the same order as MatMul does with the matrix Wᵀ.
"""

from __future__ import annotations

import numpy as np
import onnx

from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import iter_bodies
from ..storage.shared_weights import is_column_major
from ..types import Arrays

_FUSED = "com.microsoft"


def transpose_column_weights(light: onnx.ModelProto, arrays: Arrays) -> dict[str, np.ndarray]:
    """Transpose column-major weights whose readers all accept a transposed second factor.

    Args:
        light: model that refers to the weights; its nodes are changed to match.
        arrays: the weights by name.

    Returns: name → array, transposed if the readers were changed.
    """
    readers = _second_factor_readers(
        light, {name for name, array in arrays.items() if is_column_major(array) and array.dtype == np.float32}
    )
    if not readers:
        return dict(arrays)
    stated = {t.name: t for t in light.graph.initializer}
    for name, nodes in readers.items():
        stated[name].dims[:] = arrays[name].shape[::-1]
        for node in nodes:
            _transpose_operand(node)
    if all(o.domain != _FUSED for o in light.opset_import):
        light.opset_import.add(domain=_FUSED, version=1)
    return {name: array.T if name in readers else array for name, array in arrays.items()}


def _second_factor_readers(light: onnx.ModelProto, wanted: set[str]) -> dict[str, list[onnx.NodeProto]]:
    """Return the readers of each weight in ``wanted`` that is only a second factor of products in the main graph."""
    found: dict[str, list[onnx.NodeProto]] = {name: [] for name in wanted}
    # Body number 0 is the main graph.
    for number, body in enumerate(iter_bodies(light) if found else ()):
        for value in (*body.input, *body.output) if isinstance(body, onnx.GraphProto) else ():
            found.pop(value.name, None)
        for node in body.node:
            suits = number == 0 and is_standard(node) and node.op_type in ("MatMul", "Gemm")
            for place, name in enumerate(node.input):
                if name in found and suits and place == 1:
                    found[name].append(node)
                else:
                    found.pop(name, None)
    return {name: nodes for name, nodes in found.items() if nodes}


def _transpose_operand(node: onnx.NodeProto) -> None:
    if node.op_type == "MatMul":
        node.op_type = "FusedMatMul"
        node.domain = _FUSED
        node.attribute.append(onnx.helper.make_attribute("transB", 1))
        return
    given = next((a for a in node.attribute if a.name == "transB"), None)
    if given is None:
        node.attribute.append(onnx.helper.make_attribute("transB", 1))
    else:
        given.i = 1 - given.i
