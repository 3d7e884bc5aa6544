"""Find constants of a file that differ from the model's constants, such as positions, frequencies, masks and indices.

Several nodes may read one constant. A spot is the group of nodes at a fault; its end is the tensor that they compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...compare.number_text import format_pair
from ...runtimes.float64_evaluator import Float64Evaluator, NodeChange
from ...types import Array, Arrays
from .cause_search import SpotRecomputer
from .counterpart_search import FaultSpot
from .reference_program import ReferenceProgram
from .trial_changes import Cause, node_at_text

# Allowed relative error of a constant that was computed in float32.
_NEAR = 2.0**-20
# Maximum number of the model's constants that are tried in place of each constant of the file.
_MOST = 8


@dataclass(frozen=True)
class _Swap:
    """Constant of the file, and a constant of the model that may replace it, in the same shape."""

    name: str
    value: Array
    other: str
    right: Array


def find_wrong_constant(
    exact: Float64Evaluator, values: Arrays, spot: FaultSpot, fixed: Arrays, program: ReferenceProgram
) -> Cause | None:
    """Find the constant that explains the error of a spot, or several constants that explain it together.

    Args:
        values: all tensors that the spot reads and computes, with the file's values.
        fixed: the model's tensors that depend on no input.

    Returns:
        The cause with the constants' right values; None if constants don't explain the spot.
    """
    afresh = SpotRecomputer(exact, values, spot)

    def is_right_with(swaps: Iterable[_Swap]) -> bool:
        """Check that the spot's end is right if constants are replaced.

        Returns:
            True if the error of the end is allowed.
        """
        given = {swap.name: swap.right for swap in swaps}
        return afresh.largest_error(NodeChange(given=given)) <= spot.allowed

    nearest = list[_Swap]()
    for name, value in _iter_foreign_constants(exact, values, spot.places, fixed):
        swaps = [_Swap(name, value, other, fixed[other].reshape(value.shape)) for other in _similar(value, fixed)]
        for swap in swaps[:_MOST]:
            if is_right_with([swap]):
                return _constants_cause(exact, [swap], program)
            if afresh.is_spent:
                return None
        nearest += swaps[:1]
    # Replace all floating constants that are not the model's. Then undo each replacement that is not needed.
    chosen = [swap for swap in nearest if swap.value.dtype.kind == "f"]
    if len(chosen) < 2 or not is_right_with(chosen):
        return None
    for swap in list(chosen):
        rest = [other for other in chosen if other is not swap]
        if is_right_with(rest):
            chosen = rest
    return _constants_cause(exact, chosen, program)


def _iter_foreign_constants(
    exact: Float64Evaluator, values: Arrays, places: Iterable[int], fixed: Arrays
) -> Iterator[tuple[str, Array]]:
    """Yield the constants that nodes read and the model does not have, in the file's order."""
    for name in dict.fromkeys(name for p in places for name in exact.read_names(exact.nodes[p])):
        if name not in exact.sizes:
            continue
        value = exact.tensor_value(name, values)
        if not isinstance(value, np.ndarray) or value.size < 2:
            continue
        if not any(_is_near_or_transposed(value, own) for own in fixed.values()):
            yield name, value


def _is_near_or_transposed(value: Array, own: Array) -> bool:
    return _is_comparable(value, own) and any(
        _largest_difference(value, laid) <= _NEAR * max(np.abs(laid).max(initial=0), 1e-30) for laid in (own, own.T)
    )


def _is_comparable(value: Array, own: Array) -> bool:
    return value.size == own.size and (value.dtype.kind == "f") == (own.dtype.kind == "f")


def _largest_difference(value: Array, own: Array) -> float:
    return float(_elementwise_difference(value, own.reshape(value.shape)).max(initial=0))


def _elementwise_difference(value: Array, own: Array) -> Array:
    with np.errstate(all="ignore"):
        one = value.astype(np.float64)
        other = own.astype(np.float64)
        return np.where(one == other, 0.0, np.nan_to_num(np.abs(one - other), nan=np.inf))


def _similar(value: Array, fixed: Arrays) -> list[str]:
    """Return names of the model's constants that may replace a constant, the nearest one first."""
    names = [name for name, own in fixed.items() if _is_comparable(value, own)]
    return sorted(names, key=lambda name: _largest_difference(value, fixed[name]))


def _constants_cause(exact: Float64Evaluator, swaps: Sequence[_Swap], program: ReferenceProgram) -> Cause:
    texts = "; ".join(_describe_swap(swap, program) for swap in swaps)
    first = swaps[0].name
    readers = [p for p, node in enumerate(exact.nodes) if first in exact.read_names(node)]
    more = {1: " reads", 2: " and one more node read"}.get(len(readers), f" and {len(readers) - 1} more nodes read")
    text = f"{texts}; {node_at_text(exact, readers[0])}{more} {first!r}"
    return Cause("constant", text, readers[0], held={swap.name: swap.right for swap in swaps})


def _describe_swap(swap: _Swap, program: ReferenceProgram) -> str:
    origins = [repr(origin) for origin in program.stored_origins(swap.other) if origin != swap.other]
    if origins:
        computed = f", computed from {', '.join(origins)}"
    else:
        computed = ""
    differs = _elementwise_difference(swap.value, swap.right)
    first = np.unravel_index(int(differs.argmax()), differs.shape)
    ours, theirs = format_pair(swap.value[first], swap.right[first])
    return (
        f"the constant {swap.name!r} differs from the model's {swap.other!r}{computed}:"
        f" {ours}, but the model has {theirs} ({np.count_nonzero(differs)} of"
        f" {differs.size} elements differ)"
    )
