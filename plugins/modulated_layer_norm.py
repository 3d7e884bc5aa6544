"""LayerNorm without affine, modulated by data (adaLN of DiT, Peebles and Xie 2023): y = x̂ · (1 + scale) + shift, over
the last dim.

x: (B, S, D); scale, shift: (B, 1, D), one row for all S rows of a sample; y like x.
"""

import numpy as np
import triton
import triton.language as tl

from ._launch import Op, Tensor, Tile, constant_product, product, row_launch, row_tiles
from ._math import centered, inverse_root, load, load_column, positive, row_moments, store, tile_rows


def reference(x: np.ndarray, scale: np.ndarray, shift: np.ndarray, *, epsilon: float) -> np.ndarray:
    d = x - x.mean(-1, keepdims=True)
    return d / np.sqrt((d * d).mean(-1, keepdims=True) + epsilon) * (1 + scale) + shift


@triton.jit
def modulate(xhat, scale_ptr, shift_ptr, offset, mask):
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
    row, exists = tile_rows(rows, n, ROWS)
    base, live = (row * n)[:, None], exists[:, None]
    sample = ((row // positive(rows_per_sample)) * n)[:, None]
    first = load_column(x_ptr, row * n, exists)
    col = tl.arange(0, BLOCK)[None, :]
    if LOOP:
        mean, m2 = row_moments(x_ptr, x_ptr, base, live, first, n, ROWS, BLOCK, False)
        inverse = inverse_root(m2 / n, EPSILON)
        for start in range(0, n, BLOCK):
            at = start + col
            mask = live & (at < n)
            xhat = (load(x_ptr, base + at, mask) - mean) * inverse
            store(y_ptr, base + at, modulate(xhat, scale_ptr, shift_ptr, sample + at, mask), mask)
    else:
        mask = live & (col < n)
        d, m2 = centered(load(x_ptr, base + col, mask), first, mask, n, 1)
        y = modulate(d * inverse_root(m2 / n, EPSILON), scale_ptr, shift_ptr, sample + col, mask)
        store(y_ptr, base + col, y, mask)


def launch(inputs: list[Tensor], attributes: dict, tile: Tile):
    x = inputs[0]
    constants = {"EPSILON": attributes["epsilon"]}
    return row_launch(modulated_layer_norm_kernel, x, -1, tile, constants, rows_per_sample=product(x.shape[1:-1]))


OP = Op(
    "ModulatedLayerNorm",
    inputs=("x", "scale", "shift"),
    types="TTTT",
    attributes={"epsilon": float},
    tiles=lambda inputs, a: row_tiles(constant_product(inputs[0].shape[-1:])),
    launch=launch,
    reference=reference,
)
