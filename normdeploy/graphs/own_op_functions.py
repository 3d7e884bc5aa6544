"""Ops whose function body travels in the file, in a graph: this project's own (`normdeploy.norms.normdeploy_ops`),
by name."""

from __future__ import annotations

import onnx

from ..norms import function_bodies
from ..norms.function_bodies import VERSION
from ..norms.norm_table import DOMAIN, OURS

__all__ = [
    "DOMAIN",
    "JOINED",
    "OLDEST",
    "OPS",
    "VERSION",
    "WITHOUT_KERNEL",
    "oldest_opset",
    "own_op_body",
]

OPS = frozenset(OURS)
JOINED = frozenset(op for op, row in OURS.items() if row.joined)
# in TensorRT too their bodies run
WITHOUT_KERNEL = frozenset(op for op, row in OURS.items() if not row.plugin)
# the first opset for which bodies are written, but for those that need a newer op
OLDEST = min(row.since for row in OURS.values())


def oldest_opset(op: str) -> int:
    """The lowest opset for which one of our ops has a body."""
    return OURS[op].since


def own_op_body(op: str, opset: int) -> onnx.FunctionProto:
    """The function of one of our ops for a file of the given opset (`oldest_opset` or above); don't write into it."""
    return function_bodies.norm_function_body(OURS[op], opset)
