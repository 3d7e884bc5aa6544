"""Shared parts of the Triton kernels: loads in float32, statistics, and the scale and shift at the end.

Every tile has two dims, ``[R, B]``; a row's statistics have the shape ``[R, 1]``. Masked elements are loaded as 0.

The variance is never computed as E[x²] − E[x]². For a row that fits in registers, two passes over the registers compute
the mean and the variance. A longer row is read from memory twice. In the first pass, each lane runs Welford's update
(Technometrics 4, 1962). Then the lanes are merged by the formula of Chan, Golub and LeVeque (1979): mean = Σ nᵢmᵢ / n
and M2 = Σ (M2ᵢ + nᵢ(mᵢ − mean)²). M2 is the sum of squared deviations. A mean is always computed as ``first + mean(x −
first)``, where ``first`` is the row's first element. This is exact for a constant row, and a large offset does not
enlarge the sum.
"""

import triton
import triton.language as tl


@triton.jit
def tile_rows(rows, n, ROWS: tl.constexpr):
    """Compute the rows of this program.

    Returns:
        row numbers as int64 ``[ROWS]``, because a tensor may have more than 2³¹ elements; and a mask of the rows that
        exist and have elements.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, (row < rows) & (n > 0)


@triton.jit
def positive(size):
    """Make a size safe as a divisor. A division by 0 is undefined, and the compiler may then break the whole kernel.

    Returns:
        the size, or 1 for an empty tensor.
    """
    return tl.maximum(size, 1)


@triton.jit
def parts(size, BLOCK: tl.constexpr):
    """Count the blocks that cover ``size``.

    Returns:
        at least 1.
    """
    return positive((size + BLOCK - 1) // BLOCK)


@triton.jit
def inside(live, held, ROWS: tl.constexpr):
    """Combine the masks of a tile: ``held`` for the elements of a row, and ``live`` for the rows. A program with a
    single row ignores ``live``, because this row always exists. A kernel that ignores ``live`` needs fewer registers.

    Returns:
        mask of the tile.
    """
    return held if ROWS == 1 else live & held


@triton.jit
def is_wide(n, ptr):
    """Check if every row of ``n`` elements begins at a multiple of 16 bytes, provided that the tensor itself does.

    Returns:
        true or false.
    """
    return n % (128 // ptr.dtype.element_ty.primitive_bitwidth) == 0


@triton.jit
def widened(n, ptr, WIDE: tl.constexpr):
    """Return ``n``. If `is_wide` holds, write ``n`` as a multiple of the number of elements in 16 bytes.

    Only in this form does the compiler know that addresses are multiples of 16. ``tl.multiple_of`` of an argument has
    no effect on the addresses.

    Returns:
        the same number.
    """
    wide: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    return n // wide * wide if WIDE else n


# This is a constexpr_function, because the result of a `triton_config.jit` function is not a constant in Triton 3.6.
@triton.constexpr_function
def half(SIZE):
    """Halve a tile for rows that are not wide, because each element of such a row needs its own address and predicate.

    Returns:
        half the size, at least 1.
    """
    return SIZE // 2 if SIZE > 1 else SIZE


@triton.jit
def load(ptr, offset, mask):
    """Load elements.

    Returns:
        float32, 0 for masked elements.
    """
    return tl.load(ptr + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_column(ptr, offset, mask):
    """Load one element per row, ``[ROWS]`` → ``[ROWS, 1]``. A load of shape ``[ROWS, 1]`` would be repeated for each
    element of a thread.

    Returns:
        float32 ``[ROWS, 1]``.
    """
    return load(ptr, offset, mask)[:, None]


@triton.jit
def store(ptr, offset, value, mask):
    """Store float32 values in the type of ``ptr``."""
    tl.store(ptr + offset, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_sum(x_ptr, residual_ptr, offset, mask, ADD: tl.constexpr):
    """Load x, or x + residual rounded to the stored type, because the norm after an Add reads the rounded sum.

    Returns:
        float32.
    """
    x = load(x_ptr, offset, mask)
    if ADD:
        x = (x + load(residual_ptr, offset, mask)).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def centered(x, first, mask, n, AXIS: tl.constexpr):
    """Compute x − mean (0 for masked elements) and M2 = Σ(x − mean)² over ``AXIS``, by two passes over registers.

    Returns:
        (x − mean, M2).
    """
    mean = first + tl.expand_dims(tl.sum(tl.where(mask, x - first, 0.0), axis=AXIS), AXIS) / n
    d = tl.where(mask, x - mean, 0.0)
    return d, tl.expand_dims(tl.sum(d * d, axis=AXIS), AXIS)


@triton.jit
def merge(count, mean, m2, first, n, AXIS: tl.constexpr):
    """Merge parts with ``count`` elements each along ``AXIS`` by Chan's formula; empty parts have mean = m2 = 0.

    Returns:
        (mean, M2).
    """
    total = first + tl.expand_dims(tl.sum(tl.where(count > 0, count * (mean - first), 0.0), axis=AXIS), AXIS) / n
    d = mean - total
    return total, tl.expand_dims(tl.sum(m2 + count * d * d, axis=AXIS), AXIS)


@triton.jit
def welford(x, mask, k, mean, m2):
    """Run one step of Welford's update in each lane.

    A lane starts with its first element as its mean, without a step. A step would divide by 1. div.full may be inexact
    even for this division, but the mean of one element must be exact.

    Args:
        k: number of elements that a live lane has processed after this step, 2 or more.

    Returns:
        (mean, M2).
    """
    delta = x - mean
    updated = mean + delta * (1.0 / k)
    return tl.where(mask, updated, mean), tl.where(mask, m2 + delta * (x - updated), m2)


@triton.jit
def row_moments(x_ptr, residual_ptr, base, live, first, n, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """Compute mean and M2 of rows of ``n`` elements at ``base`` that start with ``first``, read block by block.

    Returns:
        (mean, M2), each ``[ROWS, 1]``.
    """
    col = tl.arange(0, BLOCK)[None, :]
    mean = load_sum(x_ptr, residual_ptr, base + col, inside(live, col < n, ROWS), ADD)
    m2 = tl.zeros([ROWS, BLOCK], tl.float32)
    k = 1.0
    for start in range(BLOCK, n, BLOCK):
        mask = inside(live, start + col < n, ROWS)
        k += 1.0
        mean, m2 = welford(load_sum(x_ptr, residual_ptr, base + (start + col), mask, ADD), mask, k, mean, m2)
    count = tl.where(live, (n - col + BLOCK - 1) // BLOCK, 0).to(tl.float32)
    return merge(count, mean, m2, first, n, 1)


@triton.jit
def mean_square(x, mask, n):
    """Compute the mean of the squares of each row.

    Returns:
        ``[ROWS, 1]``.
    """
    return tl.expand_dims(tl.sum(tl.where(mask, x * x, 0.0), axis=1), 1) / n


@triton.jit
def row_mean_square(x_ptr, residual_ptr, base, live, n, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """Compute the mean of the squares of rows of ``n`` elements at ``base``, read block by block.

    Returns:
        ``[ROWS, 1]``.
    """
    col = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        x = load_sum(x_ptr, residual_ptr, base + (start + col), inside(live, start + col < n, ROWS), ADD)
        total += x * x
    return tl.expand_dims(tl.sum(total, axis=1), 1) / n


@triton.jit
def inverse_root(variance, EPSILON: tl.constexpr):
    """Compute 1/√(variance + ε) in correctly rounded steps, because rsqrt.approx flushes a denormal variance to 0. This
    is computed once per row, so it takes almost no time.

    Returns:
        ``[R, 1]``.
    """
    return tl.div_rn(tl.full([1, 1], 1.0, tl.float32), tl.sqrt_rn(variance + EPSILON))


@triton.jit
def activate(y, ACTIVATION: tl.constexpr):
    """Apply 'none', 'sigmoid', 'relu' (a NaN stays a NaN), or 'silu': y·sigmoid(y) = y / (1 + exp(−y)).

    Returns:
        y after the activation.
    """
    if ACTIVATION == "sigmoid":
        y = 1.0 / (1.0 + tl.exp(-y))
    elif ACTIVATION == "relu":
        y = tl.where(y < 0.0, 0.0, y)
    elif ACTIVATION == "silu":
        y = y / (1.0 + tl.exp(-y))
    return y


@triton.jit
def split_length(n, SPLITS: tl.constexpr):
    """Compute the length of each of ``SPLITS`` parts of a row.

    Returns:
        a multiple of 1024, so that each part starts aligned; the last part may be short or empty.
    """
    return (n + SPLITS * 1024 - 1) // (SPLITS * 1024) * 1024


@triton.jit
def merged_moments(statistics_ptr, row, live, n, SPLITS: tl.constexpr, UNIT):
    """Merge partial statistics (row, split, 2) in float32; a row is ``n`` items of ``UNIT`` elements, split by items.

    Each thread merges all parts, one after the other. The loads don't wait for each other, so this is faster than a
    reduction across threads.

    Returns:
        (mean, M2), each of the shape of ``row``.
    """
    length = split_length(n, SPLITS)
    at = row * (SPLITS * 2)
    first = load(statistics_ptr, at, live)
    mean = tl.zeros_like(first)
    m2 = load(statistics_ptr, at + 1, live)
    for split in tl.static_range(1, SPLITS):
        count = tl.minimum(tl.maximum(n - split * length, 0), length) * 1.0 * UNIT
        before = tl.minimum(n, split * length) * 1.0 * UNIT
        # Means are taken relative to the first part's mean, so that rounding errors do not grow with the size of the
        # means.
        delta = load(statistics_ptr, at + 2 * split, live) - first - mean
        share = count / tl.maximum(before + count, 1.0)
        mean += delta * share
        # The factors are in this order so that a part without elements adds 0, however large the mean is.
        m2 += load(statistics_ptr, at + 2 * split + 1, live) + before * share * delta * delta
    return first + mean, m2
