"""Residual add and LayerNorm over the last dim: sum = x + residual, y = LayerNorm(sum). Both are outputs, y first.

x, residual: (..., N), equal shapes; gamma, beta: (N,). The statistics are computed from the stored (rounded) sum, as
after an Add node.
"""

import numpy as np
import triton
import triton.language as tl

from . import layer_norm
from ._launch import Op, constant_product, row_launch, row_tiles
from ._math import centered, half, inside, inverse_root, is_wide, load_sum, row_moments, store, tile_rows, widened
from .layer_norm import affine


def reference(
    x: np.ndarray, residual: np.ndarray, gamma: np.ndarray, beta: np.ndarray, *, epsilon: float
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the op in float64.

    Returns:
        (y, sum).
    """
    return layer_norm.reference(x + residual, gamma, beta, epsilon=epsilon, axis=-1), x + residual


@triton.jit
def add_layer_norm_kernel(
    x_ptr,
    residual_ptr,
    gamma_ptr,
    beta_ptr,
    rows,
    n,
    y_ptr,
    sum_ptr,
    EPSILON: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOP: tl.constexpr,
):
    # An empty batch still launches one program (`_launch.programs`).
    if rows == 0:
        return
    for WIDE in tl.static_range(2):
        if is_wide(n, x_ptr) == WIDE:
            length = widened(n, x_ptr, WIDE)
            SIZE: tl.constexpr = BLOCK if WIDE or not LOOP else half(BLOCK)
            row, exists = tile_rows(rows, length, ROWS)
            base, live = (row * length)[:, None], exists[:, None]
            first = load_sum(x_ptr, residual_ptr, row * length, exists, True)[:, None]
            col = tl.arange(0, SIZE)[None, :]
            if LOOP:
                mean, m2 = row_moments(x_ptr, residual_ptr, base, live, first, length, ROWS, SIZE, True)
                scale = inverse_root(m2 / length, EPSILON)
                # The sum is computed again, because a value that another thread stored could be read only after a
                # barrier.
                for start in range(0, length, SIZE):
                    at = start + col
                    mask = inside(live, at < length, ROWS)
                    x = load_sum(x_ptr, residual_ptr, base + at, mask, True)
                    store(sum_ptr, base + at, x, mask)
                    store(y_ptr, base + at, affine((x - mean) * scale, gamma_ptr, beta_ptr, at, at < length), mask)
            else:
                mask = inside(live, col < length, ROWS)
                x = load_sum(x_ptr, residual_ptr, base + col, mask, True)
                store(sum_ptr, base + col, x, mask)
                d, m2 = centered(x, first, mask, length, 1)
                store(
                    y_ptr,
                    base + col,
                    affine(d * inverse_root(m2 / length, EPSILON), gamma_ptr, beta_ptr, col, col < length),
                    mask,
                )


OP = Op(
    "AddLayerNorm",
    inputs=("x", "residual", "gamma", "beta"),
    types="TTPPTT",
    attributes={"epsilon": float},
    tiles=lambda inputs, a: row_tiles(constant_product(inputs[0].shape[-1:])),
    launch=lambda inputs, a, tile: row_launch(add_layer_norm_kernel, inputs[0], -1, tile, {"EPSILON": a["epsilon"]}),
    reference=reference,
    outputs=("y", "sum"),
)
