"""LayerNorm over the channels of NCHW (ConvNeXt, Liu et al. 2022). Each position of each sample is normalized
separately, with the biased variance.

x: (N, C, ...) of rank 3 or more; gamma, beta: (C,); y = (x − mean) / √(var + ε) · γ[c] + β[c], with statistics over dim
1; y has x's shape. A program processes all channels of neighboring positions, so that loads are contiguous.
"""

import numpy as np
import triton
import triton.language as tl

from . import layer_norm
from ._launch import (
    LOOPED,
    REGISTER_TILE,
    Launch,
    Op,
    Tensor,
    Tile,
    cdiv,
    constant,
    constant_product,
    next_power_of_2,
    product,
    programs,
    warps_for,
)
from ._math import centered, half, inverse_root, is_wide, load, load_column, merge, parts, store, welford, widened


def reference(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, *, epsilon: float) -> np.ndarray:
    """Compute the op in float64.

    Returns:
        y.
    """
    d = x - x.mean(1, keepdims=True)
    per_channel = (-1,) + (1,) * (x.ndim - 2)
    return d / np.sqrt((d * d).mean(1, keepdims=True) + epsilon) * gamma.reshape(per_channel) + beta.reshape(
        per_channel
    )


@triton.jit
def channel_layer_norm_kernel(
    x_ptr,
    gamma_ptr,
    beta_ptr,
    rows,
    n,
    inner,
    y_ptr,
    EPSILON: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOP: tl.constexpr,
):
    """Normalize ``rows`` samples of ``n`` channels with ``inner`` positions; a tile is ROWS channels × BLOCK
    positions.
    """
    # An empty batch still launches one program (`_launch.programs`).
    if rows == 0:
        return
    for WIDE in tl.static_range(2):
        if is_wide(inner, x_ptr) == WIDE:
            positions = widened(inner, x_ptr, WIDE)
            SIZE: tl.constexpr = ROWS if WIDE or not LOOP else half(ROWS)
            blocks = parts(positions, BLOCK)
            pid = tl.program_id(0)
            sample = (pid // blocks).to(tl.int64) + tl.zeros([1, 1], tl.int64)
            at = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
            live = (sample < rows) & (at < positions)
            base = sample * n * positions + at
            first = load(x_ptr, base, live)
            lane = tl.arange(0, SIZE)
            channel = lane[:, None]
            if LOOP:
                mean = load(x_ptr, base + channel.to(tl.int64) * positions, live & (channel < n))
                m2 = tl.zeros([SIZE, BLOCK], tl.float32)
                k = 1.0
                for start in range(SIZE, n, SIZE):
                    c = start + channel
                    mask = live & (c < n)
                    k += 1.0
                    mean, m2 = welford(load(x_ptr, base + c.to(tl.int64) * positions, mask), mask, k, mean, m2)
                count = tl.where(live, (n - channel + SIZE - 1) // SIZE, 0).to(tl.float32)
                mean, m2 = merge(count, mean, m2, first, n, 0)
                scale = inverse_root(m2 / n, EPSILON)
                for start in range(0, n, SIZE):
                    c = start + channel
                    mask = live & (c < n)
                    offset = base + c.to(tl.int64) * positions
                    y = (
                        (load(x_ptr, offset, mask) - mean)
                        * scale
                        * load_column(gamma_ptr, start + lane, start + lane < n)
                    )
                    y += load_column(beta_ptr, start + lane, start + lane < n)
                    store(y_ptr, offset, y, mask)
            else:
                mask = live & (channel < n)
                offset = base + channel.to(tl.int64) * positions
                d, m2 = centered(load(x_ptr, offset, mask), first, mask, n, 0)
                y = d * inverse_root(m2 / n, EPSILON) * load_column(gamma_ptr, lane, lane < n) + load_column(
                    beta_ptr, lane, lane < n
                )
                store(y_ptr, offset, y, mask)


def tiles(inputs: list[Tensor], attributes: dict) -> list[Tile]:
    """List the tactics.

    Returns:
        tactics, the default first.
    """
    x = inputs[0]
    channels, inner = constant(x.shape[1]), constant_product(x.shape[2:])
    # 32 positions in half precision are 64 bytes. A smaller load wastes memory bandwidth.
    widest = 128 if inner is None else min(128, max(8, next_power_of_2(inner)))
    if channels is None or next_power_of_2(channels) * min(32, widest) > REGISTER_TILE:
        width = min(32, widest)
        return [Tile(size // width, width, warps, loop=True) for size, warps in LOOPED[:3]]
    rows = next_power_of_2(channels)
    widths = [w for w in (32, 16, 64, 128) if w <= widest and rows * w <= REGISTER_TILE] or [widest]
    # Number of channels per thread. A thread first sums its own channels. With 16 channels per thread, the sums across
    # threads took three times as long on an H200.
    return list(dict.fromkeys(Tile(rows, w, warps_for(rows * w, per)) for w in widths for per in (64, 32)))


def launch(inputs: list[Tensor], attributes: dict, tile: Tile) -> Launch:
    """Make the launch of a tactic.

    Returns:
        the launch.
    """
    x = inputs[0]
    inner = product(x.shape[2:])
    return Launch(
        channel_layer_norm_kernel,
        programs(product((cdiv(inner, tile.block), x.shape[0]))),
        {"rows": x.shape[0], "n": x.shape[1], "inner": inner},
        {"EPSILON": attributes["epsilon"], "ROWS": tile.rows, "BLOCK": tile.block, "LOOP": tile.loop},
        tile.warps,
    )


OP = Op(
    "ChannelLayerNorm",
    inputs=("x", "gamma", "beta"),
    types="TPPT",
    attributes={"epsilon": float},
    tiles=tiles,
    launch=launch,
    reference=reference,
    beside=lambda inputs, a: (layer_norm.OP, list(inputs), a | {"axis": -1, "ddof": 0}),
)
