"""Recognize norm nodes that are in ONNX's own domain although the standard does not define them, or no longer defines
them.

Other tools write such nodes, so they must be readable. onnxruntime's optimizer writes LayerNormalization below opset 17
and SimplifiedLayerNormalization. TensorRT's converters write its plugins into ONNX's own domain. The GroupNormalization
of opset 18 was deprecated from the start. `normdeploy.contrib.contrib_ops` defines what these nodes compute.
"""

from __future__ import annotations

from ..norms.norm_table import STANDARD, OpOwner, rows_of_owner

_OLD = rows_of_owner(OpOwner.ONNX_18)
_PLUGINS = rows_of_owner(OpOwner.TENSORRT)
# Ops that onnxruntime adds to ONNX's domain under names that ONNX itself does not use.
_ADDED = {op for op, row in rows_of_owner(OpOwner.ONNXRUNTIME).items() if "" in row.domains}


def is_nonstandard_norm(op: str, opset: int) -> bool:
    """Return True if ONNX's own domain does not define norm op ``op`` at ``opset``.

    Args:
        op: op type of a node of ONNX's own domain.
        opset: opset of ONNX's domain at that node.

    Returns:
        False for ops that are standard at ``opset`` and for ops that are not norms.
    """
    if op in STANDARD and opset >= STANDARD[op].since:
        return False
    if op in _OLD:
        return opset >= _OLD[op].since
    return op in _PLUGINS or op in _ADDED
