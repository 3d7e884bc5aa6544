"""Give access to normdeploy's own ops and their function bodies by name (`normdeploy.norms.normdeploy_ops`)."""

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
# Own ops without a plugin. TensorRT runs their function bodies.
WITHOUT_KERNEL = frozenset(op for op, row in OURS.items() if not row.plugin)
# Lowest opset for which any body is written. Bodies that use a newer op need a higher opset.
OLDEST = min(row.since for row in OURS.values())


def oldest_opset(op: str) -> int:
    """Return the lowest opset for which one of normdeploy's own ops has a body.

    Returns: the opset, for example 17.
    """
    return OURS[op].since


def own_op_body(op: str, opset: int) -> onnx.FunctionProto:
    """Build the function of one of normdeploy's own ops for a file of the given opset.

    Args:
        opset: `oldest_opset` or above.

    Returns: a shared function; don't modify it.
    """
    return function_bodies.norm_function_body(OURS[op], opset)
