"""What else an integer may be, because its answer hangs on a rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..types import Array
from .error_bounds import Outputs

# runs of the reference; one in four turns a difference of one unit around, so 16 miss one of a hundred
_DISTURBANCES = 16
# different ones, where the answer is open
_ANSWERS = 3


class RoundingTies:
    """What else an integer output of one case may be, because its answer hangs on a rounding.

    That is what eager answers, what the reference does when ``perturbed`` (a run of it with everything off by a few
    units; the argument is a seed) and when ``rounded`` (with each intermediate rounded, and equal values in any order).
    Runs are made while there is time for more (``may_draw``). Where these give three answers and more, as the order of
    many equal values does, any integer between the least and the largest in that output will do.
    """

    def __init__(
        self,
        perturbed: Callable[[int], Outputs],
        reference: Outputs,
        eager: Outputs,
        rounded: Callable[[int], Outputs] | None = None,
        may_draw: Callable[[], bool] = lambda: True,
    ) -> None:
        self._may_draw = may_draw
        if rounded is None:
            self._runners = [perturbed]
        else:
            self._runners = [perturbed, rounded]
        self._reference = reference
        self._others = [eager]

    def explain_elements(self, output: str, value: Array, *, draws: bool = True) -> Array:
        """Which elements of ``value`` are right, or right by a rounding; the reference is run only until all are, and
        not at all without ``draws``."""
        right = value == self._reference[output]
        seen = [self._reference[output]]
        for other in self._iter_rounded_runs() if draws else self._others:
            if other[output].shape == value.shape:
                right |= value == other[output]
                seen.append(other[output])
            if right.all():
                return right
        several = np.sort(np.stack(seen), axis=0)
        open_ = (several[1:] != several[:-1]).sum(0) >= _ANSWERS - 1
        return right | (open_ & (value >= several.min()) & (value <= several.max()))

    def _iter_rounded_runs(self) -> Iterator[Outputs]:
        yield from self._others
        for number in range(len(self._others) - 1, _DISTURBANCES * len(self._runners)):
            if not self._may_draw():
                return
            runner = self._runners[number // _DISTURBANCES]
            seed = number % _DISTURBANCES
            self._others.append(runner(seed))
            yield self._others[-1]
