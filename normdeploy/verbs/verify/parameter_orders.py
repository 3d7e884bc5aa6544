"""List the layouts in which an exporter may have stored a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from ...types import Array


def squeeze_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Drop dims of size one.

    Returns:
        the other sizes: (1, 64, 1) gives (64,).
    """
    return tuple(size for size in shape if size != 1)


def iter_arrangements(parameter: Array, like: Array) -> Iterator[Array]:
    """Arrange ``parameter`` in the shape of ``like``, which has the same number of elements.

    Yields:
        ``parameter`` reshaped; then, for 2 to 4 dims larger than one, each transpose that gives the shape of ``like``.
    """
    yield parameter.reshape(like.shape)
    small = parameter.reshape(squeeze_shape(parameter.shape))
    if 2 <= small.ndim <= 4:
        for order in permutations(range(small.ndim)):
            if order != tuple(range(small.ndim)) and tuple(small.shape[i] for i in order) == squeeze_shape(like.shape):
                yield small.transpose(order).reshape(like.shape)
