"""The result of a comparison: the element that decides, and what it was allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..types import Array


@dataclass(frozen=True)
class Verdict:
    """Whether an output passes; true where it does.

    ``error`` and ``allowed`` are of the element at ``place``, which comes nearest to failing or exceeds its bound most.
    ``reason`` says what is wrong where no error can: another shape, a NaN, another integer. ``beyond``: how many
    elements exceed their bounds, of `farthest_beyond_bound`.
    """

    error: float
    allowed: float
    place: tuple[int, ...] = ()
    reason: str | None = None
    beyond: int = 0

    def __bool__(self) -> bool:
        return self.reason is None and not self.error > self.allowed

    @property
    def bound_ratio(self) -> float:
        """The multiple of the bound that would have been needed."""
        if not self.error > 0:
            return 0.0
        if self.allowed:
            return self.error / self.allowed
        return math.inf


def nearest_to_bound(error: Array, allowed: Array) -> Verdict:
    """Return the verdict on the element whose error is the largest multiple of what is allowed there.

    Args:
        error, allowed: of one shape; without an element nothing is wrong.
    """
    if not error.size:
        return Verdict(0.0, 0.0)
    with np.errstate(all="ignore"):
        ratios = np.where(error > 0, error / allowed, 0.0)
    return _verdict_at(int(ratios.argmax()), error, allowed)


def farthest_beyond_bound(error: Array, allowed: Array) -> Verdict | None:
    """Return the verdict on the element with the largest error of those beyond their bound; None where all are within.

    Args:
        error: of each element.
        allowed: broadcasts to it.
    """
    beyond = error > allowed
    if not beyond.any():
        return None
    verdict = _verdict_at(int(np.argmax(np.where(beyond, error, -1.0))), error, np.broadcast_to(allowed, error.shape))
    return replace(verdict, beyond=int(beyond.sum()))


def _verdict_at(flat: int, error: Array, allowed: Array) -> Verdict:
    if error.ndim:
        place = tuple(int(i) for i in np.unravel_index(flat, error.shape))
    else:
        place = ()
    return Verdict(float(error[place]), float(allowed[place]), place)
