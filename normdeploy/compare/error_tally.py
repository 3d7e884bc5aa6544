"""Collect a runtime's distance from its reference over all cases of one kind, and the allowed error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ..types import Array
from .element_errors import first_true_index, nonfinite_mismatch
from .number_text import format_pair
from .ulp_spacing import allowed_beside_peer
from .verdict import Verdict, nearest_to_bound


@dataclass(frozen=True)
class _BrokenCase:
    """Mismatch that no error can express.

    Attributes:
        lost: error of a floating output in that case, NaN or infinite.
    """

    reason: str
    lost: float = float("nan")


@dataclass
class ErrorTally:
    """Comparison of one output of one runtime over all cases of one kind.

    Attributes:
        absolute: largest absolute error.
        relative: largest relative error.
        scale: largest |reference|.
        case: name of the case with the worst result.
        ties: number of integers that differ from the reference, where the reference depends on a rounding.
        broken: mismatch that no error can express (a NaN, another shape, another integer), or None.
        lost: error of a floating output in the broken case, NaN or infinite.
        worst: element nearest to its bound, or farthest beyond its bound; set only if elements have bounds.
        failed: names of cases that are broken or exceed a bound.
    """

    dtype: np.dtype
    absolute: float = 0.0
    relative: float = 0.0
    scale: float = 0.0
    case: str = ""
    ties: int = 0
    broken: str | None = None
    lost: float = float("nan")
    worst: Verdict | None = None
    failed: list[str] = field(default_factory=list)

    def add(
        self,
        case: str,
        value: Array | None,
        reference: Array,
        explained: Callable[[Array], Array],
        *,
        bound: Callable[[Array], Array] | None = None,
        peer: Array | None = None,
    ) -> None:
        """Add one case.

        Args:
            value: output of the runtime; None if it has no such output.
            reference: expected output, float64 for a floating output.
            explained: returns a mask of the integers that are equal or whose difference a rounding explains. It is
                called only if some integers differ.
            bound: returns the allowed error of each element, given the error of each.
            peer: eager's output. A value that is not finite passes if eager's value is not finite either, NaN or
                infinite.
        """
        broken: _BrokenCase | None
        if value is None:
            broken = _BrokenCase("the output is missing")
        elif value.dtype != self.dtype:
            broken = _BrokenCase(f"it is {value.dtype}, but the reference is {self.dtype}")
        elif value.shape != reference.shape:
            broken = _BrokenCase(f"its shape is {list(value.shape)}, but the reference's is {list(reference.shape)}")
        elif self.dtype.kind in "iub":
            broken = self._compare_integers(value, reference, explained)
        else:
            broken = self._compare_floats(case, value, reference, bound, peer)
        if broken is not None:
            self.failed.append(case)
            if self.broken is None:
                self.broken = broken.reason
                self.lost = broken.lost
                self.case = case
        self.case = self.case or case

    def refuse(self, case: str, reason: str) -> None:
        """Let a case fail for a reason that the errors do not show."""
        self.failed.append(case)
        if self.broken is None:
            self.broken = reason
            self.lost = self.absolute
            self.case = case

    def _compare_integers(
        self, value: Array, reference: Array, explained: Callable[[Array], Array]
    ) -> _BrokenCase | None:
        differs = value != reference
        if not differs.any():
            return None
        wrong = ~explained(value)
        self.ties += int((differs & ~wrong).sum())
        if wrong.any():
            return _BrokenCase(f"{_describe_first_wrong(wrong, value, reference)}, and no rounding explains it")
        return None

    def _compare_floats(
        self,
        case: str,
        value: Array,
        reference: Array,
        bound: Callable[[Array], Array] | None,
        peer: Array | None,
    ) -> _BrokenCase | None:
        """Add the errors of a case. Return a mismatch that no error can express, or None."""
        with np.errstate(all="ignore"):
            # A reference beyond the type's range becomes infinite.
            expected = reference.astype(self.dtype).astype(np.float64)
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
            if bound is None and not self.broken:
                self.case = case
        self.relative = max(self.relative, float(relative.max(initial=0.0)))
        self.scale = max(self.scale, float(magnitude.max(initial=0.0)))
        if bound is not None and error.size:
            self._update_worst(case, error, bound(error))
        if peer is None:
            wrong = nonfinite_mismatch(got, expected)
        else:
            lost = ~np.isfinite(got)
            wrong = (lost == np.isfinite(expected)) & (lost == np.isfinite(peer.astype(np.float64)))
        if not wrong.any():
            return None
        with np.errstate(all="ignore"):
            return _BrokenCase(_describe_first_wrong(wrong, got, reference), float(np.abs(got - expected)[wrong][0]))

    def _update_worst(self, case: str, error: Array, allowed: Array) -> None:
        worst = nearest_to_bound(error, allowed)
        if worst.bound_ratio > 1:
            self.failed.append(case)
        before = self.worst
        # After a failure, the bounds of later cases come from fewer random runs and are tighter. So a later case counts
        # as worse only if its error is larger too.
        if before is None or (
            worst.bound_ratio > before.bound_ratio and (before.bound_ratio <= 1 or worst.error > before.error)
        ):
            self.worst = worst
            if not self.broken:
                self.case = case

    def failure_ratio(self, eager: ErrorTally) -> float:
        """Return the largest ratio of error to allowed error.

        Returns:
            ratio; above 1 the output fails.
        """
        if self.broken:
            return float("inf")
        return self.deciding_verdict(eager).bound_ratio

    def deciding_verdict(self, eager: ErrorTally) -> Verdict:
        """Return the worst error with its allowed error.

        Returns:
            verdict on the worst element, or on the largest error under one bound. If a floating output is ``broken``,
            its error is not finite.
        """
        if self.worst is None:
            verdict = Verdict(self.absolute, self.allowed_error(eager))
        else:
            verdict = self.worst
        if self.broken and self.dtype.kind not in "iub":
            return replace(verdict, error=self.lost)
        return verdict

    def allowed_error(self, eager: ErrorTally) -> float:
        """Compute the allowed error if all elements have the same bound.

        Args:
            eager: tally of the model in its own type.

        Returns:
            allowed error; 0 for integers.
        """
        if self.dtype.kind in "iub":
            return 0.0
        return allowed_beside_peer(eager.absolute, eager.scale, self.dtype)


def _describe_first_wrong(wrong: Array, value: Array, reference: Array) -> str:
    index = first_true_index(wrong)
    if index:
        place = f" at {list(index)}"
    else:
        place = ""
    got, expected = format_pair(value[index], reference[index])
    return f"{got} where the reference is {expected}{place} ({int(wrong.sum())} of {wrong.size} elements differ)"
