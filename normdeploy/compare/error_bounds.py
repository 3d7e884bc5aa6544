"""Bound the error of each element of a floating output, by random roundings of the reference and by eager's own error.

    error[i] ≤ 4 · max(ρ · s[i], e[i])        s[i] = spread[i] + ulp(reference[i])

- ``spread`` is the largest |run − reference| over runs of the float64 reference with every intermediate rounded at
  random (``runtimes.rounding_noise``). It is large where a result depends on roundings, such as x − mean of a constant
  row.
- ``e`` is the error of eager, which is one correct evaluation in the model's own type.
- ρ is the largest multiple of s that eager needs anywhere in the output. It is at least 1, because sums of many terms
  round more than once. It is at most 8, so that one unusual element of eager does not loosen the bound of all other
  elements.
- The factor 4 is a margin: two correct evaluations round differently, like two random draws.

A few runs are made for every case. If a runtime exceeds the bound, more runs are made before the runtime fails. There
are two reasons. Rounding may decide between two choices, such as at a tie. Only some runs then take the second choice,
and a few runs may miss it. And few runs may all be small at one of many elements, so that s is too small there.

The second reason decides how many runs are made if the time is over. In a deep network of convolutions, kernels add up
thousands of products one after another, so the errors of a correct evaluation are about 4 times those of a run. Let all
of them be normal. An element then fails if 4·|z| > 4 · max(8 · max|zₖ|, 4·|y|) for n runs zₖ and eager's error 4·y. The
chance is about 0.15 · E (0.1·|z|)ⁿ: 2e-4 for n = 3, which is one of some thousand logits, and 2e-9 for n = 12. So up to
`DECIDING_RUNS` runs are made whatever the time, but only if they can decide: if all errors are within the bound that
the largest spread of the output would give. A larger error fails at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..types import Array, Arrays
from .element_errors import absolute_difference, largest_finite
from .ulp_spacing import EAGER_MULTIPLE, float_spacing

Outputs = Arrays

MOST_RATIO = 8.0
# Share of the largest |reference|. If the error exceeds this share, the output has no correct digit.
_LOST = 0.25
# Number of runs for every case, and maximum number of runs if an element exceeds its bound.
RUNS, MOST_RUNS = 3, 48
# Number of runs before an element fails that may have failed because few runs moved it little.
DECIDING_RUNS = 12


class ErrorBounds:
    """Bounds of one case."""

    def __init__(
        self,
        reference: Outputs,
        eager: Outputs,
        rounded: Callable[[int], Outputs],
        may_draw: Callable[[], bool] = lambda: True,
    ) -> None:
        """Run the reference with roundings, at least once.

        Args:
            reference: output -> float64 value.
            eager: output -> value in the model's type.
            rounded: runs the reference with roundings that depend on a seed.
            may_draw: returns whether there is time for more than the first run.
        """
        self._rounded = rounded
        self._runs = 0
        self._may_draw = may_draw
        self._reference = {name: value for name, value in reference.items() if value.dtype.kind not in "iub"}
        self.outputs = tuple(self._reference)
        # Spreads are float32: they are magnitudes, and outputs may be large.
        self._spread = {name: np.zeros(value.shape, np.float32) for name, value in self._reference.items()}
        self._dtypes = {name: eager[name].dtype for name in self._reference}
        self._eager = {name: _finite_distance(eager[name], value) for name, value in self._reference.items()}
        self._run_more_roundings(1)
        # A run of a large model in float64 may take a minute.
        while self._runs < RUNS and may_draw():
            self._run_more_roundings(1)

    def _run_more_roundings(self, runs: int) -> None:
        for seed in range(self._runs, self._runs + runs if self._reference else 0):
            run = self._rounded(seed)
            for name, reference in self._reference.items():
                np.maximum(self._spread[name], _finite_distance(run[name], reference), out=self._spread[name])
        self._runs += runs

    def rounding_units(self, output: str) -> Array:
        """Compute s of every element (see the module's docstring).

        Returns:
            array of the output's shape, at least the smallest normal number of float32 and wider types, because smaller
            numbers may be flushed to zero.
        """
        return self._spread[output] + float_spacing(self._reference[output], self._dtypes[output])

    def unmoved(self, output: str) -> Array:
        """Find the elements that no rounding has moved: all runs and eager have the reference's number.

        Returns:
            array of booleans of the output's shape.
        """
        return (self._spread[output] == 0) & (self._eager[output] == 0)

    def eager_ratio(self, output: str) -> float:
        """Compute the largest multiple of s that eager needs in this case.

        Returns:
            the multiple, not limited to 1 … 8.
        """
        return float((self._eager[output] / self.rounding_units(output)).max(initial=0.0))

    def allowed_error(self, output: str, ratio: float, error: Array | None = None) -> Array:
        """Compute the allowed error of each element.

        Args:
            ratio: ρ, the largest `eager_ratio` over the cases, without limits.
            error: error of a runtime. More runs with random roundings are made while it exceeds the bound, also
                without time if few runs may be the reason. None: no more runs.

        Returns:
            array of the output's shape.
        """
        bound = self._bound_of_elements(output, ratio)
        while error is not None and (error > bound).any():
            least = DECIDING_RUNS if self._may_move_by(output, ratio, error[error > bound]) else RUNS
            if not self.draw_more(least):
                break
            bound = self._bound_of_elements(output, ratio)
        return bound

    def _may_move_by(self, output: str, ratio: float, errors: Array) -> bool:
        """Check if errors would be allowed at the element of the output that roundings moved most so far."""
        most = self.rounding_units(output).max(initial=0.0)
        return bool((errors <= EAGER_MULTIPLE * min(max(ratio, 1.0), MOST_RATIO) * most).all())

    def draw_more(self, least: int = RUNS) -> bool:
        """Double the number of runs with random roundings.

        Args:
            least: number of runs that are made whether or not there is time.

        Returns:
            False if no run was made, because there are `MOST_RUNS` runs or the time is over.
        """
        if self._runs < least:
            self._run_more_roundings(min(max(RUNS, 2 * self._runs), least) - self._runs)
            return True
        if self._runs >= MOST_RUNS or not self._may_draw():
            return False
        self._run_more_roundings(self._runs)
        return True

    def _bound_of_elements(self, output: str, ratio: float) -> Array:
        return EAGER_MULTIPLE * np.maximum(
            min(max(ratio, 1.0), MOST_RATIO) * self.rounding_units(output), self._eager[output]
        )


def has_lost_all_digits(value: Array, reference: Array) -> bool:
    """Check if an output has no correct digit: its error is above a quarter of the largest reference value.

    Returns:
        true if a finite element has such an error.
    """
    finite = np.isfinite(reference)
    away = absolute_difference(value[finite], reference[finite])
    return bool(away.max(initial=0.0) > _LOST * largest_finite(reference))


def _finite_distance(value: Array, reference: Array) -> Array:
    """Return the distance as float32, 0 if one of the two is not finite or the shapes differ."""
    if value.shape != reference.shape:
        return np.zeros(reference.shape, np.float32)
    with np.errstate(over="ignore"):
        return absolute_difference(value, reference, one_sided=0.0).astype(np.float32)
