"""Find the model's tensors that are bit-for-bit equal to a weight of a file."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from ...types import Array, Arrays
from .parameter_orders import iter_arrangements


def cast_parameter(parameter: Array, dtype: Any) -> Array:
    """Cast ``parameter`` to ``dtype``; values out of range become infinite without a warning.

    Returns:
        the cast array.
    """
    with np.errstate(over="ignore"):
        return parameter.astype(dtype)


_Key = tuple[int, bytes, int]


class EqualTensors:
    """Index of the model's tensors by a key that does not depend on the order of dims.

    The index avoids a comparison of every weight with every tensor.
    """

    def __init__(self, stored: Arrays) -> None:
        self._stored = stored
        self._by_key: dict[np.dtype[Any], dict[_Key, list[str]]] = {}
        self._repeated: dict[tuple[np.dtype[Any], tuple[int, ...], bytes], list[str]] = {}

    def matching_names(self, array: Array) -> list[str]:
        """Find the tensors that equal ``array`` bit for bit in some order of their dims.

        Returns:
            names of the equal tensors. If the same array was looked up before, only the first name, because the earlier
            call returned all of them.
        """
        # Arrays of ml_dtypes' types do not support the buffer protocol.
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        content = array.dtype, array.shape, hashlib.sha256(raw.data).digest()
        if content in self._repeated:
            return self._repeated[content][:1]
        if array.dtype not in self._by_key:
            index: dict[_Key, list[str]] = {}
            for name, tensor in self._stored.items():
                index.setdefault(_order_free_key(cast_parameter(tensor, array.dtype)), []).append(name)
            self._by_key[array.dtype] = index
        alike = self._by_key[array.dtype].get(_order_free_key(array), [])
        found = [
            n
            for n in alike
            if any(
                _is_bitwise_equal(b, array)
                for b in iter_arrangements(cast_parameter(self._stored[n], array.dtype), array)
            )
        ]
        self._repeated[content] = found
        return found


def _order_free_key(array: Array) -> _Key:
    """Return a key that does not depend on the order of dims: size, bytes of the first and last element, sum of all
    bits.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    bits = flat.view(f"u{flat.dtype.itemsize}")
    return flat.size, flat[[0, -1]].tobytes() if flat.size else b"", int(bits.sum(dtype=np.uint64))


def _is_bitwise_equal(one: Array, other: Array) -> bool:
    return np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()
