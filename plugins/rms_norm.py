"""RMSNorm over the dims from ``axis`` on (Zhang, Sennrich 2019; ONNX RMSNormalization): y = x / √(mean(x²) + ε) ·
(offset + γ).

``offset`` is 0, or 1 as in Gemma. x: any shape; gamma: one number for each element of a row; y: x's shape. The mean of
the squares is computed as a plain sum, because squares do not cancel.
"""

import numpy as np
import triton
import triton.language as tl

from ._launch import Op, constant_product, row_launch, row_tiles
from ._math import half, inside, inverse_root, is_wide, load, mean_square, row_mean_square, store, tile_rows, widened


def reference(x: np.ndarray, gamma: np.ndarray, *, epsilon: float, axis: int, offset: float) -> np.ndarray:
    """Compute the op in float64.

    Returns:
        y.
    """
    axes = tuple(range(axis % x.ndim, x.ndim))
    return x / np.sqrt((x * x).mean(axes, keepdims=True) + epsilon) * (offset + gamma.reshape(x.shape[axis % x.ndim :]))


@triton.jit
def rms_norm_kernel(
    x_ptr,
    gamma_ptr,
    rows,
    n,
    y_ptr,
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
                scale = inverse_root(row_mean_square(x_ptr, x_ptr, base, live, length, ROWS, SIZE, False), EPSILON)
                for start in range(0, length, SIZE):
                    at = start + col
                    mask = inside(live, at < length, ROWS)
                    y = load(x_ptr, base + at, mask) * scale * (load(gamma_ptr, at, at < length) + OFFSET)
                    store(y_ptr, base + at, y, mask)
            else:
                mask = inside(live, col < length, ROWS)
                x = load(x_ptr, base + col, mask)
                y = (
                    x
                    * inverse_root(mean_square(x, mask, length), EPSILON)
                    * (load(gamma_ptr, col, col < length) + OFFSET)
                )
                store(y_ptr, base + col, y, mask)


OP = Op(
    "RMSNorm",
    inputs=("x", "gamma"),
    types="TPT",
    attributes={"epsilon": float, "axis": int, "offset": float},
    tiles=lambda inputs, a: row_tiles(constant_product(inputs[0].shape[a["axis"] :])),
    launch=lambda inputs, a, tile: row_launch(
        rms_norm_kernel, inputs[0], a["axis"], tile, {"EPSILON": a["epsilon"], "OFFSET": a["offset"]}
    ),
    reference=reference,
)
