"""GroupNorm (Wu, He 2018; ONNX GroupNormalization 21, scale per channel), and GroupNorm + SiLU, with biased variance
over C/G channels.

x: (N, C, ...) or, with ``channels_last`` = 1, (N, ..., C), of rank 3 or more; C is a multiple of ``num_groups``; gamma,
beta: (C,); y = act((x − mean) / √(var + ε) · γ[c] + β[c]), with x's shape.

One program processes one group of one sample. For few large groups, ``group_norm_apply`` is used instead.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import triton
import triton.language as tl

from ._launch import (
    ITEMSIZE,
    LONG,
    LOOPED,
    REGISTER_TILE,
    Launch,
    Op,
    Size,
    Tensor,
    Tile,
    cdiv,
    check_size,
    constant,
    constant_product,
    next_power_of_2,
    product,
    programs,
    row_tiles,
    usual_warps,
    warps_for,
)
from ._math import activate, half, inverse_root, is_wide, load, load_column, merge, row_moments, store, welford, widened
from .group_norm_flat import group_norm_flat_kernel
from .group_norm_packed import group_norm_packed_kernel
from .scale_shift import activation_reference


def reference(
    x: np.ndarray,
    gamma: np.ndarray,
    beta: np.ndarray,
    *,
    epsilon: float,
    num_groups: int,
    channels_last: int,
    activation: str = "none",
) -> np.ndarray:
    """Compute the op in float64.

    Returns:
        y.
    """
    if channels_last:
        first = np.moveaxis(x, -1, 1)
        y = reference(
            first, gamma, beta, epsilon=epsilon, num_groups=num_groups, channels_last=0, activation=activation
        )
        return np.moveaxis(y, 1, -1)
    grouped = x.reshape(x.shape[0], num_groups, x.shape[1] // num_groups * int(np.prod(x.shape[2:])))
    d = grouped - grouped.mean(-1, keepdims=True)
    xhat = (d / np.sqrt((d * d).mean(-1, keepdims=True) + epsilon)).reshape(x.shape)
    per_channel = (-1,) + (1,) * (x.ndim - 2)
    return activation_reference(xhat * gamma.reshape(per_channel) + beta.reshape(per_channel), activation)


@triton.jit
def centered_tile(x, first, mask, n):
    """Compute x − mean (0 for masked elements) and M2 over the whole tile.

    Returns:
        (x − mean, M2).
    """
    mean = first + tl.sum(tl.where(mask, x - first, 0.0)) / n
    d = tl.where(mask, x - mean, 0.0)
    return d, tl.sum(d * d)


@triton.jit
def group_of_program(rows, n):
    """Return the number of this program's group.

    Returns:
        int64 ``[1]``, and a mask that is true if the group exists and has elements.
    """
    group = tl.program_id(0).to(tl.int64) + tl.zeros([1], tl.int64)
    return group, (group < rows) & (n > 0)


@triton.jit
def group_norm_kernel(
    x_ptr,
    gamma_ptr,
    beta_ptr,
    rows,
    channels,
    inner,
    y_ptr,
    GROUPS: tl.constexpr,
    EPSILON: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOP: tl.constexpr,
):
    """Normalize ``rows`` groups of ``channels`` × ``inner`` contiguous elements; a tile is ROWS channels × BLOCK
    positions.
    """
    # An empty batch still launches one program (`_launch.programs`).
    if rows == 0:
        return
    for WIDE in tl.static_range(2):
        if is_wide(inner, x_ptr) == WIDE:
            positions = widened(inner, x_ptr, WIDE)
            SIZE: tl.constexpr = BLOCK if WIDE or not LOOP else half(BLOCK)
            n = channels * positions
            group, exists = group_of_program(rows, n)
            base, live = (group * n)[:, None], exists[:, None]
            first = load_column(x_ptr, group * n, exists)
            channel0 = (group % GROUPS) * channels
            lane = tl.arange(0, ROWS)
            c = lane[:, None]
            at = tl.arange(0, SIZE)[None, :]
            if LOOP:
                mean, m2 = row_moments(x_ptr, x_ptr, base, live, first, n, 1, ROWS * SIZE, False)
                scale = inverse_root(m2 / n, EPSILON)
                for c0 in range(0, channels, ROWS):
                    gamma = load_column(gamma_ptr, channel0 + c0 + lane, exists & (c0 + lane < channels))
                    beta = load_column(beta_ptr, channel0 + c0 + lane, exists & (c0 + lane < channels))
                    for start in range(0, positions, SIZE):
                        mask = live & (c0 + c < channels) & (start + at < positions)
                        offset = base + (c0 + c) * positions + (start + at)
                        xhat = (load(x_ptr, offset, mask) - mean) * scale
                        store(y_ptr, offset, activate(xhat * gamma + beta, ACTIVATION), mask)
            else:
                mask = live & (c < channels) & (at < positions)
                offset = base + c * positions + at
                d, m2 = centered_tile(load(x_ptr, offset, mask), first, mask, n)
                gamma = load_column(gamma_ptr, channel0 + lane, exists & (lane < channels))
                beta = load_column(beta_ptr, channel0 + lane, exists & (lane < channels))
                store(y_ptr, offset, activate(d * inverse_root(m2 / n, EPSILON) * gamma + beta, ACTIVATION), mask)


@triton.jit
def strided_moments(x_ptr, base, live, first, positions, channels, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute mean and M2 of ``positions`` × ``channels`` elements at ``base``, with positions ``stride`` apart.

    Returns:
        (mean, M2), each ``[1, 1]``.
    """
    at = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    mean = load(x_ptr, base + at.to(tl.int64) * stride + c, live & (at < positions) & (c < channels))
    m2 = tl.zeros([ROWS, BLOCK], tl.float32)
    k = 1.0
    for start in range(ROWS, positions, ROWS):
        mask = live & (start + at < positions) & (c < channels)
        k += 1.0
        mean, m2 = welford(load(x_ptr, base + (start + at).to(tl.int64) * stride + c, mask), mask, k, mean, m2)
    count = tl.where(live & (c < channels), (positions - at + ROWS - 1) // ROWS, 0).to(tl.float32)
    flat: tl.constexpr = [1, ROWS * BLOCK]
    return merge(count.reshape(flat), mean.reshape(flat), m2.reshape(flat), first, positions * 1.0 * channels, 1)


@triton.jit
def group_norm_channels_last_kernel(
    x_ptr,
    gamma_ptr,
    beta_ptr,
    rows,
    channels,
    inner,
    y_ptr,
    GROUPS: tl.constexpr,
    EPSILON: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOP: tl.constexpr,
):
    """Normalize groups with ``channels`` contiguous elements at each of ``inner`` positions; a tile is ROWS positions ×
    BLOCK channels.
    """
    # An empty batch still launches one program (`_launch.programs`).
    if rows == 0:
        return
    for WIDE in tl.static_range(2):
        if is_wide(channels, x_ptr) == WIDE:
            length = widened(channels, x_ptr, WIDE)
            SIZE: tl.constexpr = ROWS if WIDE or not LOOP else half(ROWS)
            group, exists = group_of_program(rows, length * inner)
            stride = length * GROUPS
            channel0 = (group % GROUPS) * length
            start_of_group = (group // GROUPS) * inner * stride + channel0
            first = load_column(x_ptr, start_of_group, exists)
            base, live = start_of_group[:, None], exists[:, None]
            at = tl.arange(0, SIZE)[:, None]
            c = tl.arange(0, BLOCK)[None, :]
            present = live & (c < length)
            gamma = load(gamma_ptr, channel0[:, None] + c, present)
            beta = load(beta_ptr, channel0[:, None] + c, present)
            if LOOP:
                mean, m2 = strided_moments(x_ptr, base, live, first, inner, length, stride, SIZE, BLOCK)
                scale = inverse_root(m2 / (inner * 1.0 * length), EPSILON)
                for start in range(0, inner, SIZE):
                    mask = present & (start + at < inner)
                    offset = base + (start + at).to(tl.int64) * stride + c
                    xhat = (load(x_ptr, offset, mask) - mean) * scale
                    store(y_ptr, offset, activate(xhat * gamma + beta, ACTIVATION), mask)
            else:
                mask = present & (at < inner)
                offset = base + at.to(tl.int64) * stride + c
                d, m2 = centered_tile(load(x_ptr, offset, mask), first, mask, inner * length)
                xhat = d * inverse_root(m2 / (inner * length), EPSILON)
                store(y_ptr, offset, activate(xhat * gamma + beta, ACTIVATION), mask)


def extents(x: Tensor, attributes: dict[str, Any]) -> tuple[Size, Size, tuple[Size, ...]]:
    """Split a shape into samples, channels and positions.

    Returns:
        samples, channels of one group, and the dims of the positions.

    Raises:
        ValueError: the number of channels is not a multiple of the number of groups.
    """
    last, groups = attributes["channels_last"], attributes["num_groups"]
    channels = x.shape[-1 if last else 1]
    if isinstance(channels, int) and (groups < 1 or channels % groups):
        raise ValueError(
            f"{channels} channels are not divisible into {groups} groups: choose a num_groups that divides the channels"
        )
    positions = x.shape[1:-1] if last else x.shape[2:]
    check_size("a group's size", constant_product((channels // groups, *positions)))
    return x.shape[0], channels // groups, positions


def tiles(inputs: list[Tensor], attributes: dict[str, Any]) -> list[Tile]:
    """List the tactics.

    Returns:
        tactics, the default first.
    """
    last, shape = attributes["channels_last"], inputs[0].shape
    # Only constant sizes are divided, because TensorRT forbids other divisions while it requests the tactics.
    width, inner = constant(shape[-1 if last else 1]), constant_product(shape[1:-1] if last else shape[2:])
    channels = None if width is None else width // attributes["num_groups"]
    if last:
        block = 32 if channels is None else next_power_of_2(channels)
        rows = None if inner is None else next_power_of_2(inner)
        more = packed_tiles(inputs[0], attributes["num_groups"], channels, inner)
        if channels is not None and rows is not None and rows * block <= REGISTER_TILE:
            return register_tiles(rows, block) + more
        pieces = LOOPED if channels is None or rows is None else LONG
        return more + [Tile(max(1, size // block), block, warps, loop=True) for size, warps in pieces]
    flat = []
    wide = 16 // ITEMSIZE[inputs[0].dtype]
    if channels and inner and inner % wide and channels * inner % wide == 0:
        flat = [replace(tile, pack=channels) for tile in row_tiles(channels * inner)[:3]]
    block = 1024 if inner is None else next_power_of_2(inner)
    if channels is not None and inner is not None and next_power_of_2(channels) * block <= REGISTER_TILE:
        return flat + register_tiles(next_power_of_2(channels), block)
    pieces = LOOPED if channels is None or inner is None else LONG
    looped = [Tile(max(1, size // min(block, size)), min(block, size), warps, loop=True) for size, warps in pieces]
    return flat + looped


def packed_tiles(x: Tensor, groups: int, channels: int | None, inner: int | None) -> list[Tile]:
    """List tactics with several groups side by side. Their channels together are a multiple of 16 bytes, and at least
    64 bytes, which are two sectors of the memory.

    Returns:
        an empty list if the channels of one group are a multiple of 16 bytes, or if the channels of all groups together
        are not.
    """
    wide = 16 // ITEMSIZE[x.dtype]
    if channels is None or channels % wide == 0 or channels * groups % wide:
        return []
    pack = wide // math.gcd(wide, channels)
    while pack * channels < 4 * wide and pack < groups:
        pack *= 2
    block = next_power_of_2(pack * channels)
    if inner is not None and next_power_of_2(inner) * block <= REGISTER_TILE // 2:
        size = next_power_of_2(inner) * block
        return [Tile(size // block, block, warps_for(size, 16), pack=pack)]
    # The last tactic is for few groups, and thus few programs. For 256 groups of 4 channels on an H200, it took 306 µs
    # instead of 457 µs.
    pieces = (*LOOPED[:2], (8192, 32))
    return [Tile(max(1, size // block), block, warps, loop=True, pack=pack) for size, warps in pieces]


def register_tiles(rows: int, block: int) -> list[Tile]:
    """List the tactics for a tile that fits in registers, with different numbers of warps.

    Returns:
        tactics, the default first.
    """
    size = rows * block
    return [
        Tile(rows, block, warps)
        for warps in dict.fromkeys((usual_warps(size), *(warps_for(size, p) for p in (16, 8, 32))))
    ]


def launch(inputs: list[Tensor], attributes: dict[str, Any], tile: Tile) -> Launch:
    """Make the launch of a tactic.

    Returns:
        the launch.
    """
    samples, channels, positions = extents(inputs[0], attributes)
    groups = product((samples, attributes["num_groups"]))
    scalars = {"rows": groups, "channels": channels, "inner": product(positions)}
    constants = {
        "GROUPS": attributes["num_groups"],
        "EPSILON": attributes["epsilon"],
        "ACTIVATION": attributes.get("activation", "none"),
        "ROWS": tile.rows,
        "BLOCK": tile.block,
        "LOOP": tile.loop,
    }
    if tile.pack > 1 and not attributes["channels_last"]:
        return Launch(group_norm_flat_kernel, programs(cdiv(groups, tile.rows)), scalars, constants, tile.warps)
    if tile.pack > 1:
        packs = product((samples, cdiv(attributes["num_groups"], tile.pack)))
        constants |= {"PACK": tile.pack, "PACK_LANES": next_power_of_2(tile.pack)}
        return Launch(group_norm_packed_kernel, programs(packs), scalars, constants, tile.warps)
    kernel = group_norm_channels_last_kernel if attributes["channels_last"] else group_norm_kernel
    return Launch(kernel, programs(groups), scalars, constants, tile.warps)


def op(name: str, activation: str) -> Op:
    """Make an op with an activation.

    Returns:
        the op.
    """
    made = Op(
        name,
        inputs=("x", "gamma", "beta"),
        types="TPPT",
        attributes={"epsilon": float, "num_groups": int, "channels_last": int},
        tiles=tiles,
        launch=lambda inputs, a, tile: launch(inputs, a | {"activation": activation}, tile),
        reference=lambda *arrays, **a: reference(*arrays, **a, activation=activation),
        required={"channels_last": (0, 1)},
        beside=lambda inputs, a: (made, list(inputs), a | {"channels_last": 1}),
    )
    return made


OP = op("GroupNorm", "none")
SILU_OP = op("GroupNormSiLU", "silu")
