"""Bound the cost of evaluation, because a file can state any size. Only this module counts elements and steps.

An element is a number that numpy creates. It takes 8 bytes of memory and about a nanosecond. A step is the unit of
time: the time for one element.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from .evaluator_core import Inputs, UnsupportedOp

# Maximum number of elements that an op may create from smaller tensors: half a gigabyte.
MOST = 2**26
# Maximum number of dims of an array, which is numpy's limit.
MOST_RANK = 64
# Steps that are counted for each node in addition to its elements, for some microseconds of overhead.
A_NODE = 2**10
# Maximum number of elements from which one constant may be computed: 1 GB.
AT_ONCE = 2**27
# Maximum number of steps for all constants of a graph together: about half a minute.
IN_ALL = 2**31
# Maximum number of elements of computed constants that are kept in memory: 32 MB.
KEPT = 2**22
# Ops for which the size of the result depends on the values of an input, not only on the sizes of the inputs.
_GROW = frozenset({"ConstantOfShape", "Range", "Tile", "Pad"})
_VIEWS = frozenset({"Expand", "Reshape", "Shape", "Size", "Identity", "Transpose", "Squeeze", "Unsqueeze"})
_CONTRACTIONS = frozenset({"MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose"})


def is_affordable(shape: tuple[int, ...]) -> bool:
    """Return whether an array of this shape may be created.

    Returns: True up to `MOST` elements and `MOST_RANK` dims.
    """
    return len(shape) <= MOST_RANK and math.prod(shape) <= MOST


def require_room(op: str, elements: int, largest: int = 0) -> None:
    """Check the number of elements that an op creates.

    Args:
        elements: created by ``op``.
        largest: elements of the op's largest input. An op may always create this many elements.

    Raises:
        UnsupportedOp: ``op`` creates more than `MOST` elements, and more than its largest input has.
    """
    if elements > max(MOST, largest):
        raise UnsupportedOp(f"{op} creates {elements} elements; the limit is {MOST}")


def require_room_for(op: str, inputs: Inputs) -> None:
    """Check the number of elements that an op would create from these inputs.

    Raises:
        UnsupportedOp: there are too many.
    """
    arrays = [i for i in inputs if isinstance(i, np.ndarray)]
    if op in _GROW or math.prod(i.size for i in arrays) > MOST:
        # An input that was broadcast takes no memory, so it does not count as large.
        whole = (i.size for i in arrays if 0 not in i.strides)
        require_room(op, _estimate_elements(op, arrays), max(whole, default=0))


def _estimate_elements(op: str, given: Sequence[np.ndarray]) -> int:
    """Estimate the number of elements that ``op`` creates; 0 if its largest input has at least as many."""
    if op == "ConstantOfShape":
        return math.prod(map(abs, given[0].ravel().tolist()))
    if op == "Range" and len(given) == 3 and given[2].any():
        return int(min(abs(float(given[1].item()) - float(given[0].item())) / abs(float(given[2].item())), 2.0**62))
    if op == "Tile" and len(given) > 1:
        return given[0].size * math.prod(map(abs, given[1].ravel().tolist()))
    if op == "Pad" and len(given) > 1:
        pads = [max(n, 0) for n in given[1].ravel().tolist()]
        return math.prod(n + sum(pads[i :: max(given[0].ndim, 1)]) for i, n in enumerate(given[0].shape))
    if op in ("MatMul", "Gemm") and len(given) > 1 and min(given[0].ndim, given[1].ndim) > 1:
        return given[0].size // max(given[0].shape[-1], 1) * max(given[1].shape[-1], given[1].shape[-2])
    if op == "Gather" and len(given) > 1:
        if given[0].size:
            return given[1].size * (given[0].size // max(given[0].shape[:1] or (1,)))
        return 0
    if op in _VIEWS:
        return 0
    try:
        if given:
            return math.prod(np.broadcast_shapes(*(g.shape for g in given)))
        return 0
    except ValueError:
        # The inputs can't be broadcast to a common shape, so the op will fail.
        return max(g.size for g in given)


class EvaluationBudget:
    """Budget for the constants of one file: the steps to compute them and the memory to keep them.

    Attributes:
        values: kept arrays by their keys.
    """

    def __init__(self) -> None:
        self._spent = self._kept = 0
        self.values: dict[Hashable, np.ndarray] = {}

    def charge_node(self, op: str, inputs: Sequence[Any]) -> None:
        """Count the steps of a node before it is evaluated.

        Raises:
            UnsupportedOp: the file's constants have taken too many steps.
        """
        self._spend_steps(A_NODE + (_contraction_cost(inputs) if op in _CONTRACTIONS else 0))

    def charge_results(self, op: str, results: Sequence[Any]) -> int:
        """Count the steps of a node's results after it was evaluated.

        Returns: the number of elements that it created; 0 for views.

        Raises:
            UnsupportedOp: the file's constants have taken too many steps.
        """
        if op in _VIEWS:
            fresh = 0
        else:
            fresh = sum(v.size for v in results if v is not None)
        self._spend_steps(fresh)
        return fresh

    def keep_results(self, values: Mapping[Hashable, np.ndarray]) -> None:
        """Keep the results of a node on constants while there is room.

        Later nodes of a chain may need them again.
        """
        size = sum(v.size for v in values.values())
        if self._kept + size <= KEPT:
            self._kept += size
            # A view would keep the whole array that it refers to in memory, so it is copied.
            self.values.update((key, v if v.base is None else v.copy()) for key, v in values.items())

    def _spend_steps(self, steps: int) -> None:
        self._spent += steps
        if self._spent > IN_ALL:
            raise UnsupportedOp(f"computing the constants of the file takes more than {IN_ALL} steps; fold them first")


def _contraction_cost(inputs: Sequence[Any]) -> int:
    """Estimate the steps of a contraction. BLAS computes about sixteen products in one step."""
    a, b = inputs[:2]
    if a.size:
        return int(a.size * b.size // max(a.shape[-1:] or (1,))) // 16
    return 0
