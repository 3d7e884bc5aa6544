"""Norm nodes in ONNX's own domain that the standard does not define, or no longer defines. Other tools write them; they
are read.

onnxruntime's optimizer leaves LayerNormalization below opset 17 and SimplifiedLayerNormalization, TensorRT's converters
leave plugins, and opset 18 had a GroupNormalization that was deprecated at birth. What they mean,
`normdeploy.contrib.contrib_ops` says.
"""

from __future__ import annotations

from ..norms.norm_table import STANDARD, OpOwner, rows_of_owner

_OLD = rows_of_owner(OpOwner.ONNX_18)
_PLUGINS = rows_of_owner(OpOwner.TENSORRT)
# by onnxruntime, where ONNX has none of that name
_ADDED = {op for op, row in rows_of_owner(OpOwner.ONNXRUNTIME).items() if "" in row.domains}


def is_nonstandard_norm(op: str, opset: int) -> bool:
    """Whether a node of ONNX's own domain is such a norm.

    Args:
        op: its op type.
        opset: of ONNX's domain, where the node stands.
    """
    if op in STANDARD and opset >= STANDARD[op].since:
        return False
    if op in _OLD:
        return opset >= _OLD[op].since
    return op in _PLUGINS or op in _ADDED
