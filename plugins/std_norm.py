"""Norm of "The Annotated Transformer", with ε outside the root: y = (x − mean) / (std + ε) · γ + β over dims from
``axis`` on.

std = √(M2 / (n − ddof)), ``ddof`` 1 (torch's std) or 0. x: any shape; gamma, beta: one number for each element of a
row; y: x's shape. Rows of one element with ddof 1 give NaN, as in torch. No standard ONNX op computes this.
"""

import numpy as np
import triton
import triton.language as tl

from ._launch import Op, constant_product, row_launch, row_tiles
from ._math import centered, half, inside, is_wide, load, load_column, row_moments, store, tile_rows, widened
from .layer_norm import affine, degrees


def reference(
    x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, *, epsilon: float, axis: int, ddof: int
) -> np.ndarray:
    """Compute the op in float64.

    Returns:
        y.
    """
    axes, row = tuple(range(axis % x.ndim, x.ndim)), x.shape[axis % x.ndim :]
    d = x - x.mean(axes, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        std = np.sqrt((d * d).sum(axes, keepdims=True) / np.float64(np.prod(row) - ddof))
        return d / (std + epsilon) * gamma.reshape(row) + beta.reshape(row)


@triton.jit
def inverse_std(m2, count, EPSILON: tl.constexpr):
    """Compute 1 / (√(M2 / count) + ε).

    Returns:
        float32; 0/0, a NaN, if the count is 0.
    """
    return tl.div_rn(tl.full([1, 1], 1.0, tl.float32), tl.sqrt_rn(m2 / count) + EPSILON)


@triton.jit
def std_norm_kernel(
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
                scale = inverse_std(m2, count, EPSILON)
                for start in range(0, length, SIZE):
                    at = start + col
                    mask = inside(live, at < length, ROWS)
                    y = affine((load(x_ptr, base + at, mask) - mean) * scale, gamma_ptr, beta_ptr, at, at < length)
                    store(y_ptr, base + at, y, mask)
            else:
                mask = inside(live, col < length, ROWS)
                d, m2 = centered(load(x_ptr, base + col, mask), first, mask, length, 1)
                y = affine(d * inverse_std(m2, count, EPSILON), gamma_ptr, beta_ptr, col, col < length)
                store(y_ptr, base + col, y, mask)


OP = Op(
    "StdNorm",
    inputs=("x", "gamma", "beta"),
    types="TPPT",
    attributes={"epsilon": float, "axis": int, "ddof": int},
    tiles=lambda inputs, a: row_tiles(constant_product(inputs[0].shape[a["axis"] :])),
    launch=lambda inputs, a, tile: row_launch(
        std_norm_kernel, inputs[0], a["axis"], tile, {"EPSILON": a["epsilon"], "DDOF": a["ddof"]}
    ),
    reference=reference,
    required={"ddof": (0, 1)},
)
