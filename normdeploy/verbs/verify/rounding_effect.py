"""Measure how much random roundings move each element of a model's outputs, with as many draws as a comparison needs.

Rounding may decide a choice: which of two nearly equal scores comes first, for example. Only some draws then make the
choice of the other evaluation. If several candidates are nearly equal, as the queries of a detector are, a few draws
miss some of the orders in which they may come. So more roundings are drawn while a difference is unexplained.

Kernels add up hundreds of products one after another, so their errors are larger than a draw. Eager's own errors show
by how much. The draws of an output are multiplied by κ:

    κ = √(mean of (e/s)²)        s = √(mean of squared draws) + ulp/2

where e is the error of eager, and the mean is over the elements of the output. κ is limited to 1 … 8.

- Both sides are root mean squares. The largest e/s of an output is larger if the output has more elements, and if few
  draws make s small by chance. In a block of a UNet it is 2.2 after 3 draws, 1.4 after 48, while κ is 1.05 and 0.82.
- A row in which e is more than 8 times the largest draw is left out of the mean. Rounding has decided a choice there,
  and no draw has made the same choice. Such a row explains its own difference, and no other row's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from ...compare.element_errors import absolute_difference, largest_of_rows
from ...compare.error_bounds import MOST_RATIO, MOST_RUNS, RUNS
from ...compare.ulp_spacing import float_spacing
from ...model import LoadedModel
from ...runtimes import RunResult
from ...runtimes.ordering_operators import ChoiceGuide
from ...runtimes.rounding_noise import RoundingRunner
from ...types import Array, Arrays

_Difference = TypeVar("_Difference")
# Maximum number of draws at a time, and seconds of computing after which no more are started.
_DRAWS = 8
_MOST_SECONDS = 60.0
# If more than this share of an output needs more than the largest κ, the draws are too small, and κ is the largest one.
_MOST_CHOICES = 0.5


class RoundingEffect:
    """Largest change of each element of each output under random roundings.

    Attributes:
        moved: output -> largest change of each element, at first the errors of ``beside``. After `RUNS` draws, the
            changes by draws are multiplied by κ.
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
        self._dtypes = {output: value.dtype for output, value in start.items()}
        self._beside = {output: absolute_difference(value, start[output]) for output, value in self._exact.items()}
        self._drawn = {output: np.zeros_like(value) for output, value in self._beside.items()}
        self._squares = {output: np.zeros_like(value) for output, value in self._beside.items()}
        self.moved = dict(self._beside)
        self.draws = 0

    def draw(self, count: int) -> None:
        """Draw ``count`` more random roundings."""
        for seed in range(self.draws, self.draws + count):
            with self._reference.guided(self._guide):
                rounded = self._reference.run_rounded(self._feeds, seed)
                perturbed = self._reference.run_perturbed(self._feeds, self._unit, seed)
            for output, exact in self._exact.items():
                moved = np.maximum(
                    absolute_difference(rounded[output], exact), absolute_difference(perturbed[output], exact)
                )
                self._drawn[output] = np.maximum(self._drawn[output], moved)
                self._squares[output] += np.square(moved)
        self.draws += count
        for output, drawn in self._drawn.items():
            self.moved[output] = np.maximum(self._beside[output], self._scale(output) * drawn)

    def include_runs(self, changes: Mapping[str, Array]) -> None:
        """Count the largest changes of another evaluation under random roundings like those of draws.

        They count up to 8 times the largest draw of a row. Otherwise a wrong evaluation that divides by a small number
        would explain itself, because it is sensitive to roundings.

        Args:
            changes: output -> largest change of each element.
        """
        for output, change in changes.items():
            exact = self._exact[output]
            # Integers have no rounding error: the other evaluation may only choose another one.
            if exact.dtype.kind != "f" or change.shape != exact.shape:
                continue
            room = largest_of_rows(self._drawn[output] + float_spacing(exact, self._dtypes[output]))
            scaled = np.minimum(self._scale(output) * change, MOST_RATIO * room)
            self.moved[output] = np.maximum(self.moved[output], scaled)

    def _scale(self, output: str) -> float:
        """Compute κ of an output (see the module's docstring).

        Returns:
            a number from 1 to 8; 1 for few draws and for integers.
        """
        exact = self._exact[output]
        if self.draws < RUNS or exact.dtype.kind != "f" or not exact.size:
            return 1.0
        spacing = float_spacing(exact, self._dtypes[output])
        beside = self._beside[output]
        most = MOST_RATIO * largest_of_rows(self._drawn[output] + spacing)
        is_choice = np.broadcast_to(largest_of_rows(beside) > most, exact.shape)
        if is_choice.mean() > _MOST_CHOICES:
            return MOST_RATIO
        squared = np.square(beside / (np.sqrt(self._squares[output] / self.draws) + spacing / 2))
        measured = squared[~is_choice & np.isfinite(squared)]
        mean = measured.sum() / max(1, measured.size)
        return float(np.clip(np.sqrt(mean), 1.0, MOST_RATIO))

    def find_beyond(self, find: Callable[[RunResult], _Difference | None]) -> _Difference | None:
        """Draw roundings until they explain a difference, or until `MOST_RUNS` draws do not explain it.

        No draw comes first, because the errors of ``beside`` often explain the difference, and one run of a large model
        takes seconds. Then come one draw and more, whose number doubles.

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
