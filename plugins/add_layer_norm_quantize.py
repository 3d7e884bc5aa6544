"""Residual add, LayerNorm over the last dim, and QuantizeLinear by one scale with zero point 0.

The type of y is int8 or FP8 (E4M3, compute capability 8.9 and newer). sum = x + residual, and y is the quantized norm
of the stored sum. Both are outputs, y first.

x, residual: (..., N), equal shapes; gamma, beta: (N,); y_scale: one number, float32. `_quantize` defines rounding and
saturation.
"""

import numpy as np
import triton
import triton.language as tl

from . import layer_norm_quantize
from ._launch import QUANTIZED, Op, constant_product, row_launch, row_tiles
from ._quantize import norm_quantize


def reference(
    x: np.ndarray,
    residual: np.ndarray,
    gamma: np.ndarray,
    beta: np.ndarray,
    y_scale: np.ndarray,
    *,
    epsilon: float,
    to: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the op in float64.

    Returns:
        (y, sum).
    """
    total = x + residual
    return layer_norm_quantize.reference(total, gamma, beta, y_scale, epsilon=epsilon, axis=-1, to=to), total


@triton.jit
def add_layer_norm_quantize_kernel(
    x_ptr,
    residual_ptr,
    gamma_ptr,
    beta_ptr,
    scale_ptr,
    rows,
    n,
    y_ptr,
    sum_ptr,
    EPSILON: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOP: tl.constexpr,
):
    norm_quantize(
        x_ptr,
        residual_ptr,
        gamma_ptr,
        beta_ptr,
        scale_ptr,
        rows,
        n,
        y_ptr,
        sum_ptr,
        EPSILON,
        True,
        True,
        False,
        0.0,
        ROWS,
        BLOCK,
        LOOP,
    )


OP = Op(
    "AddLayerNormQuantize",
    inputs=("x", "residual", "gamma", "beta", "y_scale"),
    types="TTPPFQT",
    attributes={"epsilon": float, "to": str},
    tiles=lambda inputs, a: row_tiles(constant_product(inputs[0].shape[-1:]), heavy=True),
    launch=lambda inputs, a, tile: row_launch(
        add_layer_norm_quantize_kernel, inputs[0], -1, tile, {"EPSILON": a["epsilon"]}
    ),
    reference=reference,
    outputs=("y", "sum"),
    required={"to": tuple(QUANTIZED)},
)
