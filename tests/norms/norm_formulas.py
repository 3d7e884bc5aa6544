"""Formulas of our norms in float64, independent of the function bodies that tests compare with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def norm_by_formula(
    op: str,
    x: np.ndarray,
    scale: np.ndarray | float,
    bias: np.ndarray | float = 0.0,
    *,
    axes: Sequence[int],
    epsilon: float,
    ddof: int = 0,
) -> np.ndarray:
    """Compute an own op that normalizes ``x``, of any shape, over ``axes``; the rest broadcasts to x.

    Raises:
        ValueError: no formula of ``op`` is written here.
    """
    x = np.asarray(x, np.float64)
    over = tuple(axes)
    if op == "L2Norm":
        return np.asarray(x / np.maximum(np.sqrt(np.square(x).sum(axis=over, keepdims=True)), epsilon) * scale)
    rms = np.sqrt(np.square(x).mean(axis=over, keepdims=True))
    if op == "OuterRMSNorm":
        return np.asarray(x / (rms + epsilon) * scale)
    if op == "ClampedRMSNorm":
        return np.asarray(x / np.maximum(rms, epsilon) * scale)
    if op == "RMSNorm":
        return np.asarray(x / np.sqrt(np.square(x).mean(axis=over, keepdims=True) + epsilon) * scale)
    variance = x.var(axis=over, keepdims=True, ddof=ddof)
    if op == "SimpleNorm":
        return np.asarray(x / np.sqrt(variance + epsilon) * scale)
    if op == "LayerNorm":
        deviation = np.sqrt(variance + epsilon)
    elif op == "StdNorm":
        deviation = np.sqrt(variance) + epsilon
    else:
        raise ValueError(f"no formula of {op} is written here")
    return np.asarray((x - x.mean(axis=over, keepdims=True)) / deviation * scale + bias)
