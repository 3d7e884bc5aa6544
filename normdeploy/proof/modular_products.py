"""Compute sums of products in the field with machine multiplications.

An element of 160 bits is split into ten digits of 16 bits. float64 multiplies and adds digits without rounding if fewer
than 2^20 products are added (2^32 · 2^20 < 2^53). So a matrix product over the field is one float matrix product that
is a hundred times as large, plus carries. This is several times as fast as a loop over Python integers; proofs of
convolutions need this speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Bits of a digit
_DIGIT = 16
# Maximum number of products in one sum
_LONGEST = 2**20
# Widest prime in bits for digits. Their cost grows with the square of the width, and Python integers are faster beyond
# this.
_WIDEST = 512
# Cost of a matrix product, in units of a product of Python integers: of an element of the result that is put together
# from digits, and of an element of a factor that is split into digits
_JOINED = 22
_SPLIT = 5
# Number of float products from which BLAS is used. For fewer products, the check for NaN and the new layout cost too
# much.
_MANY = 2**24
# Number of floats that one block of rows may take
_HELD = 2**21


def contract(a: Array, b: Array, slots: Sequence[int], p: int = 0) -> Array:
    """Compute Σ a·b over ``slots`` of arrays that broadcast to each other.

    Floats are multiplied and added one by one, so that NaN and Inf propagate as in the sum of the products. BLAS is
    used for many products of finite arrays only.

    Args:
        slots: axes to sum over.
        p: modulus; 0 for floats.

    Returns:
        the sums; the summed axes keep length 1.
    """
    lengths = [max(n, m) for n, m in zip(a.shape, b.shape, strict=True)]
    batch = [i for i, n in enumerate(lengths) if i not in slots and a.shape[i] == b.shape[i] == n > 1]
    left = [i for i in range(a.ndim) if i not in slots and i not in batch and a.shape[i] > 1]
    right = [i for i in range(a.ndim) if i not in slots and i not in batch and b.shape[i] > 1]
    shape = [1 if i in slots else n for i, n in enumerate(lengths)]
    summed = list(slots)
    if not p and uses_blas(a, b, lengths):
        first = _group_axes(a, lengths, batch, left, summed)
        second = _group_axes(b, lengths, batch, summed, right)
        return _restore_axis_order(first @ second, lengths, [*batch, *left, *right], shape)
    if not p:
        return np.asarray(
            np.einsum(
                _drop_unit_axes(a), _varying_axes(a), _drop_unit_axes(b), _varying_axes(b), sorted(batch + left + right)
            )
        ).reshape(shape)
    first = _group_axes(a, lengths, batch, left, summed)
    second = _group_axes(b, lengths, batch, summed, right)
    made = np.empty((first.shape[0], first.shape[1], second.shape[2]), dtype=object)
    for i in range(len(made)):
        made[i] = modular_matmul(first[i], second[i], p)
    return _restore_axis_order(made, lengths, [*batch, *left, *right], shape)


def _restore_axis_order(made: Array, lengths: list[int], order: list[int], shape: list[int]) -> Array:
    """Reorder the axes of the products from ``order`` to the axis order of the factors."""
    whole = made.reshape([lengths[i] for i in order])
    return whole.transpose([order.index(i) for i in sorted(order)]).reshape(shape)


def uses_blas(a: Array, b: Array, lengths: Sequence[int]) -> bool:
    """Return True if BLAS multiplies these float arrays: float64, all finite, and more than `_MANY` products.

    Returns:
        False for residues.
    """
    return (
        a.dtype == b.dtype == np.float64
        and math.prod(lengths) > _MANY
        and bool(np.isfinite(a).all() and np.isfinite(b).all())
    )


def _varying_axes(a: Array) -> list[int]:
    return [i for i, n in enumerate(a.shape) if n > 1]


def _drop_unit_axes(a: Array) -> Array:
    return a.reshape([n for n in a.shape if n > 1])


def _group_axes(a: Array, lengths: list[int], *groups: list[int]) -> Array:
    """Merge each group of axes into one axis. Axes in no group have length 1."""
    order = [i for group in groups for i in group]
    full = np.broadcast_to(a, [lengths[i] if i in order else 1 for i in range(a.ndim)])
    turned = full.transpose([*order, *(i for i in range(a.ndim) if i not in order)])
    return turned.reshape([int(np.prod([lengths[i] for i in group], dtype=int)) for group in groups])


def modular_matmul(a: Array, b: Array, p: int) -> Array:
    """Multiply two matrices of integers modulo ``p``.

    Returns:
        an array of dtype object, (rows of a, columns of b).
    """
    (rows, inner), columns = a.shape, b.shape[1]
    digits = -(-p.bit_length() // _DIGIT)
    by_digits = _JOINED * rows * columns + _SPLIT * inner * (rows + columns)
    if rows * inner * columns < by_digits or inner >= _LONGEST or p.bit_length() > _WIDEST:
        return np.asarray(np.dot(a, b) % p, dtype=object)
    right = _split_digits(b, p, digits).reshape(inner, columns * digits)
    out = np.empty((rows, columns), dtype=object)
    step = max(1, _HELD // (columns * digits * digits))
    for i in range(0, rows, step):
        # Digits of a block of rows: (rows, digits, inner).
        left = _split_digits(a[i : i + step], p, digits).transpose(0, 2, 1)
        n = len(left)
        made = (left.reshape(n * digits, inner) @ right).reshape(n, digits, columns, digits).astype(np.int64)
        # Three more digits hold the carries: a sum has at most 57 bits, 41 more than a digit.
        sums = np.zeros((n, columns, 2 * digits + 3), dtype=np.int64)
        for j in range(digits):
            sums[:, :, j : j + digits] += made[:, j]
        out[i : i + step].reshape(-1)[:] = _join_digits(sums, p)
    return out


def _split_digits(a: Array, p: int, digits: int) -> Array:
    flat = a.reshape(-1).tolist()
    # A gathered input of a convolution repeats elements; convert each distinct element once.
    numbers = {id(v): v for v in flat}
    written = {at: (int(v) % p).to_bytes(2 * digits, "little") for at, v in numbers.items()}
    data = b"".join(map(written.__getitem__, map(id, flat)))
    return np.frombuffer(data, dtype="<u2").reshape(*a.shape, digits).astype(np.float64)


def _join_digits(sums: Array, p: int) -> list[int]:
    """Carry from digit to digit, then read the numbers modulo ``p``."""
    carry = np.zeros(sums.shape[:-1], dtype=np.int64)
    digits = np.empty(sums.shape, dtype="<u2")
    for j in range(sums.shape[-1]):
        carry += sums[..., j]
        digits[..., j] = carry & (2**_DIGIT - 1)
        carry >>= _DIGIT
    assert not carry.any()
    data = digits.tobytes()
    size = 2 * sums.shape[-1]
    return [int.from_bytes(data[i : i + size], "little") % p for i in range(0, len(data), size)]
