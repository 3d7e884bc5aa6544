"""ONNX's own domain, which has two names, and its opset. Imports nothing, so that every layer may ask it."""

from __future__ import annotations

from typing import Any

STANDARD = ("", "ai.onnx")


def is_standard(node: Any) -> bool:
    """Whether a NodeProto, or a node of onnx-graphsurgeon, whose domain may be None, is of ONNX's own domain."""
    return (node.domain or "") in STANDARD


def qualified_op(node: Any) -> str:
    """A NodeProto's op as messages name it: "Add", "com.microsoft.Gelu"."""
    if is_standard(node):
        return str(node.op_type)
    return f"{node.domain}.{node.op_type}"


def default_domain_opset(holder: Any, missing: int = 1) -> int:
    """The opset of a ModelProto or FunctionProto: the version of ONNX's own domain; ``missing`` without one."""
    return int(next((o.version for o in holder.opset_import if o.domain in STANDARD), missing))
