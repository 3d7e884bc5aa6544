"""What kind of mistake a fault is: each kind is tried in float64, and the one that brings the right values back is the
likely one."""

from __future__ import annotations

import math

import numpy as np

from ...runtimes.exact import Array, Change, Exact, NotEvaluated, Values
from ..verify.drift import distance
from .match import Spot
from .program import Program
from .trials import Cause, named, trials

# What explains nearly everything: a gamma that is off by the root of n / (n - 1) is a wrong weight too.
_LAST = ("weights", "added")


def cause_of(exact: Exact, known: Values, spot: Spot, program: Program) -> Cause:
    """Name the likely cause.

    Args:
        known: right values of all that the spot reads, float64.
    """
    values = exact.run(spot.places, known)
    tried = ((_error(exact, known, spot, change), cause) for cause, change in trials(exact, values, spot, program))
    right = [(error, cause) for error, cause in tried if error <= spot.allowed]
    if right:
        return min(right, key=lambda pair: (pair[1].kind in _LAST, pair[0]))[1]
    if spot.left_out:
        return _left_out(exact, spot, program)
    return _of_the_difference(values[spot.end], spot.expected, spot.allowed)


def _error(exact: Exact, known: Values, spot: Spot, change: Change) -> float:
    try:
        got = exact.run(spot.places, known, change)[spot.end]
    except NotEvaluated:
        return math.inf
    if got.size != spot.expected.size:
        return math.inf
    error, _, broken = distance(got.reshape(spot.expected.shape), spot.expected)
    return math.inf if broken else error


def _left_out(exact: Exact, spot: Spot, program: Program) -> Cause:
    module, name = program.module(spot.node), spot.left_out
    readers = range(len(exact.nodes)) if name == spot.end else spot.places
    place = next(p for p in readers if name in exact.reads(exact.nodes[p]))
    operator = f"{program.operator(spot.node)}{f' of {module}' if module else ''}"
    return Cause("left out", f"{operator} is left out: {named(exact, place)} reads {spot.left_out!r} itself", place)


def _of_the_difference(got: Array, expected: Array, allowed: float) -> Cause:
    if got.size != expected.size:
        return Cause("unknown", f"its shape is {list(got.shape)}, the model's is {list(expected.shape)}")
    with np.errstate(all="ignore"):
        got = got.reshape(expected.shape)
        big = np.abs(expected) > 0.1 * np.abs(expected).max(initial=0)
        factor = float(np.median((got / expected)[big])) if big.any() else math.nan
        if (
            math.isfinite(factor)
            and factor
            and np.abs(got / factor - expected).max(initial=0) <= allowed
            and abs(factor - 1) > 1e-6
        ):
            return Cause("factor", f"it is {factor:.6g} times what the model has")
    return Cause("unknown", "no single epsilon, axis, weight, ddof or factor explains it")
