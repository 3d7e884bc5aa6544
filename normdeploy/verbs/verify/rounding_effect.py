"""Measure how much random roundings move each element of a model's outputs, with as many draws as a comparison needs.

Rounding may decide a choice: which of two nearly equal scores comes first, for example. Only some draws then make the
choice of the other evaluation. If several candidates are nearly equal, as the queries of a detector are, a few draws
miss some of the orders in which they may come. So more roundings are drawn while a difference is unexplained.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from ...compare.element_errors import absolute_difference
from ...compare.error_bounds import MOST_RUNS
from ...model import LoadedModel
from ...runtimes import RunResult
from ...runtimes.ordering_operators import ChoiceGuide
from ...runtimes.rounding_noise import RoundingRunner
from ...types import Array, Arrays

_Difference = TypeVar("_Difference")
# Maximum number of draws at a time, and seconds of computing after which no more are started.
_DRAWS = 8
_MOST_SECONDS = 60.0


class RoundingEffect:
    """Largest change of each element of each output under random roundings; it grows with each draw.

    Attributes:
        moved: output -> largest change of each element, at first the errors of ``beside``.
        draws: number of draws. Each draw rounds the inner values once, and perturbs the parameters once.
    """

    def __init__(
        self,
        model: LoadedModel,
        feeds: Arrays,
        unit: float,
        beside: RunResult | None = None,
        guide: ChoiceGuide | None = None,
    ) -> None:
        """Run the model in float64.

        Args:
            unit: unit roundoff of the model's type.
            beside: outputs of one correct evaluation in the model's own type, if there are any. Their errors count as
                changes.
            guide: choices of topk, sort and argmax that all runs follow; None for their own choices.

        Raises:
            NormdeployError: an operator does not run in float64.
        """
        self._reference = RoundingRunner(model)
        self._feeds = feeds
        self._unit = unit
        self._guide = guide
        with self._reference.guided(guide):
            self._exact = self._reference.infer(feeds)
        start = beside or self._exact
        self.moved = {output: absolute_difference(value, start[output]) for output, value in self._exact.items()}
        self.draws = 0

    def draw(self, count: int) -> None:
        """Draw ``count`` more random roundings."""
        for seed in range(self.draws, self.draws + count):
            with self._reference.guided(self._guide):
                rounded = self._reference.run_rounded(self._feeds, seed)
                perturbed = self._reference.run_perturbed(self._feeds, self._unit, seed)
            _enlarge(self.moved, rounded, self._exact)
            _enlarge(self.moved, perturbed, self._exact)
        self.draws += count

    def find_beyond(self, find: Callable[[RunResult], _Difference | None]) -> _Difference | None:
        """Draw roundings until they explain a difference, or until `MOST_RUNS` draws do not explain it.

        No draw comes first, because the errors of ``beside`` often explain the difference, and one run of a large model
        takes seconds. Then come one draw and more, whose number doubles. Draws only enlarge ``moved``, so a difference
        that fewer draws explain is also explained by more.

        Args:
            find: finds a difference that is larger than ``moved`` explains.

        Returns:
            the unexplained difference, or None.
        """
        start = time.process_time()
        difference = find(self.moved)
        while difference is not None and self.draws < MOST_RUNS and time.process_time() - start < _MOST_SECONDS:
            self.draw(min(max(1, self.draws), _DRAWS, MOST_RUNS - self.draws))
            difference = find(self.moved)
        return difference


def _enlarge(changes: dict[str, Array], drawn: RunResult, exact: RunResult) -> None:
    """Enlarge the changes to those of one more run."""
    for output, value in exact.items():
        changes[output] = np.maximum(changes[output], absolute_difference(drawn[output], value))
