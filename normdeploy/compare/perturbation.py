"""How far two evaluations of one function may lie apart, told by runs of one of them in which everything is perturbed.

With d the largest change in an element's row (the last axis), y the row's largest element, N nodes and the unit
roundoff u

    |other − right| ≤ 4 · d + 6 · √N · u · |y|
"""

from __future__ import annotations

import math

import numpy as np

from ..types import Array
from .element_errors import absolute_difference, finite_magnitude, largest_of_rows
from .verdict import Verdict, farthest_beyond_bound

# times the farthest draw: both evaluations round, and few draws are made
_DRAWS_APART = 4
_DEVIATIONS = 6


def perturb_array(values: Array, by: float, rng: np.random.Generator) -> Array:
    """Return each element times 1 ± ``by`` at most, rounded to its type."""
    with np.errstate(all="ignore"):
        moved = values.astype(np.float64) * (1 + by * rng.uniform(-1, 1, values.shape))
    return np.asarray(moved).astype(values.dtype)


def regrouping_error(nodes: int, unit: float) -> float:
    """Return how far nodes that are folded into constants or regrouped may move a result, relative to its size: 6 √N u.

    N roundings of relative size u add up to less than λ·√N·u with a probability of 1 − 2N·exp(−λ²/2) (Higham and Mary,
    "A new approach to probabilistic rounding error analysis", 2019); with λ = 6 that is 1 − 3e-8·N.
    """
    return _DEVIATIONS * math.sqrt(nodes) * unit


def explained_error(right: Array, moved: Array, relative: float) -> Array:
    """Return what rounding explains in each row of floating numbers, by the module's formula.

    Args:
        right: one evaluation.
        moved: how far perturbed runs moved each of its elements.
        relative: of `regrouping_error`.

    Returns:
        Of the shape of ``right``, with a last axis of size 1.
    """
    return _DRAWS_APART * largest_of_rows(moved) + relative * largest_of_rows(finite_magnitude(right))


def find_unexplained(value: Array, right: Array, moved: Array, relative: float) -> Verdict | None:
    """Return the verdict on the element farthest outside of what rounding explains; None where all are within.

    An integer that perturbed runs move in its row may be any other: a choice that rounding turns over may end anywhere.
    """
    if right.dtype.kind in "iub":
        allowed = np.where(largest_of_rows(moved) > 0, np.inf, 0.0)
    else:
        allowed = explained_error(right, moved, relative)
    return farthest_beyond_bound(absolute_difference(value, right), allowed)
