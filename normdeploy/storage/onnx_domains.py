"""Recognize ONNX's own domain, which has the two names "" and "ai.onnx", and read its opset.

This module imports nothing, so that every layer may use it.
"""

from __future__ import annotations

from typing import Any

STANDARD = ("", "ai.onnx")


def is_standard(node: Any) -> bool:
    """Return True if ``node`` belongs to ONNX's own domain.

    Args:
        node: a NodeProto, or a node of onnx-graphsurgeon, whose domain may be None.

    Returns:
        True for the domains "", "ai.onnx" and None.
    """
    return (node.domain or "") in STANDARD


def qualified_op(node: Any) -> str:
    """Return the op of a NodeProto with its domain, as messages name it.

    Returns:
        for example "Add" or "com.microsoft.Gelu"; ONNX's own domain is left out.
    """
    if is_standard(node):
        return str(node.op_type)
    return f"{node.domain}.{node.op_type}"


def default_domain_opset(holder: Any, missing: int = 1) -> int:
    """Return the opset of a ModelProto or FunctionProto.

    Returns:
        the version of ONNX's own domain; ``missing`` if ``holder`` does not import that domain.
    """
    return int(next((o.version for o in holder.opset_import if o.domain in STANDARD), missing))
