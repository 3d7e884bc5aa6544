"""LayerNorm of few long rows, the second of two launches: y = (x − mean) / √(var + ε) · γ + β, with the statistics that
NormStatistics computed.

x: any shape, rows from ``axis`` on; statistics: (rows, splits, 2) float32, merged by Chan's formula; gamma, beta as in
LayerNorm; y: x's shape.
"""

from typing import Any

import numpy as np
import triton
import triton.language as tl

from . import layer_norm
from ._launch import Launch, Op, Tensor, Tile, cdiv, product, programs
from ._math import inverse_root, is_wide, load, merged_moments, parts, store, widened
from .layer_norm import affine


def reference(
    x: np.ndarray, statistics: np.ndarray, gamma: np.ndarray, beta: np.ndarray, *, epsilon: float, axis: int
) -> np.ndarray:
    """Compute the op from x alone, because the statistics follow from x.

    Returns:
        y.
    """
    return layer_norm.reference(x, gamma, beta, epsilon=epsilon, axis=axis)


@triton.jit
def layer_norm_apply_kernel(
    x_ptr,
    statistics_ptr,
    gamma_ptr,
    beta_ptr,
    rows,
    n,
    y_ptr,
    EPSILON: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # An empty batch still launches one program (`_launch.programs`).
    if rows == 0:
        return
    for WIDE in tl.static_range(2):
        if is_wide(n, x_ptr) == WIDE:
            length = widened(n, x_ptr, WIDE)
            blocks = parts(length, BLOCK)
            pid = tl.program_id(0)
            row = (pid // blocks).to(tl.int64)
            at = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
            mask = at < length
            mean, m2 = merged_moments(statistics_ptr, row, row < rows, length, SPLITS, 1)
            xhat = (load(x_ptr, row * length + at, mask) - mean) * inverse_root(m2 / length, EPSILON)
            store(y_ptr, row * length + at, affine(xhat, gamma_ptr, beta_ptr, at, at < length), mask)


def launch(inputs: list[Tensor], attributes: dict[str, Any], tile: Tile) -> Launch:
    """Make the launch of a tactic.

    Returns:
        the launch.
    """
    x, splits = inputs[0], inputs[1].shape[1]
    rows, n = product(x.shape[: attributes["axis"]]), product(x.shape[attributes["axis"] :])
    return Launch(
        layer_norm_apply_kernel,
        programs(product((rows, cdiv(n, tile.block)))),
        {"rows": rows, "n": n},
        {"EPSILON": attributes["epsilon"], "SPLITS": splits, "BLOCK": tile.block},
        tile.warps,
    )


OP = Op(
    "LayerNormApply",
    inputs=("x", "statistics", "gamma", "beta"),
    types="TFPPT",
    attributes={"epsilon": float, "axis": int},
    tiles=lambda inputs, a: [Tile(1, 2048, 8), Tile(1, 1024, 4), Tile(1, 4096, 16)],
    launch=launch,
    reference=reference,
)
