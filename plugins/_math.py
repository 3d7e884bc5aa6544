"""What the kernels share, in Triton: loads in float32, the statistics, the affine at the end.

Every tile has two dims, ``[R, B]``; a row's statistics have the shape ``[R, 1]``. Masked elements are loaded as 0.

Statistics are never E[x²] − E[x]². A row that fits in registers takes two passes over them; a longer one is read twice:
Welford's update (Technometrics 4, 1962) in each lane by itself, then the lanes are merged by the formula of Chan, Golub
and LeVeque (1979): mean = Σ nᵢmᵢ / n and M2 = Σ (M2ᵢ + nᵢ(mᵢ − mean)²). A mean is always taken as ``first + mean(x −
first)`` with the row's first element: exact for a constant row, and for a large offset the sum does not grow with it.
"""

import triton
import triton.language as tl


@triton.jit
def tile_rows(rows, n, ROWS: tl.constexpr):
    """The rows of this program, int64 ``[ROWS]`` (a tensor may hold more than 2³¹ elements), and which of them exist
    and have elements."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, (row < rows) & (n > 0)


@triton.jit
def positive(size):
    """A size to divide by, 1 where a tensor is empty: a division by 0 lets the compiler do anything with the rest of
    the kernel."""
    return tl.maximum(size, 1)


@triton.jit
def parts(size, BLOCK: tl.constexpr):
    """In how many blocks ``size`` is, at least 1."""
    return positive((size + BLOCK - 1) // BLOCK)


@triton.jit
def inside(live, held, ROWS: tl.constexpr):
    """Which elements of a tile are there: ``held`` of each row's, in the rows that are ``live``. A row that is the only
    one of its program is there, and without its predicates fewer registers are used."""
    return held if ROWS == 1 else live & held


@triton.jit
def is_wide(n, ptr):
    """Whether every row of ``n`` elements begins at a multiple of 16 bytes, as the tensor does."""
    return n % (128 // ptr.dtype.element_ty.primitive_bitwidth) == 0


@triton.jit
def widened(n, ptr, WIDE: tl.constexpr):
    """``n``; where `is_wide`, as a product with the elements of 16 bytes: only so does the compiler see that addresses
    are multiples of it (``tl.multiple_of`` of an argument does not reach them)."""
    wide: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    return n // wide * wide if WIDE else n


# a function of constants alone: what a `triton_config.jit` function returns is no constant in Triton 3.6
@triton.constexpr_function
def half(SIZE):
    """Half of a tile: for rows that are not wide, of whose elements each has an address and a predicate of its own."""
    return SIZE // 2 if SIZE > 1 else SIZE


@triton.jit
def load(ptr, offset, mask):
    return tl.load(ptr + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_column(ptr, offset, mask):
    """One element a row, ``[ROWS]`` → ``[ROWS, 1]``: as a column it would be loaded once for each element that a thread
    has."""
    return load(ptr, offset, mask)[:, None]


@triton.jit
def store(ptr, offset, value, mask):
    tl.store(ptr + offset, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_sum(x_ptr, residual_ptr, offset, mask, ADD: tl.constexpr):
    """x, or x + residual as it is stored: the norm that follows an Add sees the rounded sum."""
    x = load(x_ptr, offset, mask)
    if ADD:
        x = (x + load(residual_ptr, offset, mask)).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def centered(x, first, mask, n, AXIS: tl.constexpr):
    """x − mean (0 where masked) and M2 = Σ(x − mean)² over ``AXIS``, by two passes over registers."""
    mean = first + tl.expand_dims(tl.sum(tl.where(mask, x - first, 0.0), axis=AXIS), AXIS) / n
    d = tl.where(mask, x - mean, 0.0)
    return d, tl.expand_dims(tl.sum(d * d, axis=AXIS), AXIS)


@triton.jit
def merge(count, mean, m2, first, n, AXIS: tl.constexpr):
    """Chan's merge along ``AXIS`` of parts with ``count`` elements each; parts of no element have mean = m2 = 0."""
    total = first + tl.expand_dims(tl.sum(tl.where(count > 0, count * (mean - first), 0.0), axis=AXIS), AXIS) / n
    d = mean - total
    return total, tl.expand_dims(tl.sum(m2 + count * d * d, axis=AXIS), AXIS)


