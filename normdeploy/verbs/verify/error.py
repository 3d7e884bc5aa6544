"""How far a runtime's output is from the float64 reference, and what a correct one may be off by (the rule:
``verbs.verify.verify``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from ...runtimes import RunResult

EAGER_MULTIPLE = 4.0
ULPS = 4.0

# runs of the reference; one in four turns a difference of one unit around, so 16 miss one of a hundred
_DISTURBANCES = 16
_ANSWERS = 3  # different ones, where the answer is open


@dataclass(frozen=True)
class Worst:
    """The element of an output that comes nearest to failing: ``ratio`` is its ``error`` over what is ``allowed``
    there."""

    ratio: float
    error: float
    allowed: float
    case: str


@dataclass
class Tally:
    """One output of one runtime over all cases of one kind.

    ``absolute`` and ``relative`` are the largest errors, ``scale`` the largest |reference|; ``ties`` counts integers
    that differ where the reference itself hangs on a rounding. ``broken`` says what no error can express: a NaN,
    another shape, another integer; ``lost`` is the error of a floating output there, NaN or infinite.
    ``worst`` is the element that comes nearest to its bound, or exceeds it most, where each has one. ``failed``: the
    cases that are broken or leave such a bound.
    """

    dtype: np.dtype
    absolute: float = 0.0
    relative: float = 0.0
    scale: float = 0.0
    case: str = ""
    ties: int = 0
    broken: str = ""
    lost: float = float("nan")
    worst: Worst | None = None
    failed: list[str] = field(default_factory=list)

    def add(
        self,
        case: str,
        value: np.ndarray | None,
        reference: np.ndarray,
        explained: Callable[[np.ndarray], np.ndarray],
        *,
        bound: Callable[[np.ndarray], np.ndarray] | None = None,
        peer: np.ndarray | None = None,
    ) -> None:
        """Take one case in.

        Args:
            value: what the runtime gives; None says that there is no such output.
            reference: float64 where the output is floating.
            explained: tells which integers are right, be it by a rounding; it is called only where some differ.
            bound: tells what each element may be off by, given what each is off by.
            peer: eager's answer, where a number that is not finite may stand where it has one too (NaN and infinities
            count alike).
        """
        broken, lost = "", float("nan")
        if value is None:
            broken = "there is no such output"
        elif value.dtype != self.dtype:
            broken = f"it is {value.dtype}, the reference is {self.dtype}"
        elif value.shape != reference.shape:
            broken = f"its shape is {list(value.shape)}, the reference's is {list(reference.shape)}"
        elif self.dtype.kind in "iub":
            broken = self._integers(value, reference, explained)
        else:
            broken, lost = self._floats(case, value, reference, bound, peer)
        if broken:
            self.failed.append(case)
        if broken and not self.broken:
            self.broken, self.lost, self.case = broken, lost, case
        self.case = self.case or case

    def _integers(self, value: np.ndarray, reference: np.ndarray, explained: Callable[[np.ndarray], np.ndarray]) -> str:
        differs = value != reference
        if not differs.any():
            return ""
        wrong = ~explained(value)
        self.ties += int((differs & ~wrong).sum())
        return f"{_first(wrong, value, reference)}, and no rounding decides there" if wrong.any() else ""

    def _floats(
        self,
        case: str,
        value: np.ndarray,
        reference: np.ndarray,
        bound: Callable[[np.ndarray], np.ndarray] | None,
        peer: np.ndarray | None,
    ) -> tuple[str, float]:
        """What is wrong, "" where nothing is but numbers, and the error of the first element where it is."""
        with np.errstate(all="ignore"):
            expected = reference.astype(self.dtype).astype(np.float64)  # beyond the type's range it is infinite
            got = value.astype(np.float64)
            finite = np.isfinite(expected) & np.isfinite(got)
            if peer is not None:
                finite &= np.isfinite(peer.astype(np.float64))
            error = np.where(finite, np.abs(got - reference), 0.0)
            relative = np.where(finite & (reference != 0), error / np.abs(reference), 0.0)
            magnitude = np.where(np.isfinite(expected), np.abs(reference), 0.0)
        largest = float(error.max(initial=0.0))
        if largest > self.absolute:
            self.absolute = largest
            self.case = case if bound is None and not self.broken else self.case
        self.relative = max(self.relative, float(relative.max(initial=0.0)))
        self.scale = max(self.scale, float(magnitude.max(initial=0.0)))
        if bound is not None and error.size:
            self._take_worst(case, error, bound(error))
        if peer is None:
            wrong = ~finite & ~(np.isnan(expected) & np.isnan(got)) & (expected != got)
        else:
            lost = ~np.isfinite(got)
            wrong = (lost == np.isfinite(expected)) & (lost == np.isfinite(peer.astype(np.float64)))
        if not wrong.any():
            return "", 0.0
        with np.errstate(all="ignore"):
            return _first(wrong, got, reference), float(np.abs(got - expected)[wrong][0])

    def _take_worst(self, case: str, error: np.ndarray, allowed: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            ratios = np.where(error > 0, error / allowed, 0.0)
        place = np.unravel_index(int(ratios.argmax()), ratios.shape)
        worst = Worst(float(ratios[place]), float(error[place]), float(allowed[place]), case)
        if worst.ratio > 1:
            self.failed.append(case)
        before = self.worst
        # Once a case fails, bounds of later ones are of fewer draws, so the ratio alone does not say that one is worse.
        if before is None or (worst.ratio > before.ratio and (before.ratio <= 1 or worst.error > before.error)):
            self.worst, self.case = worst, self.case if self.broken else case

    def badness(self, eager: Tally) -> float:
        """Above 1 it fails."""
        if self.broken:
            return float("inf")
        if self.worst is not None:
            return self.worst.ratio
        allowed = self.allowed(eager)
        return self.absolute / allowed if allowed else float("inf") if self.absolute else 0.0

    def shown(self, eager: Tally) -> tuple[float, float]:
        """The error that decides and what is allowed there: of the worst element, or the largest of all under one
        bound.

        Of a floating output that is ``broken`` the first is not finite.
        """
        error, allowed = (
            (self.absolute, self.allowed(eager)) if self.worst is None else (self.worst.error, self.worst.allowed)
        )
        return (self.lost if self.broken and self.dtype.kind not in "iub" else error), allowed

    def allowed(self, eager: Tally) -> float:
        """The largest error that passes under one bound for all elements, ``eager`` being what the model in its own
        type was off by."""
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
    return (
        f"{value[index]} where the reference is {reference[index]}{place} ({int(wrong.sum())} of {wrong.size} elements"
        " differ)"
    )


class Ties:
    """What else an integer output of one case may be, because its answer hangs on a rounding.

    That is what eager answers, what the reference does when ``perturbed`` (a run of it with everything off by a few
    units; the argument is a seed) and when ``rounded`` (with each intermediate rounded, and equal values in any order).
    Runs are made while there is time for more (``may_draw``). Where these give three answers and more, as the order of
    many equal values does, any integer between the least and the largest in that output will do.
    """

    def __init__(
        self,
        perturbed: Callable[[int], RunResult],
        reference: RunResult,
        eager: RunResult,
        rounded: Callable[[int], RunResult] | None = None,
        may_draw: Callable[[], bool] = lambda: True,
    ) -> None:
        self._may_draw = may_draw
        self._runners = [perturbed] if rounded is None else [perturbed, rounded]
        self._reference = reference
        self._others = [eager]

    def explained(self, output: str, value: np.ndarray, *, draws: bool = True) -> np.ndarray:
        """Which elements of ``value`` are right, or right by a rounding; the reference is run only until all are, and
        not at all without ``draws``."""
        right = value == self._reference[output]
        seen = [self._reference[output]]
        for other in self._runs() if draws else self._others:
            if other[output].shape == value.shape:
                right |= value == other[output]
                seen.append(other[output])
            if right.all():
                return right
        several = np.sort(np.stack(seen), axis=0)
        open_ = (several[1:] != several[:-1]).sum(0) >= _ANSWERS - 1
        return right | (open_ & (value >= several.min()) & (value <= several.max()))

    def _runs(self) -> Iterator[RunResult]:
        yield from self._others
        for number in range(len(self._others) - 1, _DISTURBANCES * len(self._runners)):
            if not self._may_draw():
                return
            runner, seed = self._runners[number // _DISTURBANCES], number % _DISTURBANCES
            self._others.append(runner(seed))
            yield self._others[-1]
