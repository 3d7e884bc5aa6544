"""AdaGroupNorm: GroupNorm whose scale and shift are data, optionally followed by SiLU (guided diffusion, Dhariwal,
Nichol 2021; `AdaGroupNorm` of diffusers; SPADE, Park et al. 2019, as many groups as channels).

x: (N, C, ...) of rank 3 or more; C is a multiple of ``num_groups``; scale, shift: (N, C, 1, ...) or, with ``spatial`` =
1, x's shape; y = act((x − mean) / √(var + ε) · scale + shift), with x's shape. The variance is biased.

One program processes one group of one sample. For few large groups, ``ada_group_norm_apply`` is used instead.
"""

from typing import Any

import numpy as np
import triton
import triton.language as tl

from ._launch import (
    LONG,
    LOOPED,
    REGISTER_TILE,
    Launch,
    Op,
    Tensor,
    Tile,
    constant,
    constant_product,
    next_power_of_2,
    product,
    programs,
)
from ._math import activate, half, inverse_root, is_wide, load, load_column, row_moments, store, widened
from .group_norm import centered_tile, extents, group_of_program, register_tiles
from .scale_shift import activation_reference


def reference(
    x: np.ndarray,
    scale: np.ndarray,
    shift: np.ndarray,
    *,
    epsilon: float,
    num_groups: int,
    spatial: int,
    activation: str = "none",
) -> np.ndarray:
    """Compute the op in float64. The shape of ``scale`` already says whether the op is spatial.

    Returns:
        y.
    """
    grouped = x.reshape(x.shape[0], num_groups, x.shape[1] // num_groups * int(np.prod(x.shape[2:])))
    d = grouped - grouped.mean(-1, keepdims=True)
    xhat = (d / np.sqrt((d * d).mean(-1, keepdims=True) + epsilon)).reshape(x.shape)
    return activation_reference(xhat * scale + shift, activation)


@triton.jit
def ada_group_norm_kernel(
    x_ptr,
    scale_ptr,
    shift_ptr,
    rows,
    channels,
    inner,
    y_ptr,
    EPSILON: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPATIAL: tl.constexpr,
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
            # The channels of all samples are numbered in one row, as scale and shift hold them.
            channel0 = group * channels
            lane = tl.arange(0, ROWS)
            c = lane[:, None]
            at = tl.arange(0, SIZE)[None, :]
            if LOOP:
                mean, m2 = row_moments(x_ptr, x_ptr, base, live, first, n, 1, ROWS * SIZE, False)
                inverse = inverse_root(m2 / n, EPSILON)
                for c0 in range(0, channels, ROWS):
                    if not SPATIAL:
                        scale = load_column(scale_ptr, channel0 + c0 + lane, exists & (c0 + lane < channels))
                        shift = load_column(shift_ptr, channel0 + c0 + lane, exists & (c0 + lane < channels))
                    for start in range(0, positions, SIZE):
                        mask = live & (c0 + c < channels) & (start + at < positions)
                        offset = base + (c0 + c) * positions + (start + at)
                        xhat = (load(x_ptr, offset, mask) - mean) * inverse
                        if SPATIAL:
                            y = xhat * load(scale_ptr, offset, mask) + load(shift_ptr, offset, mask)
                        else:
                            y = xhat * scale + shift
                        store(y_ptr, offset, activate(y, ACTIVATION), mask)
            else:
                mask = live & (c < channels) & (at < positions)
                offset = base + c * positions + at
                d, m2 = centered_tile(load(x_ptr, offset, mask), first, mask, n)
                xhat = d * inverse_root(m2 / n, EPSILON)
                if SPATIAL:
                    y = xhat * load(scale_ptr, offset, mask) + load(shift_ptr, offset, mask)
                else:
                    scale = load_column(scale_ptr, channel0 + lane, exists & (lane < channels))
                    y = xhat * scale + load_column(shift_ptr, channel0 + lane, exists & (lane < channels))
                store(y_ptr, offset, activate(y, ACTIVATION), mask)


def tiles(inputs: list[Tensor], attributes: dict[str, Any]) -> list[Tile]:
    """List the tactics.

    Returns:
        tactics, the default first.
    """
    shape = inputs[0].shape
    # Only constant sizes are divided, because TensorRT forbids other divisions while it requests the tactics.
    width, inner = constant(shape[1]), constant_product(shape[2:])
    channels = None if width is None else width // attributes["num_groups"]
    block = 1024 if inner is None else next_power_of_2(inner)
    if channels is not None and inner is not None and next_power_of_2(channels) * block <= REGISTER_TILE:
        return register_tiles(next_power_of_2(channels), block)
    pieces = LOOPED if channels is None or inner is None else LONG
    return [Tile(max(1, size // min(block, size)), min(block, size), warps, loop=True) for size, warps in pieces]


def launch(inputs: list[Tensor], attributes: dict[str, Any], tile: Tile) -> Launch:
    """Make the launch of a tactic.

    Returns:
        the launch.
    """
    samples, channels, positions = extents(inputs[0], attributes | {"channels_last": 0})
    groups = product((samples, attributes["num_groups"]))
    constants = {
        "EPSILON": attributes["epsilon"],
        "ACTIVATION": attributes["activation"],
        "SPATIAL": attributes["spatial"],
        "ROWS": tile.rows,
        "BLOCK": tile.block,
        "LOOP": tile.loop,
    }
    scalars = {"rows": groups, "channels": channels, "inner": product(positions)}
    return Launch(ada_group_norm_kernel, programs(groups), scalars, constants, tile.warps)


def op(name: str, activation: str) -> Op:
    """Make an op with an activation.

    Returns:
        the op.
    """
    return Op(
        name,
        inputs=("x", "scale", "shift"),
        types="TTTT",
        attributes={"epsilon": float, "num_groups": int, "spatial": int},
        tiles=tiles,
        launch=lambda inputs, a, tile: launch(inputs, a | {"activation": activation}, tile),
        reference=lambda *arrays, **a: reference(*arrays, **a, activation=activation),
        required={"spatial": (0, 1)},
    )


OP = op("AdaGroupNorm", "none")
SILU_OP = op("AdaGroupNormSiLU", "silu")
