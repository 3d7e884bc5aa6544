"""How far a runtime's output is from the float64 reference, and what a correct one may be off by (the rule: ``parity.compare``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..runtimes import RunResult

EAGER_MULTIPLE = 4.0
ULPS = 4.0

# runs of the reference; one in four turns a difference of one unit around, so 16 miss one of a hundred
_DISTURBANCES = 16


@dataclass
class Tally:
    """One output of one runtime over all cases of one kind.

    ``absolute`` and ``relative`` are the largest errors, ``scale`` the largest |reference|; ``ties`` counts integers that differ where
    the reference itself hangs on a rounding. ``broken`` says what no error can express: a NaN, another shape, another integer.
    """

    dtype: np.dtype
    absolute: float = 0.0
    relative: float = 0.0
    scale: float = 0.0
    case: str = ""
    ties: int = 0
    broken: str = ""

    def add(self, case: str, value: np.ndarray | None, reference: np.ndarray, explained: Callable[[np.ndarray], np.ndarray]) -> None:
        """Take one case in. ``reference`` is float64 where the output is floating; None says that there is no such output.

        ``explained`` tells which integers are right, be it by a rounding; it is called only where some differ.
        """
        broken = ""
        if value is None:
            broken = "there is no such output"
        elif value.dtype != self.dtype:
            broken = f"it is {value.dtype}, the model's is {self.dtype}"
        elif value.shape != reference.shape:
            broken = f"its shape is {list(value.shape)}, the model's is {list(reference.shape)}"
        elif self.dtype.kind in "iub":
            broken = self._integers(value, reference, explained)
        else:
            broken = self._floats(case, value, reference)
        if broken and not self.broken:
            self.broken, self.case = broken, case
        self.case = self.case or case

    def _integers(self, value: np.ndarray, reference: np.ndarray, explained: Callable[[np.ndarray], np.ndarray]) -> str:
        differs = value != reference
        if not differs.any():
            return ""
        wrong = ~explained(value)
        self.ties += int((differs & ~wrong).sum())
        return f"{_first(wrong, value, reference)}, and no rounding decides there" if wrong.any() else ""

    def _floats(self, case: str, value: np.ndarray, reference: np.ndarray) -> str:
        with np.errstate(all="ignore"):
            expected = reference.astype(self.dtype).astype(np.float64)  # beyond the type's range it is infinite
            got = value.astype(np.float64)
            finite = np.isfinite(expected) & np.isfinite(got)
            error = np.where(finite, np.abs(got - reference), 0.0)
            relative = np.where(finite & (reference != 0), error / np.abs(reference), 0.0)
            magnitude = np.where(np.isfinite(expected), np.abs(reference), 0.0)
        largest = float(error.max(initial=0.0))
        if largest > self.absolute:
            self.absolute, self.case = largest, self.case if self.broken else case
        self.relative = max(self.relative, float(relative.max(initial=0.0)))
        self.scale = max(self.scale, float(magnitude.max(initial=0.0)))
        wrong = ~finite & ~(np.isnan(expected) & np.isnan(got)) & (expected != got)
        return _first(wrong, got, reference) if wrong.any() else ""

    def allowed(self, eager: Tally) -> float:
        """The largest error that passes, ``eager`` being what the model in its own type was off by in the same cases."""
        if self.dtype.kind in "iub":
            return 0.0
        return EAGER_MULTIPLE * eager.absolute + ULPS * ulp(eager.scale, self.dtype)


def ulp(magnitude: float, dtype: np.dtype) -> float:
    """The distance between the numbers of ``dtype`` around ``magnitude``, at least that of its subnormals."""
    info = ml_dtypes.finfo(dtype)
    exponent = int(np.frexp(min(magnitude, float(info.max)))[1]) - 1 if magnitude else info.minexp
    return float(2.0 ** (max(exponent, info.minexp) - info.nmant))


def _first(wrong: np.ndarray, value: np.ndarray, reference: np.ndarray) -> str:
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    place = f" at {list(index)}" if index else ""
    return f"{value[index]} where the reference is {reference[index]}{place} ({int(wrong.sum())} of {wrong.size} elements differ)"


class Ties:
    """What else an integer output of one case may be, because its answer hangs on a rounding: what eager answers, and what the
    reference itself does when ``perturbed`` (a run of it with everything off by a few units; the argument is a seed)."""

    def __init__(self, perturbed: Callable[[int], RunResult], reference: RunResult, eager: RunResult) -> None:
        self._perturbed, self._reference = perturbed, reference
        self._others = [eager]

    def explained(self, output: str, value: np.ndarray) -> np.ndarray:
        """Which elements of ``value`` are right, or right by a rounding; the reference is run only until all are."""
        right = value == self._reference[output]
        for other in self._runs():
            if other[output].shape == value.shape:
                right |= value == other[output]
            if right.all():
                break
        return right

    def _runs(self) -> Iterator[RunResult]:
        yield from self._others
        for seed in range(len(self._others) - 1, _DISTURBANCES):
            self._others.append(self._perturbed(seed))
            yield self._others[-1]
