"""Residual add and RMSNorm over the last dim: sum = x + residual, y = RMSNorm(sum). Both are outputs, y first.

x, residual: (..., N), equal shapes; gamma: (N,); ``offset`` as in RMSNorm. The mean square is computed from the stored
(rounded) sum.
"""

import numpy as np
import triton
import triton.language as tl

from . import rms_norm
from ._launch import Op, constant_product, row_launch, row_tiles
from ._math import (
    half,
    inside,
    inverse_root,
    is_wide,
    load,
    load_sum,
    mean_square,
    row_mean_square,
    store,
    tile_rows,
    widened,
)


def reference(
    x: np.ndarray, residual: np.ndarray, gamma: np.ndarray, *, epsilon: float, offset: float
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the op in float64.

    Returns:
        (y, sum).
    """
    return rms_norm.reference(x + residual, gamma, epsilon=epsilon, axis=-1, offset=offset), x + residual


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    gamma_ptr,
    rows,
    n,
    y_ptr,
    sum_ptr,
    EPSILON: tl.constexpr,
    OFFSET: tl.constexpr,
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
            col = tl.arange(0, SIZE)[None, :]
            if LOOP:
                scale = inverse_root(
                    row_mean_square(x_ptr, residual_ptr, base, live, length, ROWS, SIZE, True), EPSILON
                )
                for start in range(0, length, SIZE):
                    at = start + col
                    mask = inside(live, at < length, ROWS)
                    x = load_sum(x_ptr, residual_ptr, base + at, mask, True)
                    store(sum_ptr, base + at, x, mask)
                    store(y_ptr, base + at, x * scale * (load(gamma_ptr, at, at < length) + OFFSET), mask)
            else:
                mask = inside(live, col < length, ROWS)
                x = load_sum(x_ptr, residual_ptr, base + col, mask, True)
                store(sum_ptr, base + col, x, mask)
                y = (
                    x
                    * inverse_root(mean_square(x, mask, length), EPSILON)
                    * (load(gamma_ptr, col, col < length) + OFFSET)
                )
                store(y_ptr, base + col, y, mask)


OP = Op(
    "AddRMSNorm",
    inputs=("x", "residual", "gamma"),
    types="TTPTT",
    attributes={"epsilon": float, "offset": float},
    tiles=lambda inputs, a: row_tiles(constant_product(inputs[0].shape[-1:])),
    launch=lambda inputs, a, tile: row_launch(
        add_rms_norm_kernel, inputs[0], -1, tile, {"EPSILON": a["epsilon"], "OFFSET": a["offset"]}
    ),
    reference=reference,
    outputs=("y", "sum"),
)
