"""GroupNorm with channels last and several groups per program. For example, a group of 10 channels in half precision
takes 20 bytes, which is not a multiple of the 16 bytes of one access. Four such groups side by side take 80 bytes,
which is a multiple.

A tile is ROWS positions × BLOCK channels of PACK groups. Every sum is first taken over the positions, then over the
channels of each group. A matrix of PACK × BLOCK booleans selects the channels of a group.
"""

import triton
import triton.language as tl

from ._math import activate, inverse_root, load, merge, store, welford


@triton.jit
def by_group(x, member):
    """Sum ``x`` ``[1, BLOCK]`` over each group's channels.

    Returns:
        ``[GROUPS, 1]``.
    """
    return tl.expand_dims(tl.sum(tl.where(member, x, 0.0), axis=1), 1)


@triton.jit
def by_channel(x, member):
    """Return, for each channel, the value of its group in ``x`` ``[GROUPS, 1]``.

    Returns:
        ``[1, BLOCK]``.
    """
    return tl.expand_dims(tl.sum(tl.where(member, x, 0.0), axis=0), 0)


@triton.jit
def group_norm_packed_kernel(
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
    PACK: tl.constexpr,
    PACK_LANES: tl.constexpr,
):
    """Normalize PACK groups. PACK and ``channels`` are constants, and PACK · ``channels`` elements are a multiple of 16
    bytes. PACK_LANES is PACK rounded up to a power of 2.
    """
    if rows == 0:
        return
    PACKS: tl.constexpr = (GROUPS + PACK - 1) // PACK
    pid = tl.program_id(0).to(tl.int64)
    width = channels * GROUPS
    channel0 = (pid % PACKS) * (PACK * channels)
    base = (pid // PACKS) * inner * width + channel0
    at = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    group = tl.arange(0, PACK_LANES)[:, None]
    present = (c < PACK * channels) & (channel0 + c < width)
    member = (c // channels == group) & present
    gamma = load(gamma_ptr, channel0 + c, present)
    beta = load(beta_ptr, channel0 + c, present)
    first = load(x_ptr, base + c, present & (inner > 0))
    if LOOP:
        mean = load(x_ptr, base + at.to(tl.int64) * width + c, present & (at < inner))
        m2 = tl.zeros([ROWS, BLOCK], tl.float32)
        k = 1.0
        for start in range(ROWS, inner, ROWS):
            mask = present & (start + at < inner)
            k += 1.0
            mean, m2 = welford(load(x_ptr, base + (start + at).to(tl.int64) * width + c, mask), mask, k, mean, m2)
        count = tl.where(present, (inner - at + ROWS - 1) // ROWS, 0).to(tl.float32)
        mean, m2 = merge(count, mean, m2, first, inner, 0)
    else:
        mask = present & (at < inner)
        x = load(x_ptr, base + at.to(tl.int64) * width + c, mask)
        mean = first + tl.expand_dims(tl.sum(tl.where(mask, x - first, 0.0), axis=0), 0) / inner
        d = tl.where(mask, x - mean, 0.0)
        m2 = tl.expand_dims(tl.sum(d * d, axis=0), 0)
    # Merge a group's channels by Chan's formula, with means relative to the group's first channel. All channels have
    # equal length.
    start_of_group = by_group(mean, member & (c == group * channels))
    total = start_of_group + by_group(mean - start_of_group, member) / channels
    center = by_channel(total, member)
    apart = mean - center
    variance = by_group(m2 + inner * 1.0 * apart * apart, member) / (inner * 1.0 * channels)
    scale = by_channel(inverse_root(variance, EPSILON), member)
    if LOOP:
        for start in range(0, inner, ROWS):
            mask = present & (start + at < inner)
            offset = base + (start + at).to(tl.int64) * width + c
            xhat = (load(x_ptr, offset, mask) - center) * scale
            store(y_ptr, offset, activate(xhat * gamma + beta, ACTIVATION), mask)
    else:
        y = activate((x - center) * scale * gamma + beta, ACTIVATION)
        store(y_ptr, base + at.to(tl.int64) * width + c, y, mask)
