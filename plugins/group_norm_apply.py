"""GroupNorm (+ SiLU) of few large groups, the second of two launches: normalize in one pass, with the statistics that
NormStatistics computed.

x: (N, C, ...) or, with ``channels_last`` = 1, (N, ..., C); statistics: (N·num_groups, splits, 2) float32, merged here
by Chan's formula; gamma, beta: (C,); y = act((x − mean) / √(var + ε) · γ[c] + β[c]), with x's shape.
"""

from typing import Any

import numpy as np
import triton
import triton.language as tl

from . import group_norm
from ._launch import Launch, Op, Tensor, Tile, cdiv, constant, constant_product, next_power_of_2, product, programs
from ._math import activate, inverse_root, is_wide, load, merged_moments, parts, positive, store, widened
from .group_norm import extents


def reference(
    x: np.ndarray, statistics: np.ndarray, gamma: np.ndarray, beta: np.ndarray, **attributes: Any
) -> np.ndarray:
    """Compute the op from x alone, because the statistics follow from x.

    Returns:
        y.
    """
    return group_norm.reference(x, gamma, beta, **attributes)


@triton.jit
def group_norm_apply_kernel(
    x_ptr,
    statistics_ptr,
    gamma_ptr,
    beta_ptr,
    rows,
    channels,
    inner,
    y_ptr,
    GROUPS: tl.constexpr,
    EPSILON: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
            channel = row % positive(channels * GROUPS)
            y = activate(xhat * load(gamma_ptr, channel, row < rows) + load(beta_ptr, channel, row < rows), ACTIVATION)
            store(y_ptr, row * positions + at, y, mask)


@triton.jit
def group_norm_apply_channels_last_kernel(
    x_ptr,
    statistics_ptr,
    gamma_ptr,
    beta_ptr,
    rows,
    channels,
    inner,
    y_ptr,
    GROUPS: tl.constexpr,
    EPSILON: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalize ``rows`` samples of ``inner`` positions with GROUPS · ``channels`` elements each. A program processes
    ROWS positions × BLOCK channels.
    """
    # An empty batch still launches one program (`_launch.programs`).
    if rows == 0:
        return
    for WIDE in tl.static_range(2):
        if is_wide(channels, x_ptr) == WIDE:
            length = widened(channels, x_ptr, WIDE)
            width = length * GROUPS
            across = parts(width, BLOCK)
            down = parts(inner, ROWS)
            pid = tl.program_id(0)
            sample = (pid // (across * down)).to(tl.int64) + tl.zeros([1, 1], tl.int64)
            c = (pid % across) * BLOCK + tl.arange(0, BLOCK)[None, :]
            at = (pid // across % down) * ROWS + tl.arange(0, ROWS)[:, None]
            live = c < width
            mask = live & (at < inner)
            mean, m2 = merged_moments(
                statistics_ptr, sample * GROUPS + c // positive(length), live, inner, SPLITS, length
            )
            scale = inverse_root(m2 / (inner * 1.0 * length), EPSILON)
            offset = (sample * inner + at) * width + c
            xhat = (load(x_ptr, offset, mask) - mean) * scale
            y = activate(xhat * load(gamma_ptr, c, c < width) + load(beta_ptr, c, c < width), ACTIVATION)
            store(y_ptr, offset, y, mask)


def tiles(inputs: list[Tensor], attributes: dict[str, Any]) -> list[Tile]:
    """List the tactics.

    Returns:
        tactics, the default first.
    """
    x = inputs[0]
    if attributes["channels_last"]:
        block = min(1024, next_power_of_2(constant(x.shape[-1]) or 1024))
        return [Tile(max(1, size // block), block, warps) for size, warps in ((4096, 16), (8192, 16), (2048, 8))]
    inner = constant_product(x.shape[2:])
    blocks = [min(size, next_power_of_2(inner)) if inner else size for size in (2048, 1024, 4096)]
    return [Tile(1, block, max(1, min(16, block // 256))) for block in dict.fromkeys(blocks)]


def launch(inputs: list[Tensor], attributes: dict[str, Any], tile: Tile) -> Launch:
    """Make the launch of a tactic.

    Returns:
        the launch.
    """
    samples, channels, positions = extents(inputs[0], attributes)
    splits, inner, width = inputs[1].shape[1], product(positions), channels * attributes["num_groups"]
    constants = {
        "GROUPS": attributes["num_groups"],
        "EPSILON": attributes["epsilon"],
        "ACTIVATION": attributes["activation"],
        "SPLITS": splits,
        "BLOCK": tile.block,
    }
    if attributes["channels_last"]:
        grid = product((samples, cdiv(inner, tile.rows), cdiv(width, tile.block)))
        scalars = {"rows": samples, "channels": channels, "inner": inner}
        return Launch(
            group_norm_apply_channels_last_kernel, programs(grid), scalars, constants | {"ROWS": tile.rows}, tile.warps
        )
    rows = product((samples, width))
    grid = product((rows, cdiv(inner, tile.block)))
    return Launch(
        group_norm_apply_kernel,
        programs(grid),
        {"rows": rows, "channels": channels, "inner": inner},
        constants,
        tile.warps,
    )


OP = Op(
    "GroupNormApply",
    inputs=("x", "statistics", "gamma", "beta"),
    types="TFPPT",
    attributes={"epsilon": float, "num_groups": int, "activation": str, "channels_last": int},
    tiles=tiles,
    launch=launch,
    reference=reference,
    required={"activation": ("none", "silu"), "channels_last": (0, 1)},
)
