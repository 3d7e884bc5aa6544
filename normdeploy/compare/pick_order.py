"""Check that scores with a rounding error may be ordered as a file orders them.

An ordering operator picks k of n scores: topk, sort, argmax. Another correct evaluation has scores s[i] ± t[i], where t
is the allowed error. Its picks i[1], i[2], …, i[k] are possible exactly if scores within these intervals have this
order:

- s[i[b]] − t[i[b]] ≤ s[i[a]] + t[i[a]] for each pair of picks a < b, if the picks are sorted;
- s[l] − t[l] ≤ s[i[a]] + t[i[a]] for each pick a and each score l that is not picked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..types import Array


@dataclass(frozen=True)
class ScorePair:
    """Two scores of a row, of which the file ranks the first one higher.

    Attributes:
        first, second: scores in float64.
        gap: amount by which the second score exceeds the first one, in the direction of the order.
        room: sum of the allowed errors of the two scores.
    """

    first: float
    second: float
    gap: float
    room: float

    @property
    def ratio(self) -> float:
        """Return the gap as a share of the room; above 1, rounding does not explain the order."""
        if self.gap <= 0:
            return 0.0
        if self.room:
            return self.gap / self.room
        return float("inf")


@dataclass(frozen=True)
class PassedTie:
    """Pick that is not the first of equal scores.

    Attributes:
        index: the picked index.
        first: index of the first of the equal scores.
        score: all of these scores.
    """

    index: int
    first: int
    score: float


def find_widest_inversion(
    scores: Array, room: Array, picks: Array, axis: int, *, largest: bool = True, in_order: bool = True
) -> ScorePair | None:
    """Find the pair of scores whose order rounding explains least.

    Args:
        scores: float64 scores.
        room: allowed error of each score, same shape.
        picks: indices along ``axis``; distinct and in range.
        largest: True if the largest scores are picked first.
        in_order: True if the picks are sorted. Otherwise only the set of picks is checked.

    Returns:
        the pair with the largest ratio. None if all picks are ordered as the scores are.
    """
    high = np.moveaxis(scores if largest else -scores, axis, -1)
    error = np.moveaxis(room, axis, -1)
    chosen = np.moveaxis(picks, axis, -1)
    if not chosen.size:
        return None
    picked, picked_error = (np.take_along_axis(values, chosen, -1) for values in (high, error))
    # For each pick, the earlier pick that can be least.
    least = _running_argmin(picked + picked_error)
    pairs = []
    if in_order and chosen.shape[-1] > 1:
        before = least[..., :-1]
        first, first_error = (np.take_along_axis(values, before, -1) for values in (picked, picked_error))
        pairs.append(_widest_pair(first, picked[..., 1:], first_error + picked_error[..., 1:]))
    if chosen.shape[-1] < high.shape[-1]:
        lowest = least[..., -1:]
        first, first_error = (np.take_along_axis(values, lowest, -1) for values in (picked, picked_error))
        left_out = np.ones(high.shape, bool)
        np.put_along_axis(left_out, chosen, False, -1)
        best = np.where(left_out, high - error, -np.inf).argmax(-1)[..., None]
        second, second_error = (np.take_along_axis(values, best, -1) for values in (high, error))
        pairs.append(_widest_pair(first, second, first_error + second_error))
    widest = max(pairs, key=lambda pair: pair.ratio, default=None)
    if widest is None or not widest.ratio:
        return None
    if largest:
        return widest
    return ScorePair(-widest.first, -widest.second, widest.gap, widest.room)


def find_passed_tie(scores: Array, exact: Array, picks: Array, axis: int) -> PassedTie | None:
    """Find a pick of the largest or smallest score that is not the first of equal scores.

    torch.argmax and ONNX's ArgMax pick the first of equal scores. Scores that rounding moves are equal by chance, and
    any of them may be first.

    Args:
        scores: float64 scores.
        exact: True for each score that rounding does not move, same shape.
        picks: one index for each row, along ``axis``.

    Returns:
        the first such pick, or None.
    """
    high, fixed, chosen = (np.moveaxis(values, axis, -1) for values in (scores, exact, picks))
    if not chosen.size:
        return None
    picked, is_fixed = (np.take_along_axis(values, chosen, -1) for values in (high, fixed))
    first = ((high == picked) & fixed & is_fixed).argmax(-1)[..., None]
    # A NaN is equal to no score.
    passed = is_fixed & ~np.isnan(picked) & (first < chosen)
    if not passed.any():
        return None
    place = tuple(int(index) for index in np.argwhere(passed)[0])
    return PassedTie(int(chosen[place]), int(first[place]), float(picked[place]))


def _running_argmin(values: Array) -> Array:
    """Return the index of the smallest of the values up to each place, along the last axis."""
    is_new = values == np.minimum.accumulate(values, -1)
    return np.maximum.accumulate(np.where(is_new, np.arange(values.shape[-1]), 0), -1)


def _widest_pair(first: Array, second: Array, room: Array) -> ScorePair:
    """Return the pair with the largest ratio of gap to room."""
    with np.errstate(invalid="ignore", divide="ignore"):
        # Equal infinities have no gap.
        gap = np.where(first == second, 0.0, second - first)
        ratio = np.where(gap > 0, np.where(room > 0, gap / room, np.inf), 0.0)
    place = np.unravel_index(int(ratio.argmax()), ratio.shape)
    return ScorePair(float(first[place]), float(second[place]), float(gap[place]), float(room[place]))
