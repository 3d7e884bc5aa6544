"""The orders in which an exporter may have laid out a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from ...types import Array


def squeeze_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Leave out dims of one."""
    return tuple(size for size in shape if size != 1)


def iter_arrangements(parameter: Array, like: Array) -> Iterator[Array]:
    """Give ``parameter``, of as many elements, in the shape of ``like``: as it lies, and with its dims in every fitting
    order."""
    yield parameter.reshape(like.shape)
    small = parameter.reshape(squeeze_shape(parameter.shape))
    if 2 <= small.ndim <= 4:
        for order in permutations(range(small.ndim)):
            if order != tuple(range(small.ndim)) and tuple(small.shape[i] for i in order) == squeeze_shape(like.shape):
                yield small.transpose(order).reshape(like.shape)
