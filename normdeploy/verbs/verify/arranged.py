"""The orders in which an exporter may have laid out a parameter."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import numpy as np

from .rows import squeezed

Array = np.ndarray[Any, Any]


def arrangements(parameter: Array, like: Array) -> Iterator[Array]:
    """Give ``parameter``, of as many elements, in the shape of ``like``: as it lies, and with its dims in every fitting
    order."""
    yield parameter.reshape(like.shape)
    small = parameter.reshape(squeezed(parameter.shape))
    if 2 <= small.ndim <= 4:
        for order in permutations(range(small.ndim)):
            if order != tuple(range(small.ndim)) and tuple(small.shape[i] for i in order) == squeezed(like.shape):
                yield small.transpose(order).reshape(like.shape)
