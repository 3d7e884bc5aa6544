"""Scale and shift per channel, then an activation: what a BatchNorm is at inference where it could not be folded
(Ioffe, Szegedy 2015).

x: any shape with ``C`` elements along ``axis``; scale, shift: (C,); y = act(x · scale[c] + shift[c]), like x; act:
'none', 'relu', 'silu'.
"""

from typing import Any

import numpy as np
import triton
import triton.language as tl

from ._launch import ITEMSIZE, Launch, Op, Tensor, Tile, cdiv, constant_product, next_power_of_2, product, programs
from ._math import activate, is_wide, load, load_column, parts, positive, store, widened


def reference(x: np.ndarray, scale: np.ndarray, shift: np.ndarray, *, axis: int, activation: str) -> np.ndarray:
    per_channel = (-1,) + (1,) * (x.ndim - 1 - axis % x.ndim)
    return activation_reference(x * scale.reshape(per_channel) + shift.reshape(per_channel), activation)


def activation_reference(y: np.ndarray, activation: str) -> np.ndarray:
    if activation == "silu":
        return y * np.exp(np.minimum(y, 0)) / (np.exp(-np.abs(y)) + 1)
    return np.where(y < 0, 0, y) if activation == "relu" else y


@triton.jit
def scale_shift_kernel(
    x_ptr,
    scale_ptr,
    shift_ptr,
    rows,
    n,
    channels,
    y_ptr,
    ACTIVATION: tl.constexpr,
    BY_ROW: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``rows`` rows of ``n`` elements; the channel is the row's number modulo ``channels``, or (not BY_ROW) the
    column's, UNIT elements each."""
    if rows == 0:  # of the one program that a grid then has
        return
    for WIDE in tl.static_range(2):
        if is_wide(n, x_ptr) == WIDE:
            length = widened(n, x_ptr, WIDE)
            blocks = parts(length, BLOCK)
            pid = tl.program_id(0)
            row = (pid // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
            col = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
            mask = (row < rows)[:, None] & (col < length)
            offset = (row * length)[:, None] + col
            if BY_ROW:
                channel = row % positive(channels)
                scale = load_column(scale_ptr, channel, row < rows)
                shift = load_column(shift_ptr, channel, row < rows)
            else:
                scale = load(scale_ptr, col // UNIT, col < length)
                shift = load(shift_ptr, col // UNIT, col < length)
            store(y_ptr, offset, activate(load(x_ptr, offset, mask) * scale + shift, ACTIVATION), mask)


def cut(x: Tensor, axis: int) -> tuple[int, int]:
    """The dim from which on a row is, and how many elements of a row have one channel, 0 where all have.

    A channel's elements are a row, but where they are one, the channel being the last dim, and where they are small
    images of no multiple of 16 bytes (7 × 7) while a sample is one: then rows begin at the channels' dim.
    """
    axis %= len(x.shape)
    inner, sample = constant_product(x.shape[axis + 1 :]), constant_product(x.shape[axis:])
    wide = 16 // ITEMSIZE[x.dtype]
    small = inner and sample and inner % wide and sample % wide == 0 and inner < 1024
    return (axis, inner) if inner and (inner == 1 or small) else (axis + 1, 0)


def tiles(inputs: list[Tensor], attributes: dict[str, Any]) -> list[Tile]:
    x = inputs[0]
    n = constant_product(x.shape[cut(x, attributes["axis"])[0] :])
    sizes = ((1024, 4), (2048, 8), (2048, 4), (4096, 8))
    blocks = [(min(size, next_power_of_2(n)) if n else size, size, warps) for size, warps in sizes]
    return list(dict.fromkeys(Tile(size // block, block, warps) for block, size, warps in blocks))


def launch(inputs: list[Tensor], attributes: dict[str, Any], tile: Tile) -> Launch:
    x, axis = inputs[0], attributes["axis"] % len(inputs[0].shape)
    start, unit = cut(x, axis)
    rows, n = product(x.shape[:start]), product(x.shape[start:])
    constants = {"ACTIVATION": attributes["activation"], "BY_ROW": unit == 0, "UNIT": unit}
    return Launch(
        scale_shift_kernel,
        programs(product((cdiv(rows, tile.rows), cdiv(n, tile.block)))),
        {"rows": rows, "n": n, "channels": x.shape[axis]},
        constants | {"ROWS": tile.rows, "BLOCK": tile.block},
        tile.warps,
    )


OP = Op(
    "ScaleShift",
    inputs=("x", "scale", "shift"),
    types="TPPT",
    attributes={"axis": int, "activation": str},
    tiles=tiles,
    launch=launch,
    reference=reference,
    required={"activation": ("none", "relu", "silu")},
    beside=lambda inputs, a: (OP, list(inputs), a | {"axis": -1}) if a["axis"] in (1, -3) else None,
)
