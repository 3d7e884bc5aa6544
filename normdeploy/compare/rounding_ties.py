"""Find all correct values of an integer output that depends on a rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..types import Array
from .error_bounds import Outputs

# Maximum number of runs of the reference per kind. One run in four reverses a difference of one unit, so 16 runs miss
# one such difference in a hundred.
_DISTURBANCES = 16
# Number of different values at which an integer counts as undetermined.
_ANSWERS = 3


class RoundingTies:
    """Correct values of the integer outputs of one case.

    A value is correct if eager computes it, or if the reference computes it in a ``perturbed`` or ``rounded`` run. Runs
    are made while ``may_draw`` returns true. If the runs give three or more different values for an element, every
    integer between the smallest and the largest value of that output passes. This happens, for example, if many equal
    values are sorted.
    """

    def __init__(
        self,
        perturbed: Callable[[int], Outputs],
        reference: Outputs,
        eager: Outputs,
        rounded: Callable[[int], Outputs] | None = None,
        may_draw: Callable[[], bool] = lambda: True,
    ) -> None:
        """Store the functions; the reference runs later, only when needed.

        Args:
            perturbed: runs the reference with every value off by a few units; takes a seed.
            rounded: runs the reference with each intermediate rounded and equal values in random order; takes a seed.
            may_draw: returns whether there is time for another run.
        """
        self._may_draw = may_draw
        if rounded is None:
            self._runners = [perturbed]
        else:
            self._runners = [perturbed, rounded]
        self._reference = reference
        self._others = [eager]

    def explain_elements(self, output: str, value: Array, *, draws: bool = True) -> Array:
        """Find the elements of ``value`` that are equal to the reference or that a rounding explains. The reference
        runs only until all elements are explained.

        Args:
            draws: True to run the reference again; False to use only the runs made so far.

        Returns:
            mask of the shape of ``value``.
        """
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
