"""Scale and shift per channel, then an activation: a BatchNorm at inference that could not be folded (Ioffe, Szegedy
2015).

x: any shape with ``C`` elements along ``axis``; scale, shift: (C,); y = act(x · scale[c] + shift[c]), with x's shape;
act: 'none', 'relu', 'silu'.
"""

from typing import Any

import numpy as np
import triton
import triton.language as tl

from ._launch import ITEMSIZE, Launch, Op, Tensor, Tile, cdiv, constant_product, next_power_of_2, product, programs
from ._math import activate, is_wide, load, load_column, parts, positive, store, widened


def reference(x: np.ndarray, scale: np.ndarray, shift: np.ndarray, *, axis: int, activation: str) -> np.ndarray:
    """Compute the op in float64.

    Returns:
        y.
    """
    per_channel = (-1,) + (1,) * (x.ndim - 1 - axis % x.ndim)
    return activation_reference(x * scale.reshape(per_channel) + shift.reshape(per_channel), activation)


def activation_reference(y: np.ndarray, activation: str) -> np.ndarray:
    """Apply an activation in float64.

    Returns:
        y after the activation.
    """
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
    """Scale ``rows`` rows of ``n`` elements. With BY_ROW, the channel is the row's number modulo ``channels``.
    Otherwise the channel is determined by the column: each channel has UNIT consecutive elements.
    """
    # An empty batch still launches one program (`_launch.programs`).
    if rows == 0:
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


def last(x: Tensor, axis: int) -> bool:
    """Check if the channel is the last dim. A row then contains all channels, instead of the elements of one channel.

    Returns:
        true or false.
    """
    return constant_product(x.shape[axis + 1 :]) == 1


def tiles(inputs: list[Tensor], attributes: dict[str, Any]) -> list[Tile]:
    """List the tactics. For small images, a row may be a whole sample. This is so if a sample is a multiple of 16
    bytes, but one channel's image (7 × 7) is not.

    Returns:
        tactics, the default first.
    """
    x, axis = inputs[0], attributes["axis"] % len(inputs[0].shape)
    inner, sample = constant_product(x.shape[axis + 1 :]), constant_product(x.shape[axis:])
    wide = 16 // ITEMSIZE[x.dtype]
    flat = bool(inner and sample and 1 < inner < 1024 and inner % wide and sample % wide == 0)
    n = sample if flat or last(x, axis) else inner
    sizes = ((1024, 4), (2048, 8), (2048, 4), (4096, 8))
    blocks = [(min(size, next_power_of_2(n)) if n else size, size, warps) for size, warps in sizes]
    pack = int(x.shape[axis]) if flat else 1
    return list(dict.fromkeys(Tile(size // block, block, warps, pack=pack) for block, size, warps in blocks))


def launch(inputs: list[Tensor], attributes: dict[str, Any], tile: Tile) -> Launch:
    """Make the launch of a tactic.

    Returns:
        the launch.
    """
    x, axis = inputs[0], attributes["axis"] % len(inputs[0].shape)
    by_row = tile.pack == 1 and not last(x, axis)
    start = axis + by_row
    rows, n = product(x.shape[:start]), product(x.shape[start:])
    constants = {
        "ACTIVATION": attributes["activation"],
        "BY_ROW": by_row,
        "UNIT": product(x.shape[axis + 1 :]) if tile.pack > 1 else 1,
    }
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
