"""LayerNorm without gamma and beta, modulated by data (adaLN of DiT, Peebles and Xie 2023): y = x̂ · (1 + scale) +
shift, over the last dim.

x: (B, S, D); scale, shift: (B, 1, D), one row that applies to all S rows of a sample; y: x's shape.
"""

import numpy as np
import triton
import triton.language as tl

from ._launch import Op, Tensor, Tile, constant_product, product, row_launch, row_tiles
from ._math import (
    centered,
    half,
    inside,
    inverse_root,
    is_wide,
    load,
    load_column,
    positive,
    row_moments,
    store,
    tile_rows,
    widened,
)


def reference(x: np.ndarray, scale: np.ndarray, shift: np.ndarray, *, epsilon: float) -> np.ndarray:
    """Compute the op in float64.

    Returns:
        y.
    """
    d = x - x.mean(-1, keepdims=True)
    return d / np.sqrt((d * d).mean(-1, keepdims=True) + epsilon) * (1 + scale) + shift


@triton.jit
def modulate(xhat, scale_ptr, shift_ptr, offset, mask):
    """Apply scale and shift.

    Returns:
        float32.
    """
    return xhat * (1.0 + load(scale_ptr, offset, mask)) + load(shift_ptr, offset, mask)


@triton.jit
def modulated_layer_norm_kernel(
    x_ptr,
    scale_ptr,
    shift_ptr,
    rows,
    n,
    rows_per_sample,
    y_ptr,
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
            sample = ((row // positive(rows_per_sample)) * length)[:, None]
            first = load_column(x_ptr, row * length, exists)
            col = tl.arange(0, SIZE)[None, :]
            if LOOP:
                mean, m2 = row_moments(x_ptr, x_ptr, base, live, first, length, ROWS, SIZE, False)
                inverse = inverse_root(m2 / length, EPSILON)
                for start in range(0, length, SIZE):
                    at = start + col
                    mask = inside(live, at < length, ROWS)
                    xhat = (load(x_ptr, base + at, mask) - mean) * inverse
                    store(y_ptr, base + at, modulate(xhat, scale_ptr, shift_ptr, sample + at, mask), mask)
            else:
                mask = inside(live, col < length, ROWS)
                d, m2 = centered(load(x_ptr, base + col, mask), first, mask, length, 1)
                y = modulate(d * inverse_root(m2 / length, EPSILON), scale_ptr, shift_ptr, sample + col, mask)
                store(y_ptr, base + col, y, mask)


def launch(inputs: list[Tensor], attributes: dict, tile: Tile):
    """Make the launch of a tactic.

    Returns:
        the launch.
    """
    x = inputs[0]
    constants = {"EPSILON": attributes["epsilon"]}
    return row_launch(modulated_layer_norm_kernel, x, -1, tile, constants, rows_per_sample=product(x.shape[1:-1]))


OP = Op(
    "ModulatedLayerNorm",
    inputs=("x", "scale", "shift"),
    types="TTTT",
    attributes={"epsilon": float},
    tiles=lambda inputs, a: row_tiles(constant_product(inputs[0].shape[-1:]), heavy=True),
    launch=launch,
    reference=reference,
)