@triton.jit
def welford(x, mask, k, mean, m2):
    """One step of Welford's update in each lane: ``k`` is the number of elements that a live lane then has seen, 2 or
    more.

    A lane begins with its first element as its mean: that step would divide by 1, where div.full may err, and the mean
    has to be exact.
    """
    delta = x - mean
    updated = mean + delta * (1.0 / k)
    return tl.where(mask, updated, mean), tl.where(mask, m2 + delta * (x - updated), m2)


@triton.jit
def row_moments(x_ptr, residual_ptr, base, live, first, n, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """Mean and M2 ``[ROWS, 1]`` of rows of ``n`` elements at ``base``, their first being ``first``, read block by
    block."""
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
    return tl.expand_dims(tl.sum(tl.where(mask, x * x, 0.0), axis=1), 1) / n


@triton.jit
def row_mean_square(x_ptr, residual_ptr, base, live, n, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """Mean of the squares ``[ROWS, 1]`` of rows of ``n`` elements at ``base``, read block by block."""
    col = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        x = load_sum(x_ptr, residual_ptr, base + (start + col), inside(live, start + col < n, ROWS), ADD)
        total += x * x
    return tl.expand_dims(tl.sum(total, axis=1), 1) / n


@triton.jit
def inverse_root(variance, EPSILON: tl.constexpr):
    """1/√(variance + ε), correctly rounded steps: rsqrt.approx flushes a denormal variance to 0. Once a row, so it
    costs nothing."""
    return tl.div_rn(tl.full([1, 1], 1.0, tl.float32), tl.sqrt_rn(variance + EPSILON))


@triton.jit
def activate(y, ACTIVATION: tl.constexpr):
    """'none', 'relu' (a NaN stays a NaN), or 'silu': y·sigmoid(y) = y / (1 + exp(−y))."""
    if ACTIVATION == "relu":
        y = tl.where(y < 0.0, 0.0, y)
    elif ACTIVATION == "silu":
        y = y / (1.0 + tl.exp(-y))
    return y


@triton.jit
def split_length(n, SPLITS: tl.constexpr):
    """Elements of each of ``SPLITS`` parts of a row, a multiple of 1024: each starts aligned, the last may be short or
    empty."""
    return (n + SPLITS * 1024 - 1) // (SPLITS * 1024) * 1024


@triton.jit
def merged_moments(statistics_ptr, row, live, n, SPLITS: tl.constexpr, UNIT):
    """Mean and M2, shaped like ``row``, from (row, split, 2) float32; a row is ``n`` items of ``UNIT`` elements, split
    by items.

    One part after the other, each thread for itself: the loads don't wait for each other, and a reduction across
    threads would cost more.
    """
    length = split_length(n, SPLITS)
    at = row * (SPLITS * 2)
    first = load(statistics_ptr, at, live)
    mean = tl.zeros_like(first)
    m2 = load(statistics_ptr, at + 1, live)
    for split in tl.static_range(1, SPLITS):
        count = tl.minimum(tl.maximum(n - split * length, 0), length) * 1.0 * UNIT
        before = tl.minimum(n, split * length) * 1.0 * UNIT
        # from the first part's mean on, so that a sum doesn't round at the means' size
        delta = load(statistics_ptr, at + 2 * split, live) - first - mean
        share = count / tl.maximum(before + count, 1.0)
        mean += delta * share
        # in this order a part of no element adds 0, however large the mean is
        m2 += load(statistics_ptr, at + 2 * split + 1, live) + before * share * delta * delta
    return first + mean, m2
