"""InstanceNorm (Ulyanov, Vedaldi, Lempitsky 2016; ONNX InstanceNormalization). Each channel of each sample is
normalized separately, with the biased variance.

x: (N, C, ...) of rank 3 or more; gamma, beta: (C,); y = (x − mean) / √(var + ε) · γ[c] + β[c], with x's shape.
"""

import numpy as np
import triton
import triton.language as tl

from ._launch import Launch, Op, Tensor, Tile, constant_product, row_launch, row_tiles
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


def reference(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, *, epsilon: float) -> np.ndarray:
    """Compute the op in float64.

    Returns:
        y.
    """
    axes = tuple(range(2, x.ndim))
    d = x - x.mean(axes, keepdims=True)
    per_channel = (-1,) + (1,) * len(axes)
    return d / np.sqrt((d * d).mean(axes, keepdims=True) + epsilon) * gamma.reshape(per_channel) + beta.reshape(
        per_channel
    )


@triton.jit
def instance_norm_kernel(
    x_ptr,
    gamma_ptr,
    beta_ptr,
    rows,
    n,
    channels,
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
            channel = row % positive(channels)
            gamma = load_column(gamma_ptr, channel, exists)
            beta = load_column(beta_ptr, channel, exists)
            first = load_column(x_ptr, row * length, exists)
            col = tl.arange(0, SIZE)[None, :]
            if LOOP:
                mean, m2 = row_moments(x_ptr, x_ptr, base, live, first, length, ROWS, SIZE, False)
                scale = inverse_root(m2 / length, EPSILON) * gamma
                for start in range(0, length, SIZE):
                    at = start + col
                    mask = inside(live, at < length, ROWS)
                    store(y_ptr, base + at, (load(x_ptr, base + at, mask) - mean) * scale + beta, mask)
            else:
                mask = inside(live, col < length, ROWS)
                d, m2 = centered(load(x_ptr, base + col, mask), first, mask, length, 1)
                store(y_ptr, base + col, d * (inverse_root(m2 / length, EPSILON) * gamma) + beta, mask)


def launch(inputs: list[Tensor], attributes: dict, tile: Tile) -> Launch:
    """Make the launch of a tactic.

    Returns:
        the launch.
    """
    x = inputs[0]
    return row_launch(instance_norm_kernel, x, 2, tile, {"EPSILON": attributes["epsilon"]}, channels=x.shape[1])


OP = Op(
    "InstanceNorm",
    inputs=("x", "gamma", "beta"),
    types="TPPT",
    attributes={"epsilon": float},
    tiles=lambda inputs, a: row_tiles(constant_product(inputs[0].shape[2:])),
    launch=launch,
    reference=reference,
)
