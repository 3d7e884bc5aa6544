"""LayerNorm over the dims from ``axis`` on (Ba, Kiros, Hinton 2016; ONNX LayerNormalization): y = (x − mean) / √(var +
ε) · γ + β.

x: any shape; var = M2 / (n − ``ddof``), with ddof 0 as in the paper, or 1 (torch.var); gamma, beta: one number for each
element of a row; y: x's shape. Rows of one element with ddof 1 give NaN, as in torch.
"""

import numpy as np
import triton
import triton.language as tl

from ._launch import Op, constant_product, row_launch, row_tiles
from ._math import (
    centered,
    half,
    inside,
    inverse_root,
    is_wide,
    load,
    load_column,
    row_moments,
    store,
    tile_rows,
    widened,
)


def reference(
    x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, *, epsilon: float, axis: int, ddof: int = 0
) -> np.ndarray:
    """Compute the op in float64.

    Returns:
        y.
    """
    axes = tuple(range(axis % x.ndim, x.ndim))
    d = x - x.mean(axes, keepdims=True)
    count = np.float64(np.prod([x.shape[a] for a in axes]) - ddof)
    row = x.shape[axis % x.ndim :]
    with np.errstate(divide="ignore", invalid="ignore"):
        return d / np.sqrt((d * d).sum(axes, keepdims=True) / count + epsilon) * gamma.reshape(row) + beta.reshape(row)


@triton.jit
def affine(xhat, gamma_ptr, beta_ptr, col, mask):
    """Apply gamma and beta.

    Returns:
        float32.
    """
    return xhat * load(gamma_ptr, col, mask) + load(beta_ptr, col, mask)


@triton.jit
def degrees(n, DDOF: tl.constexpr):
    """Compute n − ddof as a float32 ``[1, 1]``. If n − ddof is 0, a division by this tensor gives NaN, whereas a
    division by a constant would be an error.

    Returns:
        float32 ``[1, 1]``.
    """
    return tl.zeros([1, 1], tl.float32) + n - DDOF


@triton.jit
def layer_norm_kernel(
    x_ptr,
    gamma_ptr,
    beta_ptr,
    rows,
    n,
    y_ptr,
    EPSILON: tl.constexpr,
    DDOF: tl.constexpr,
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
            first = load_column(x_ptr, row * length, exists)
            col = tl.arange(0, SIZE)[None, :]
            count = degrees(length, DDOF)
            if LOOP:
                mean, m2 = row_moments(x_ptr, x_ptr, base, live, first, length, ROWS, SIZE, False)
                scale = inverse_root(m2 / count, EPSILON)
                for start in range(0, length, SIZE):
                    at = start + col
                    mask = inside(live, at < length, ROWS)
                    y = affine((load(x_ptr, base + at, mask) - mean) * scale, gamma_ptr, beta_ptr, at, at < length)
                    store(y_ptr, base + at, y, mask)
            else:
                mask = inside(live, col < length, ROWS)
                d, m2 = centered(load(x_ptr, base + col, mask), first, mask, length, 1)
                y = affine(d * inverse_root(m2 / count, EPSILON), gamma_ptr, beta_ptr, col, col < length)
                store(y_ptr, base + col, y, mask)


OP = Op(
    "LayerNorm",
    inputs=("x", "gamma", "beta"),
    types="TPPT",
    attributes={"epsilon": float, "axis": int, "ddof": int},
    tiles=lambda inputs, a: row_tiles(constant_product(inputs[0].shape[a["axis"] :])),
    launch=lambda inputs, a, tile: row_launch(
        layer_norm_kernel, inputs[0], a["axis"], tile, {"EPSILON": a["epsilon"], "DDOF": a["ddof"]}
    ),
    reference=reference,
    required={"ddof": (0, 1)},
)
