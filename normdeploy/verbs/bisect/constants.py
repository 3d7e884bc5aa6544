"""Constants of a file that are not the model's, however many nodes read them: positions, frequencies, masks, windows,
indices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from ...runtimes.exact import Array, Change, Exact, Values
from .cause import Afresh
from .changes import Cause, named
from .match import Spot
from .program import Program

_NEAR = 2.0**-20  # relative: a constant that was computed in float32
_MOST = 8  # of the model's that are tried in the place of one


def wrong_constant(exact: Exact, values: Values, spot: Spot, fixed: Values, program: Program) -> Cause | None:
    """Name the constant that explains a spot, the one nearest to where it is stored; of several that do so together
    all.

    Args:
        values: of all that the spot reads and makes, as the file has them.
        fixed: the model's tensors that depend on no input.
    """
    strange = dict(_strange(exact, values, spot.places, fixed))
    if not strange:
        return None
    afresh = Afresh(exact, values, spot)
    nearest: dict[str, str] = {}
    for name, value in strange.items():
        others = _alike(value, fixed)
        for other in others[:_MOST]:
            right = fixed[other].reshape(value.shape)
            if afresh.error(Change(given={name: right})) <= spot.allowed:
                return _cause(exact, {name: value}, {name: other}, fixed, program)
            if afresh.is_spent:
                return None
        if others:
            nearest[name] = others[0]
    return _together(
        exact, afresh, spot, {name: (strange[name], other) for name, other in nearest.items()}, fixed, program
    )


def _together(
    exact: Exact,
    afresh: Afresh,
    spot: Spot,
    pairs: Mapping[str, tuple[Array, str]],
    fixed: Values,
    program: Program,
) -> Cause | None:
    """Take all floating constants that are none of the model's for the nearest ones, and leave out those that need
    not be."""
    chosen = {name: other for name, (value, other) in pairs.items() if value.dtype.kind == "f"}

    def is_right(names: Iterable[str]) -> bool:
        held = {name: fixed[chosen[name]].reshape(pairs[name][0].shape) for name in names}
        return afresh.error(Change(given=held)) <= spot.allowed

    if len(chosen) < 2 or not is_right(chosen):
        return None
    for name in list(chosen):
        rest = [other for other in chosen if other != name]
        if is_right(rest):
            del chosen[name]
    return _cause(exact, {name: pairs[name][0] for name in chosen}, chosen, fixed, program)


def _strange(exact: Exact, values: Values, places: Iterable[int], fixed: Values) -> Iterator[tuple[str, Array]]:
    """Yield the constants that nodes read and that are none of the model's, in the file's order."""
    read = dict.fromkeys(name for p in places for name in exact.reads(exact.nodes[p]) if name in exact.sizes)
    for name in read:
        value = values[name] if name in values else exact.value(name, {})
        if isinstance(value, np.ndarray) and value.size > 1 and not any(_is(value, own) for own in fixed.values()):
            yield name, value


def _is(value: Array, own: Array) -> bool:
    return _comparable(value, own) and any(
        _distance(value, laid) <= _NEAR * max(np.abs(laid).max(initial=0), 1e-30) for laid in (own, own.T)
    )


def _comparable(value: Array, own: Array) -> bool:
    return value.size == own.size and (value.dtype.kind == "f") == (own.dtype.kind == "f")


def _distance(value: Array, own: Array) -> float:
    return float(_differences(value.reshape(-1), own.reshape(-1)).max(initial=0))


def _differences(value: Array, own: Array) -> Array:
    with np.errstate(all="ignore"):
        one, other = value.astype(np.float64), own.astype(np.float64)
        return np.where(one == other, 0.0, np.nan_to_num(np.abs(one - other), nan=np.inf))


def _alike(value: Array, fixed: Values) -> list[str]:
    """The model's that may stand in the place of a constant, the nearest first."""
    names = [name for name, own in fixed.items() if _comparable(value, own)]
    return sorted(names, key=lambda name: _distance(value, fixed[name]))


def _cause(exact: Exact, strange: Values, others: Mapping[str, str], fixed: Values, program: Program) -> Cause:
    held = {name: fixed[other].reshape(strange[name].shape) for name, other in others.items()}
    texts = [_text(name, strange[name], _with_origins(other, program), held[name]) for name, other in others.items()]
    first = next(iter(others))
    readers = [p for p, node in enumerate(exact.nodes) if first in exact.reads(node)]
    more = {1: " reads", 2: " and one more node read"}.get(len(readers), f" and {len(readers) - 1} more nodes read")
    text = f"{'; '.join(texts)}; {named(exact, readers[0])}{more} {first!r}"
    return Cause("constant", text, readers[0], held=held)


def _with_origins(name: str, program: Program) -> str:
    origins = [origin for origin in program.origins(name) if origin != name]
    if not origins:
        return repr(name)
    return f"{name!r}, computed from {', '.join(map(repr, origins))}"


def _text(name: str, value: Array, other: str, right: Array) -> str:
    differs = _differences(value, right)
    first = tuple(int(i) for i in np.unravel_index(int(differs.argmax()), value.shape))
    return (
        f"the constant {name!r} is not the model's {other}: {value[first]:.6g} where the model has {right[first]:.6g}"
        f" ({np.count_nonzero(differs)} of {value.size} elements differ)"
    )
