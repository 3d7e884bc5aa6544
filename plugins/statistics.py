"""Partial statistics of few long rows, the first of two launches. For each of the ``splits`` parts of each row, they
are the mean and M2 = Σ(x − mean)².

A row is the set of elements over which a norm computes its statistics. With ``groups`` = 1, a row consists of the dims
from ``axis`` on. Otherwise it is one of ``groups`` equal parts of these dims (GroupNorm over NCHW: axis 1). With
``channels_last`` = 1, x is (N, ..., C), and a row is one group of channels at all positions, split by positions.

statistics: (rows, splits, 2) float32. The parts have equal length, a multiple of 1024 elements (or positions). So the
last part may be short or empty.
"""

from typing import Any

import numpy as np
import triton
import triton.language as tl

from ._launch import LOOPED, Launch, Op, Size, Tensor, Tile, constant, next_power_of_2, product, programs
from ._math import half, is_wide, load_column, row_moments, split_length, store, widened
from .group_norm import strided_moments


def reference(x: np.ndarray, *, axis: int, groups: int, splits: int, channels_last: int) -> np.ndarray:
    """Compute the op in float64.

    Returns:
        statistics.
    """
    if channels_last:
        rows = np.moveaxis(x.reshape(x.shape[0], -1, groups, x.shape[-1] // groups), 2, 1)
        rows = rows.reshape(x.shape[0] * groups, -1, x.shape[-1] // groups)
    else:
        rows = x.reshape(int(np.prod(x.shape[: axis % x.ndim])) * groups, -1, 1)
    length = -(-rows.shape[1] // (1024 * splits)) * 1024
    out = np.zeros((len(rows), splits, 2))
    for s in range(splits):
        part = rows[:, s * length : (s + 1) * length].reshape(len(rows), -1)
        if part.size:
            out[:, s, 0] = part.mean(1)
            out[:, s, 1] = part.var(1) * part.shape[1]
    return out


@triton.jit
def statistics_kernel(
    x_ptr,
    rows,
    n,
    channels,
    statistics_ptr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute statistics of rows of ``n`` contiguous elements, or (CHANNELS_LAST) of ``n`` positions with ``channels``
    elements each.
    """
    # An empty batch still launches one program (`_launch.programs`).
    if rows == 0:
        return
    for WIDE in tl.static_range(2):
        if is_wide(channels if CHANNELS_LAST else n, x_ptr) == WIDE:
            items = n if CHANNELS_LAST else widened(n, x_ptr, WIDE)
            width = widened(channels, x_ptr, WIDE) if CHANNELS_LAST else channels
            HEIGHT: tl.constexpr = ROWS if WIDE or not CHANNELS_LAST else half(ROWS)
            SIZE: tl.constexpr = BLOCK if WIDE or CHANNELS_LAST else half(BLOCK)
            pid = tl.program_id(0).to(tl.int64)
            row = pid // SPLITS
            length = split_length(items, SPLITS)
            start = (pid % SPLITS).to(tl.int32) * length
            # The count is negative if the part begins after the row's end.
            count = tl.minimum(length, items - start)
            zero = tl.zeros([1], tl.int64)
            exists = (zero + row) < rows
            begun = exists & ((zero + count) > 0)
            if CHANNELS_LAST:
                stride = width * GROUPS
                base = ((row // GROUPS) * items + start) * stride + (row % GROUPS) * width + zero
                first = load_column(x_ptr, base, begun)
                mean, m2 = strided_moments(
                    x_ptr, base[:, None], begun[:, None], first, count, width, stride, HEIGHT, SIZE
                )
            else:
                base = row * items + start + zero
                first = load_column(x_ptr, base, begun)
                mean, m2 = row_moments(x_ptr, x_ptr, base[:, None], begun[:, None], first, count, 1, SIZE, False)
            out = (pid * 2 + zero)[:, None]
            store(statistics_ptr, out, tl.where(begun[:, None], mean, 0.0), exists[:, None])
            store(statistics_ptr, out + 1, tl.where(begun[:, None], m2, 0.0), exists[:, None])


def extents(x: Tensor, attributes: dict[str, Any]) -> tuple[Size, Size, Size]:
    """Split a shape.

    Returns:
        number of rows, number of items by which a row is split, and channels per item.
    """
    groups, axis = attributes["groups"], attributes["axis"] % len(x.shape)
    if attributes["channels_last"]:
        return product((x.shape[0], groups)), product(x.shape[1:-1]), x.shape[-1] // groups
    return product((*x.shape[:axis], groups)), product((x.shape[axis] // groups, *x.shape[axis + 1 :])), 1


def tiles(inputs: list[Tensor], attributes: dict[str, Any]) -> list[Tile]:
    """List the tactics.

    Returns:
        tactics, the default first.
    """
    block = 1
    if attributes["channels_last"]:
        # Only constant sizes are divided, because TensorRT forbids other divisions while it requests the tactics.
        width = constant(inputs[0].shape[-1])
        block = 32 if width is None else next_power_of_2(width // attributes["groups"])
    return [Tile(max(1, size // block), block, warps, loop=True) for size, warps in LOOPED[:2]]


def launch(inputs: list[Tensor], attributes: dict[str, Any], tile: Tile) -> Launch:
    """Make the launch of a tactic.

    Returns:
        the launch.
    """
    rows, n, channels = extents(inputs[0], attributes)
    last = attributes["channels_last"]
    return Launch(
        statistics_kernel,
        programs(product((rows, attributes["splits"]))),
        {"rows": rows, "n": n, "channels": channels},
        {
            "GROUPS": attributes["groups"],
            "SPLITS": attributes["splits"],
            "CHANNELS_LAST": bool(last),
            "ROWS": tile.rows if last else 1,
            "BLOCK": tile.block if last else tile.rows * tile.block,
        },
        tile.warps,
    )


OP = Op(
    "NormStatistics",
    inputs=("x",),
    types="TF",
    attributes={"axis": int, "groups": int, "splits": int, "channels_last": int},
    tiles=tiles,
    launch=launch,
    reference=reference,
    outputs=("statistics",),
    shapes=lambda inputs, a: [(extents(inputs[0], a)[0], a["splits"], 2)],
    required={"channels_last": (0, 1)},
)
