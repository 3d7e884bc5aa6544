"""The change that explains a spot, or the least that is wider and that one change explains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...runtimes.exact import Exact, Values
from .cause import cause_of
from .changes import Cause, named
from .match import Search, Spot
from .program import Program

_UNEXPLAINED = ("unknown", "left out", "factor")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The ``cause`` of what is wrong at ``spot``; ``known``: right values of all that its nodes read."""

    spot: Spot
    cause: Cause
    known: Values


def explanation(exact: Exact, program: Program, altered: Mapping[str, str], search: Search, spot: Spot) -> Explanation:
    """Explain a spot by one change, else a wider one, else by a weight that is not the model's.

    Args:
        altered: weights of the file that are not the model's -> how they differ.
    """
    first = _explained(exact, program, search, spot)
    if first.cause.kind not in _UNEXPLAINED:
        return _held(exact, search, first)
    tried = {spot.places}
    for wider in _wider(search):
        if wider.places in tried:
            continue
        tried.add(wider.places)
        other = _explained(exact, program, search, wider)
        if other.cause.kind not in _UNEXPLAINED:
            return _held(exact, search, other)
    if first.cause.kind == "unknown":
        return replace(first, cause=_altered(exact, altered, search, spot) or first.cause)
    return first


def _wider(search: Search) -> Iterator[Spot]:
    """Yield wider stretches: a change of layout or of order may show only at the end of a stretch."""
    yield search.whole()
    strict = search.of_one_shape()
    narrow = strict.spot()
    if narrow is not None:
        yield narrow
        yield strict.whole()
    yield search.stretch()


def _explained(exact: Exact, program: Program, search: Search, spot: Spot) -> Explanation:
    made = {name for p in spot.places for name in exact.nodes[p].output}
    known = {name: value for name, value in search.values.items() if name not in made}
    held = {name: value for name, value in search.reference.items() if name in search.have}
    return Explanation(spot=spot, cause=cause_of(exact, known, spot, program, held), known=known)


def _held(exact: Exact, search: Search, explained: Explanation) -> Explanation:
    """Narrow a spot to a node that the model does not have: held there, it is right for all that read it."""
    spot, cause = explained.spot, explained.cause
    if not cause.instead or cause.place is None:
        return explained
    values = exact.run(spot.places, explained.known)
    end = exact.nodes[cause.place].output[0]
    known = {**search.known, **values}
    del known[end]
    narrow = replace(spot, places=(cause.place,), end=end, expected=values[cause.instead])
    return Explanation(spot=narrow, cause=cause, known=known)


def _altered(exact: Exact, altered: Mapping[str, str], search: Search, spot: Spot) -> Cause | None:
    """The first weight that the spot reads, or the stretch before it, and that the audit of weights knows."""
    for p in dict.fromkeys([*spot.places, *search.places]):
        for name in exact.reads(exact.nodes[p]):
            if name in altered:
                return Cause("weights", f"{named(exact, p)}: {name!r} is not the model's: {altered[name]}", p)
    return None
