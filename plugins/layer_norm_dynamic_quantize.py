"""LayerNorm over the dims from ``axis`` on, and quantization by a scale for each row.

The type of y is int8 or FP8 (E4M3, compute capability 8.9 and newer). In float32, y_scale = max(max|norm|, least) / q,
where q is 127 for int8 and 448 for FP8. y is norm / y_scale, rounded and saturated as `_quantize` defines.

y: x's shape; y_scale: one for each row, float32, of x's rank.
"""

import numpy as np
import triton
import triton.language as tl

from . import layer_norm
from ._launch import QUANTIZED, Op, constant_product, one_each, row_launch, row_tiles
from ._quantize import by_row, norm_quantize


def reference(
    x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, *, epsilon: float, axis: int, least: float, to: str
) -> tuple[np.ndarray, ...]:
    """Compute the op in float64.

    Returns:
        (y, y_scale).
    """
    y = layer_norm.reference(x, gamma, beta, epsilon=epsilon, axis=axis)
    return by_row(y, axis, least, to)


@triton.jit
def layer_norm_dynamic_quantize_kernel(
    x_ptr,
    gamma_ptr,
    beta_ptr,
    rows,
    n,
    y_ptr,
    scale_ptr,
    EPSILON: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOP: tl.constexpr,
):
    norm_quantize(
        x_ptr,
        x_ptr,
        gamma_ptr,
        beta_ptr,
        scale_ptr,
        rows,
        n,
        y_ptr,
        y_ptr,
        EPSILON,
        True,
        False,
        True,
        LEAST,
        ROWS,
        BLOCK,
        LOOP,
    )


OP = Op(
    "LayerNormDynamicQuantize",
    inputs=("x", "gamma", "beta"),
    types="TPPQF",
    attributes={"epsilon": float, "axis": int, "least": float, "to": str},
    tiles=lambda inputs, a: row_tiles(constant_product(inputs[0].shape[a["axis"] :]), heavy=True),
    launch=lambda inputs, a, tile: row_launch(
        layer_norm_dynamic_quantize_kernel, inputs[0], a["axis"], tile, {"EPSILON": a["epsilon"], "LEAST": a["least"]}
    ),
    reference=reference,
    outputs=("y", "y_scale"),
    shapes=lambda inputs, a: [inputs[0].shape, one_each(inputs[0].shape, a["axis"])],
    required={"to": tuple(QUANTIZED)},
)
