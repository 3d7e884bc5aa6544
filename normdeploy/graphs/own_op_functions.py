"""Ops whose function body travels in the file, in a graph: this project's own (`normdeploy.norms.normdeploy_ops`),
by name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
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
    "evaluate_reference",
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


def evaluate_reference(
    op: str,
    x: np.ndarray,
    scale: np.ndarray | float,
    bias: np.ndarray | float = 0.0,
    *,
    axes: Sequence[int],
    epsilon: float,
    ddof: int = 0,
) -> np.ndarray:
    """A norm of ours, neither of `JOINED` nor ChannelLayerNorm, by its formula in float64.

    ``x``: any shape; ``axes``: negative; the rest broadcasts to x.
    """
    x = np.asarray(x, np.float64)
    if op == "L2Norm":
        return np.asarray(x / np.maximum(np.sqrt(np.square(x).sum(axis=tuple(axes), keepdims=True)), epsilon) * scale)
    if op == "RMSNorm":
        return np.asarray(x / np.sqrt(np.square(x).mean(axis=tuple(axes), keepdims=True) + epsilon) * scale)
    d = x - x.mean(axis=tuple(axes), keepdims=True)
    variance = x.var(axis=tuple(axes), keepdims=True, ddof=ddof)
    if op == "LayerNorm":
        root = np.sqrt(variance + epsilon)
    else:
        root = np.sqrt(variance) + epsilon
    return np.asarray(d / root * scale + bias)
