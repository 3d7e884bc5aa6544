"""GroupNorm of small images. A group is one row. The length of a row is a multiple of 16 bytes even if the length of
one channel's image (7 × 7) is not.

For each element, the kernel loads the parameters of the element's channel. The parameters are in the L1 cache, and most
neighboring elements need the same parameters.
"""

import triton
import triton.language as tl

from ._math import activate, centered, inside, inverse_root, load, load_column, row_moments, store, tile_rows


@triton.jit
def group_norm_flat_kernel(
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
    """Normalize groups as rows. ``channels`` and ``inner`` (the number of positions of a channel) are constants."""
    if rows == 0:
        return
    n = channels * inner
    row, exists = tile_rows(rows, n, ROWS)
    base, live = (row * n)[:, None], exists[:, None]
    channel0 = ((row % GROUPS) * channels)[:, None]
    first = load_column(x_ptr, row * n, exists)
    col = tl.arange(0, BLOCK)[None, :]
    if LOOP:
        mean, m2 = row_moments(x_ptr, x_ptr, base, live, first, n, ROWS, BLOCK, False)
        scale = inverse_root(m2 / n, EPSILON)
        for start in range(0, n, BLOCK):
            at = start + col
            mask = inside(live, at < n, ROWS)
            channel = channel0 + at // inner
            y = (load(x_ptr, base + at, mask) - mean) * scale * load(gamma_ptr, channel, mask)
            store(y_ptr, base + at, activate(y + load(beta_ptr, channel, mask), ACTIVATION), mask)
    else:
        mask = inside(live, col < n, ROWS)
        channel = channel0 + col // inner
        d, m2 = centered(load(x_ptr, base + col, mask), first, mask, n, 1)
        y = d * inverse_root(m2 / n, EPSILON) * load(gamma_ptr, channel, mask) + load(beta_ptr, channel, mask)
        store(y_ptr, base + col, activate(y, ACTIVATION), mask)
