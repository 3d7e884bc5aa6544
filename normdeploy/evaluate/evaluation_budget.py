"""What evaluating may cost: a file can state any size. The one place that counts elements and steps.

An element is a number that numpy makes, 8 bytes of memory and about a nanosecond; steps are counted in these.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from .evaluator_core import Inputs, UnsupportedOp

# elements that an op may make of smaller tensors: half a gigabyte
MOST = 2**26
# numpy's
MOST_RANK = 64
# elements that numpy computes in the time that a node takes besides: some microseconds
A_NODE = 2**10
# elements that one constant may be computed from: 1 GB
AT_ONCE = 2**27
# that all constants of a graph may take: half a minute
IN_ALL = 2**31
# elements of computed constants that are remembered: 32 MB
KEPT = 2**22
# by a value, not by the sizes of their inputs
_GROW = frozenset({"ConstantOfShape", "Range", "Tile", "Pad"})
_VIEWS = frozenset({"Expand", "Reshape", "Shape", "Size", "Identity", "Transpose", "Squeeze", "Unsqueeze"})
_CONTRACTIONS = frozenset({"MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose"})


def is_affordable(shape: tuple[int, ...]) -> bool:
    """Whether an array of this shape is made at all."""
    return len(shape) <= MOST_RANK and math.prod(shape) <= MOST


def require_room(op: str, elements: int, largest: int = 0) -> None:
    """
    Raises:
        Unsupported: ``op`` makes too many ``elements``, and more than the ``largest`` of what it is given has.
    """
    if elements > max(MOST, largest):
        raise UnsupportedOp(f"{op} makes {elements} elements; at most {MOST} are computed")


def require_room_for(op: str, inputs: Inputs) -> None:
    """
    Raises:
        Unsupported: of these inputs ``op`` would make too many elements.
    """
    arrays = [i for i in inputs if isinstance(i, np.ndarray)]
    if op in _GROW or math.prod(i.size for i in arrays) > MOST:
        # of what Expand gives nothing lies in memory
        whole = (i.size for i in arrays if 0 not in i.strides)
        require_room(op, _estimate_elements(op, arrays), max(whole, default=0))


def _estimate_elements(op: str, given: Sequence[np.ndarray]) -> int:
    """About how many elements ``op`` makes; 0 where not more than its largest input has."""
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
        # no op that broadcasts
        return max(g.size for g in given)


class EvaluationBudget:
    """What the constants of one file may take: steps to compute, memory to remember."""

    def __init__(self) -> None:
        self._spent = self._kept = 0
        # what is remembered, by the keys that it was kept under
        self.values: dict[Hashable, np.ndarray] = {}

    def charge_node(self, op: str, inputs: Sequence[Any]) -> None:
        """A node is going to be evaluated.

        Raises:
            Unsupported: the file's constants have taken too long.
        """
        self._spend_steps(A_NODE + (_contraction_cost(inputs) if op in _CONTRACTIONS else 0))

    def charge_results(self, op: str, results: Sequence[Any]) -> int:
        """A node was evaluated; how many elements it made.

        Raises:
            Unsupported: the file's constants have taken too long.
        """
        if op in _VIEWS:
            fresh = 0
        else:
            fresh = sum(v.size for v in results if v is not None)
        self._spend_steps(fresh)
        return fresh

    def keep_results(self, values: Mapping[Hashable, np.ndarray]) -> None:
        """Remember what a node on constants gave, where there is room: each link of a chain may be asked for."""
        size = sum(v.size for v in values.values())
        if self._kept + size <= KEPT:
            self._kept += size
            # a view would keep all of its base
            self.values.update((key, v if v.base is None else v.copy()) for key, v in values.items())

    def _spend_steps(self, steps: int) -> None:
        self._spent += steps
        if self._spent > IN_ALL:
            raise UnsupportedOp(f"the constants of the file take more than {IN_ALL} steps to compute; fold them first")


def _contraction_cost(inputs: Sequence[Any]) -> int:
    """About the time of a contraction, in that of elements made one by one: BLAS does some sixteen products in it."""
    a, b = inputs[:2]
    if a.size:
        return int(a.size * b.size // max(a.shape[-1:] or (1,))) // 16
    return 0
