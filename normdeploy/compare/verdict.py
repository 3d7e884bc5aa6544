"""Result of a comparison: the worst element's error and allowed error."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..types import Array


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison; true if the output passes.

    Attributes:
        error: error of the worst element, which is nearest to its bound or exceeds it most.
        allowed: allowed error of the same element.
        place: index of that element.
        reason: mismatch that no error can express (another shape, a NaN, another integer), or None.
        beyond: number of elements that exceed their bounds; set by `farthest_beyond_bound`.
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
        """Return the error divided by the allowed error.

        Returns:
            ratio; infinite for an error with a bound of 0.
        """
        if not self.error > 0:
            return 0.0
        if self.allowed:
            return self.error / self.allowed
        return math.inf


def nearest_to_bound(error: Array, allowed: Array) -> Verdict:
    """Find the element with the largest ratio of error to allowed error.

    Args:
        error, allowed: arrays of one shape; empty arrays pass.

    Returns:
        verdict on that element.
    """
    if not error.size:
        return Verdict(0.0, 0.0)
    with np.errstate(all="ignore"):
        ratios = np.where(error > 0, error / allowed, 0.0)
    return _verdict_at(int(ratios.argmax()), error, allowed)


def farthest_beyond_bound(error: Array, allowed: Array) -> Verdict | None:
    """Find the largest error among the elements that exceed their bound.

    Args:
        error: error of each element.
        allowed: allowed error; broadcasts to ``error``.

    Returns:
        verdict on that element, or None if no element exceeds its bound.
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
