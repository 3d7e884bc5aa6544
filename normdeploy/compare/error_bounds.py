"""How far each element of a floating output may be off: what random roundings of the reference do to it, and eager's
own error.

    error[i] ≤ 4 · max(ρ · s[i], e[i])        s[i] = spread[i] + ulp(reference[i])

``spread`` is the largest |run − reference| over runs of the float64 reference with every intermediate rounded at random
(``runtimes.rounding_noise``): it knows where a result hangs on roundings (x − mean of a constant row) and where it does
not. ``e`` is the error of eager, one correct evaluation in the model's type; ρ is how many s eager needs anywhere in
the output, at least 1 (sums of many terms make more roundings than one) and at most 8 (one odd element of eager's must
not loosen all others). The 4 is the room between two draws. A first few runs are made for every case; where a runtime
lies outside, more are made before it is said to fail (a tie between two choices turns over in some runs only).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..types import Array, Arrays
from .element_errors import absolute_difference, largest_finite
from .ulp_spacing import EAGER_MULTIPLE, float_spacing

Outputs = Arrays

MOST_RATIO = 8.0
# of the largest |reference|
_LOST = 0.25
# the latter where something lies outside
RUNS, MOST_RUNS = 3, 48


class ErrorBounds:
    """Of one case. ``reference`` and ``eager`` by output; ``rounded`` runs the reference with roundings, one way for
    each seed; ``may_draw`` says whether there is time for more than the first one."""

    def __init__(
        self,
        reference: Outputs,
        eager: Outputs,
        rounded: Callable[[int], Outputs],
        may_draw: Callable[[], bool] = lambda: True,
    ) -> None:
        self._rounded = rounded
        self._runs = 0
        self._may_draw = may_draw
        self._reference = {name: value for name, value in reference.items() if value.dtype.kind not in "iub"}
        self.outputs = tuple(self._reference)
        # as float32: they are magnitudes, and outputs may be large
        self._spread = {name: np.zeros(value.shape, np.float32) for name, value in self._reference.items()}
        self._dtypes = {name: eager[name].dtype for name in self._reference}
        self._eager = {name: _finite_distance(eager[name], value) for name, value in self._reference.items()}
        self._run_more_roundings(1)
        # In float64 a run of a large model may take a minute.
        while self._runs < RUNS and may_draw():
            self._run_more_roundings(1)

    def _run_more_roundings(self, runs: int) -> None:
        for seed in range(self._runs, self._runs + runs if self._reference else 0):
            run = self._rounded(seed)
            for name, reference in self._reference.items():
                np.maximum(self._spread[name], _finite_distance(run[name], reference), out=self._spread[name])
        self._runs += runs

    def rounding_units(self, output: str) -> Array:
        """s of every element, ≥ the smallest normal number of float32 and wider types: what is below may be flushed to
        zero."""
        return self._spread[output] + float_spacing(self._reference[output], self._dtypes[output])

    def eager_ratio(self, output: str) -> float:
        """How many s eager needs in this case."""
        return float((self._eager[output] / self.rounding_units(output)).max(initial=0.0))

    def allowed_error(self, output: str, ratio: float, error: Array | None = None) -> Array:
        """The largest error of each element that passes.

        Args:
            ratio: ρ, the largest ``ratio`` over the cases, as it is.
            error: what a runtime is off by; more roundings are tried while it is not within.
        """
        bound = self._bound_of_elements(output, ratio)
        # Nothing fails on fewer than the first few, whatever they take.
        if error is not None and self._runs < RUNS and (error > bound).any():
            self._run_more_roundings(RUNS - self._runs)
            bound = self._bound_of_elements(output, ratio)
        while error is not None and self._runs < MOST_RUNS and (error > bound).any():
            if not self._may_draw():
                break
            self._run_more_roundings(self._runs)
            bound = self._bound_of_elements(output, ratio)
        return bound

    def _bound_of_elements(self, output: str, ratio: float) -> Array:
        return EAGER_MULTIPLE * np.maximum(
            min(max(ratio, 1.0), MOST_RATIO) * self.rounding_units(output), self._eager[output]
        )


def has_lost_all_digits(value: Array, reference: Array) -> bool:
    """Return whether an output keeps no digit: it is off by a quarter of its largest value and more."""
    finite = np.isfinite(reference)
    away = absolute_difference(value[finite], reference[finite])
    return bool(away.max(initial=0.0) > _LOST * largest_finite(reference))


def _finite_distance(value: Array, reference: Array) -> Array:
    """Return the distance as float32, 0 where one of them is not finite or the shapes differ."""
    if value.shape != reference.shape:
        return np.zeros(reference.shape, np.float32)
    with np.errstate(over="ignore"):
        return absolute_difference(value, reference, one_sided=0.0).astype(np.float32)
