"""Constants of a file that are not the model's, however many nodes read them: positions, frequencies, masks, windows,
indices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from ...runtimes.float64_evaluator import Array, Float64Evaluator, NodeChange, Values
from .cause_search import SpotRecomputer
from .counterpart_search import FaultSpot
from .reference_program import ReferenceProgram
from .trial_changes import Cause, node_at_text

# relative: a constant that was computed in float32
_NEAR = 2.0**-20
# of the model's that are tried in the place of one
_MOST = 8


def find_wrong_constant(
    exact: Float64Evaluator, values: Values, spot: FaultSpot, fixed: Values, program: ReferenceProgram
) -> Cause | None:
    """Name the constant that explains a spot, the one nearest to where it is stored; of several that do so together
    all.

    Args:
        values: of all that the spot reads and makes, as the file has them.
        fixed: the model's tensors that depend on no input.
    """
    strange = dict(_iter_foreign_constants(exact, values, spot.places, fixed))
    if not strange:
        return None
    afresh = SpotRecomputer(exact, values, spot)
    nearest: dict[str, str] = {}
    for name, value in strange.items():
        others = _similar_constants(value, fixed)
        for other in others[:_MOST]:
            right = fixed[other].reshape(value.shape)
            if afresh.largest_error(NodeChange(given={name: right})) <= spot.allowed:
                return _constants_cause(exact, {name: value}, {name: other}, fixed, program)
            if afresh.is_spent:
                return None
        if others:
            nearest[name] = others[0]
    return _find_wrong_together(
        exact, afresh, spot, {name: (strange[name], other) for name, other in nearest.items()}, fixed, program
    )


def _find_wrong_together(
    exact: Float64Evaluator,
    afresh: SpotRecomputer,
    spot: FaultSpot,
    pairs: Mapping[str, tuple[Array, str]],
    fixed: Values,
    program: ReferenceProgram,
) -> Cause | None:
    """Take all floating constants that are none of the model's for the nearest ones, and leave out those that need
    not be."""
    chosen = {name: other for name, (value, other) in pairs.items() if value.dtype.kind == "f"}

    def is_right_with(names: Iterable[str]) -> bool:
        held = {name: fixed[chosen[name]].reshape(pairs[name][0].shape) for name in names}
        return afresh.largest_error(NodeChange(given=held)) <= spot.allowed

    if len(chosen) < 2 or not is_right_with(chosen):
        return None
    for name in list(chosen):
        rest = [other for other in chosen if other != name]
        if is_right_with(rest):
            del chosen[name]
    return _constants_cause(exact, {name: pairs[name][0] for name in chosen}, chosen, fixed, program)


def _iter_foreign_constants(
    exact: Float64Evaluator, values: Values, places: Iterable[int], fixed: Values
) -> Iterator[tuple[str, Array]]:
    """Yield the constants that nodes read and that are none of the model's, in the file's order."""
    read = dict.fromkeys(name for p in places for name in exact.read_names(exact.nodes[p]) if name in exact.sizes)
    for name in read:
        if name in values:
            value = values[name]
        else:
            value = exact.tensor_value(name, {})
        if (
            isinstance(value, np.ndarray)
            and value.size > 1
            and not any(_is_near_or_transposed(value, own) for own in fixed.values())
        ):
            yield name, value


def _is_near_or_transposed(value: Array, own: Array) -> bool:
    return _is_comparable(value, own) and any(
        _largest_difference(value, laid) <= _NEAR * max(np.abs(laid).max(initial=0), 1e-30) for laid in (own, own.T)
    )


def _is_comparable(value: Array, own: Array) -> bool:
    return value.size == own.size and (value.dtype.kind == "f") == (own.dtype.kind == "f")


def _largest_difference(value: Array, own: Array) -> float:
    return float(_elementwise_difference(value.reshape(-1), own.reshape(-1)).max(initial=0))


def _elementwise_difference(value: Array, own: Array) -> Array:
    with np.errstate(all="ignore"):
        one = value.astype(np.float64)
        other = own.astype(np.float64)
        return np.where(one == other, 0.0, np.nan_to_num(np.abs(one - other), nan=np.inf))


def _similar_constants(value: Array, fixed: Values) -> list[str]:
    """The model's that may stand in the place of a constant, the nearest first."""
    names = [name for name, own in fixed.items() if _is_comparable(value, own)]
    return sorted(names, key=lambda name: _largest_difference(value, fixed[name]))


def _constants_cause(
    exact: Float64Evaluator, strange: Values, others: Mapping[str, str], fixed: Values, program: ReferenceProgram
) -> Cause:
    held = {name: fixed[other].reshape(strange[name].shape) for name, other in others.items()}
    texts = [
        _describe_constant(name, strange[name], _describe_with_origins(other, program), held[name])
        for name, other in others.items()
    ]
    first = next(iter(others))
    readers = [p for p, node in enumerate(exact.nodes) if first in exact.read_names(node)]
    more = {1: " reads", 2: " and one more node read"}.get(len(readers), f" and {len(readers) - 1} more nodes read")
    text = f"{'; '.join(texts)}; {node_at_text(exact, readers[0])}{more} {first!r}"
    return Cause("constant", text, readers[0], held=held)


def _describe_with_origins(name: str, program: ReferenceProgram) -> str:
    origins = [origin for origin in program.stored_origins(name) if origin != name]
    if not origins:
        return repr(name)
    return f"{name!r}, computed from {', '.join(map(repr, origins))}"


def _describe_constant(name: str, value: Array, other: str, right: Array) -> str:
    differs = _elementwise_difference(value, right)
    first = tuple(int(i) for i in np.unravel_index(int(differs.argmax()), value.shape))
    return (
        f"the constant {name!r} is not the model's {other}: {value[first]:.6g} where the model has {right[first]:.6g}"
        f" ({np.count_nonzero(differs)} of {value.size} elements differ)"
    )
