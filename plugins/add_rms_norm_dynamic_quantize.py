"""Residual add, RMSNorm over the last dim, and quantization by a scale for each row.

The type of y is int8 or FP8 (E4M3, compute capability 8.9 and newer). In float32, y_scale = max(max|norm|, least) / q,
where q is 127 for int8 and 448 for FP8. y is norm / y_scale, rounded and saturated as `_quantize` defines.

y: x's shape; y_scale: one for each row, float32, of x's rank; sum = x + residual.
"""

import numpy as np
import triton
import triton.language as tl

from . import rms_norm
from ._launch import QUANTIZED, Op, constant_product, one_each, row_launch, row_tiles
from ._quantize import by_row, norm_quantize


def reference(
    x: np.ndarray, residual: np.ndarray, gamma: np.ndarray, *, epsilon: float, least: float, to: str
) -> tuple[np.ndarray, ...]:
    """Compute the op in float64.

    Returns:
        (y, y_scale, sum).
    """
    y = rms_norm.reference(x + residual, gamma, epsilon=epsilon, axis=-1, offset=0.0)
    return (*by_row(y, -1, least, to), x + residual)


@triton.jit
def add_rms_norm_dynamic_quantize_kernel(
    x_ptr,
    residual_ptr,
    gamma_ptr,
    rows,
    n,
    y_ptr,
    scale_ptr,
    sum_ptr,
    EPSILON: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOP: tl.constexpr,
):
    norm_quantize(
        x_ptr,
        residual_ptr,
        gamma_ptr,
        gamma_ptr,
        scale_ptr,
        rows,
        n,
        y_ptr,
        sum_ptr,
        EPSILON,
        False,
        True,
        True,
        LEAST,
        ROWS,
        BLOCK,
        LOOP,
    )


OP = Op(
    "AddRMSNormDynamicQuantize",
    inputs=("x", "residual", "gamma"),
    types="TTPQFT",
    attributes={"epsilon": float, "least": float, "to": str},
    tiles=lambda inputs, a: row_tiles(constant_product(inputs[0].shape[-1:]), heavy=True),
    launch=lambda inputs, a, tile: row_launch(
        add_rms_norm_dynamic_quantize_kernel, inputs[0], -1, tile, {"EPSILON": a["epsilon"], "LEAST": a["least"]}
    ),
    reference=reference,
    outputs=("y", "y_scale", "sum"),
    shapes=lambda inputs, a: [inputs[0].shape, one_each(inputs[0].shape, -1), inputs[0].shape],
    required={"to": tuple(QUANTIZED)},
)
