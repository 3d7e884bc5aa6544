"""LayerNorm over the dims from ``axis`` on, and QuantizeLinear by one scale with zero point 0, to int8 or FP8 (E4M3,
compute capability 8.9 and newer).

x: any shape; gamma, beta: one number for each element of a row; y_scale: one number, float32; y: x's shape. `_quantize`
defines rounding and saturation.
"""

import numpy as np
import triton
import triton.language as tl

from . import layer_norm
from ._launch import QUANTIZED, Op, constant_product, row_launch, row_tiles
from ._quantize import norm_quantize, quantized


def reference(
    x: np.ndarray,
    gamma: np.ndarray,
    beta: np.ndarray,
    y_scale: np.ndarray,
    *,
    epsilon: float,
    axis: int,
    to: str,
) -> np.ndarray:
    """Compute the op in float64.

    Returns:
        y.
    """
    return quantized(layer_norm.reference(x, gamma, beta, epsilon=epsilon, axis=axis), y_scale.reshape(()), to)


@triton.jit
def layer_norm_quantize_kernel(
    x_ptr,
    gamma_ptr,
    beta_ptr,
    scale_ptr,
    rows,
    n,
    y_ptr,
    EPSILON: tl.constexpr,
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
        False,
        0.0,
        ROWS,
        BLOCK,
        LOOP,
    )


OP = Op(
    "LayerNormQuantize",
    inputs=("x", "gamma", "beta", "y_scale"),
    types="TPPFQ",
    attributes={"epsilon": float, "axis": int, "to": str},
    tiles=lambda inputs, a: row_tiles(constant_product(inputs[0].shape[a["axis"] :]), heavy=True),
    launch=lambda inputs, a, tile: row_launch(
        layer_norm_quantize_kernel, inputs[0], a["axis"], tile, {"EPSILON": a["epsilon"]}
    ),
    reference=reference,
    required={"to": tuple(QUANTIZED)},
)
