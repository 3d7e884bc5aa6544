"""AdaGroupNorm (+ SiLU) of few large groups, the second of two launches: normalize in one pass, with the statistics
that NormStatistics computed.

x: (N, C, ...); statistics: (N·num_groups, splits, 2) float32, merged here by Chan's formula; scale, shift: (N, C, 1,
...) or, with ``spatial`` = 1, x's shape; y = act((x − mean) / √(var + ε) · scale + shift), with x's shape.
"""

from typing import Any

import numpy as np
import triton
import triton.language as tl

from . import ada_group_norm
from ._launch import Launch, Op, Tensor, Tile, cdiv, constant_product, next_power_of_2, product, programs
from ._math import activate, inverse_root, is_wide, load, merged_moments, parts, positive, store, widened
from .group_norm import extents


def reference(
    x: np.ndarray, statistics: np.ndarray, scale: np.ndarray, shift: np.ndarray, **attributes: Any
) -> np.ndarray:
    """Compute the op from x alone, because the statistics follow from x.

    Returns:
        y.
    """
    return ada_group_norm.reference(x, scale, shift, **attributes)


@triton.jit
def ada_group_norm_apply_kernel(
    x_ptr,
    statistics_ptr,
    scale_ptr,
    shift_ptr,
    rows,
    channels,
    inner,
    y_ptr,
    EPSILON: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPATIAL: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalize ``rows`` channels of samples. A group has ``channels`` channels, and a channel has ``inner`` contiguous
    positions. A program processes BLOCK positions.
    """
    # An empty batch still launches one program (`_launch.programs`).
    if rows == 0:
        return
    for WIDE in tl.static_range(2):
        if is_wide(inner, x_ptr) == WIDE:
            positions = widened(inner, x_ptr, WIDE)
            blocks = parts(positions, BLOCK)
            pid = tl.program_id(0)
            row = (pid // blocks).to(tl.int64)
            at = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
            mask = at < positions
            mean, m2 = merged_moments(
                statistics_ptr, row // positive(channels), row < rows, positions * channels, SPLITS, 1
            )
            xhat = (load(x_ptr, row * positions + at, mask) - mean) * inverse_root(
                m2 / (positions * 1.0 * channels), EPSILON
            )
            if SPATIAL:
                y = xhat * load(scale_ptr, row * positions + at, mask) + load(shift_ptr, row * positions + at, mask)
            else:
                y = xhat * load(scale_ptr, row, row < rows) + load(shift_ptr, row, row < rows)
            store(y_ptr, row * positions + at, activate(y, ACTIVATION), mask)


def tiles(inputs: list[Tensor], attributes: dict[str, Any]) -> list[Tile]:
    """List the tactics.

    Returns:
        tactics, the default first.
    """
    inner = constant_product(inputs[0].shape[2:])
    blocks = [min(size, next_power_of_2(inner)) if inner else size for size in (2048, 1024, 4096)]
    return [Tile(1, block, max(1, min(16, block // 256))) for block in dict.fromkeys(blocks)]


def launch(inputs: list[Tensor], attributes: dict[str, Any], tile: Tile) -> Launch:
    """Make the launch of a tactic.

    Returns:
        the launch.
    """
    samples, channels, positions = extents(inputs[0], attributes | {"channels_last": 0})
    inner = product(positions)
    rows = product((samples, channels * attributes["num_groups"]))
    constants = {
        "EPSILON": attributes["epsilon"],
        "ACTIVATION": attributes["activation"],
        "SPATIAL": attributes["spatial"],
        "SPLITS": inputs[1].shape[1],
        "BLOCK": tile.block,
    }
    grid = product((rows, cdiv(inner, tile.block)))
    scalars = {"rows": rows, "channels": channels, "inner": inner}
    return Launch(ada_group_norm_apply_kernel, programs(grid), scalars, constants, tile.warps)


OP = Op(
    "AdaGroupNormApply",
    inputs=("x", "statistics", "scale", "shift"),
    types="TFTTT",
    attributes={"epsilon": float, "num_groups": int, "spatial": int, "activation": str},
    tiles=tiles,
    launch=launch,
    reference=reference,
    required={"activation": ("none", "silu"), "spatial": (0, 1)},
)
