"""Bound the distance of two evaluations of one function, by runs of one evaluation with every value perturbed.

    |other − right| ≤ 4 · d + 6 · √N · u · |y|

d is the largest change in an element's row (the last axis), y the row's largest element, N the number of nodes and u
the unit roundoff.
"""

from __future__ import annotations

import math

import numpy as np

from ..types import Array
from .element_errors import absolute_difference, finite_magnitude, largest_of_rows
from .verdict import Verdict, farthest_beyond_bound

# Factor by which the bound multiplies the largest change d. It is above 1 because both evaluations round, and because
# only few runs are made.
_DRAWS_APART = 4
_DEVIATIONS = 6


def perturb_array(values: Array, by: float, rng: np.random.Generator) -> Array:
    """Multiply each element by a random factor between 1 − ``by`` and 1 + ``by``.

    Returns:
        array of the same shape and type.
    """
    with np.errstate(all="ignore"):
        moved = values.astype(np.float64) * (1 + by * rng.uniform(-1, 1, values.shape))
    return np.asarray(moved).astype(values.dtype)


def regrouping_error(nodes: int, unit: float) -> float:
    """Compute how far folding or regrouping nodes may move a result, relative to its size: 6 √N u.

    N roundings of relative size u add up to less than λ·√N·u with a probability of 1 − 2N·exp(−λ²/2). With λ = 6 that
    is 1 − 3e-8·N. Source: Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019.

    Returns:
        relative error.
    """
    return _DEVIATIONS * math.sqrt(nodes) * unit


def explained_error(right: Array, moved: Array, relative: float) -> Array:
    """Compute the error that rounding explains in each row of floating numbers, by the module's formula.

    Args:
        right: values of one evaluation.
        moved: largest change of each element in the perturbed runs.
        relative: result of `regrouping_error`.

    Returns:
        array of the shape of ``right``, with a last axis of size 1.
    """
    return _DRAWS_APART * largest_of_rows(moved) + relative * largest_of_rows(finite_magnitude(right))


def find_unexplained(value: Array, right: Array, moved: Array, relative: float) -> Verdict | None:
    """Find the largest error among the elements whose error rounding does not explain.

    If perturbed runs change an integer, every integer passes at that place. Rounding then decides a choice, and another
    choice may give any integer.

    Returns:
        verdict on that element, or None if rounding explains all elements.
    """
    if right.dtype.kind in "iub":
        # The last axis may be the batch, so a change explains no other element of its row.
        allowed = np.where(moved > 0, np.inf, 0.0)
    else:
        allowed = explained_error(right, moved, relative)
    return farthest_beyond_bound(absolute_difference(value, right), allowed)
