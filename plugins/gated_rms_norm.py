"""RMSNorm over the last dim, times SiLU of a gate (Qwen3-Next; Mamba-2 of Dao and Gu 2024 has the gate first): y =
x / √(mean(x²) + ε) · γ · gate · sigmoid(gate). The gate of Kimi Linear passes through the sigmoid alone: y = x /
√(mean(x²) + ε) · γ · sigmoid(gate).

x, gate: any shape, both the same; gamma: one for each element of the row; y like x.
"""

from typing import Any

import numpy as np
import triton
import triton.language as tl

from ._launch import Launch, Op, Tensor, Tile, constant_product, row_launch, row_tiles
from ._math import (
    activate,
    half,
    inside,
    inverse_root,
    is_wide,
    load,
    mean_square,
    row_mean_square,
    store,
    tile_rows,
    widened,
)


def reference(
    x: np.ndarray, gamma: np.ndarray, gate: np.ndarray, *, epsilon: float, activation: str = "silu"
) -> np.ndarray:
    """Compute the op in float64.

    Returns:
        y.
    """
    normal = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * gamma
    opened = 1 / (1 + np.exp(-gate))
    return normal * (gate * opened if activation == "silu" else opened)


@triton.jit
def gated_rms_norm_kernel(
    x_ptr,
    gamma_ptr,
    gate_ptr,
    rows,
    n,
    y_ptr,
    EPSILON: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
                inverse = inverse_root(row_mean_square(x_ptr, x_ptr, base, live, length, ROWS, SIZE, False), EPSILON)
                for start in range(0, length, SIZE):
                    at = start + col
                    mask = inside(live, at < length, ROWS)
                    normal = load(x_ptr, base + at, mask) * inverse * load(gamma_ptr, at, at < length)
                    store(y_ptr, base + at, normal * activate(load(gate_ptr, base + at, mask), ACTIVATION), mask)
            else:
                mask = inside(live, col < length, ROWS)
                x = load(x_ptr, base + col, mask)
                gate = load(gate_ptr, base + col, mask)
                normal = x * inverse_root(mean_square(x, mask, length), EPSILON) * load(gamma_ptr, col, col < length)
                store(y_ptr, base + col, normal * activate(gate, ACTIVATION), mask)


def launch(inputs: list[Tensor], attributes: dict[str, Any], tile: Tile) -> Launch:
    """Make the launch of a tactic.

    Returns:
        the launch.
    """
    constants = {"EPSILON": attributes["epsilon"], "ACTIVATION": attributes["activation"]}
    return row_launch(gated_rms_norm_kernel, inputs[0], -1, tile, constants)


def op(name: str, activation: str) -> Op:
    """Make an op whose gate passes through an activation.

    Returns:
        the op.
    """
    return Op(
        name,
        inputs=("x", "gamma", "gate"),
        types="TPTT",
        attributes={"epsilon": float},
        tiles=lambda inputs, a: row_tiles(constant_product(inputs[0].shape[-1:]), heavy=True),
        launch=lambda inputs, a, tile: launch(inputs, a | {"activation": activation}, tile),
        reference=lambda *arrays, **a: reference(*arrays, **a, activation=activation),
    )


OP = op("GatedRMSNorm", "silu")
SIGMOID_OP = op("SigmoidGatedRMSNorm", "sigmoid")
