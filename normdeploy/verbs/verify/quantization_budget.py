"""Compute the allowed error of a quantized file from the steps of its scales (its error budget).

    |value − reference| ≤ default bound + 4 · (a + w)

``w`` is the change of an element if each stored weight is anywhere within half a step of its code. ``a`` is the change
of an element if the grid of each activation quantizer shifts by a fraction of a step (`runtimes.quantized_float64`).

``w`` and ``a`` are each the largest change over a few random draws, evaluated in float64. A few draws say little about
a single element, so each is at least half of its root mean square over the output. More draws are made while an element
exceeds its bound. The factor 4 is the margin between two draws, as in `compare.error_bounds`.

An element that still exceeds the bound gets a second bound: the effect of roundings that are 4 times as wide. At a
kink, such as a ReLU after a negative sum or a choice between two values, one draw may have no effect at all. Then the
wide roundings have an effect that is more than 4 times as large.

The file is judged four times:

- In float64 without rounding activations, only w is allowed. This detects wrong weights, scales or zero points, and a
  DequantizeLinear that does not invert its QuantizeLinear. Values are clipped to the ranges, because a range may act as
  a ReLU. Clipping has no budget, so a range that is too small is detected too.
- In float64 with the file's rounding, a + w is allowed.
- In each runtime, a + w is allowed for the difference from the reference.
- In each runtime, a is allowed for the difference from the file's own float64 evaluation. There, a value that is
  rounded to the other side differs by one step.

A file that records the ranges of its calibration (`graphs.quantization_info.RECORD`) does not fail on inputs beyond
these ranges. Without rounding, it is compared with the model without clipping. With rounding, on inputs beyond the
ranges, it is compared with the outputs of the file itself, clipped but not rounded. Clipped values are reported but not
judged. The record must match the scales of the file; otherwise the ranges are not trusted.

A file of another tool has no record. If a calibration on inputs like these could have given its ranges
(`StepBudget.trust_ranges`), they are trusted and the file is compared in the same way.

If 4 times the effect of the steps exceeds the output (root mean squares), an output of zeros would pass. The budget is
then meaningless, and the file fails. Only a metric can judge such a file.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np
import onnx

from ...compare.element_errors import absolute_difference
from ...compare.ulp_spacing import EAGER_MULTIPLE
from ...errors import NormdeployError, RuntimeUnavailable
from ...graphs.decomposed_dequantize import rewrite_as_dequantize
from ...runtimes import HeldRunner, RunResult
from ...runtimes.rounding_draws import RoundingDraw, Saturation
from ...storage.onnx_files import load_onnx
from ...types import Array, Arrays
from .io_matching import RenamedFile

if TYPE_CHECKING:
    from ...runtimes.quantized_float64 import QuantizedRunner

ROUNDED = "float64, rounded as the file says"
UNROUNDED = "float64, activations not rounded"
BUDGET = "error budget of its steps"
BOTH = ("activations", "weights")
AGAINST = ", against the file in float64"
# Draw that neither rounds activations nor clips to ranges.
UNBOUNDED = RoundingDraw("exact", clips=False)
_FLOOR = 0.5
_RUNS = 3
_MOST_RUNS = 48
_MOST_WIDE = 12
# More draws are made only if at most this many elements, or 1 % of all elements, exceed their bound.
_FEW = 8
# No more draws are made if an error exceeds this multiple of its bound. They can't raise the bound so much: the largest
# of 48 draws is about twice the largest of 3.
_HOPELESS = 4.0
_NAMED = 3
_USUAL = ("random", "given")
# Effect of the steps, relative to the output, above which an output of zeros would pass.
VOID = 1 / EAGER_MULTIPLE


class StepBudget:
    """Error budget of one quantized file.

    Attributes:
        calibrated: quantized tensors whose ranges are trusted to come from a calibration.
        altered: reason why a recorded range is not trusted; "" if all recorded ranges are trusted.
        failure: reason why the budget can't be computed; None if it can be computed.
        cut: names of the inputs on which trusted ranges clip values.
    """

    def __init__(self, subject: RenamedFile, calibrated: Collection[str] = (), altered: str = "") -> None:
        self._subject = subject
        self._runner: QuantizedRunner | None = None
        self._cases: dict[str, CaseBudget] = {}
        # Output -> [sum of squares of the effect of the steps, sum of squares of the output].
        self._sums: dict[str, list[float]] = {}
        self._last: tuple[Arrays, RoundingDraw, RunResult] | None = None
        self.failure: str | None = None
        self.calibrated = frozenset(calibrated)
        self.altered = altered
        self.cut: list[str] = []
        self._random: list[_RandomRun] = []

    def infer(self, feeds: Arrays, draw: RoundingDraw) -> RunResult:
        """Run the file in float64 with the model's names.

        Args:
            draw: roundings to draw.

        Returns:
            the outputs by the model's names.

        Raises:
            NormdeployError: a node can't be computed in float64.
        """
        if self._runner is None:
            from ...runtimes.quantized_float64 import QuantizedRunner

            self._runner = QuantizedRunner(rewrite_as_dequantize(load_onnx(self._subject.path)))
        return self._subject.model_results(self._runner.run_with_draw(self._subject.own_feeds(feeds), draw))

    def cached_answer(self, feeds: Arrays, draw: RoundingDraw) -> RunResult:
        """Run the file as `infer` does, or return the last result if ``feeds`` is the same object.

        Returns:
            the outputs by the model's names.

        Raises:
            NormdeployError: a node can't be computed in float64.
        """
        made = next((b for b in self._cases.values() if b.feeds is feeds), None)
        if made is not None and draw in (RoundingDraw(), UNBOUNDED):
            if draw == RoundingDraw():
                return made.plain
            return made.center
        if self._last is None or self._last[0] is not feeds or self._last[1] != draw:
            self._last = (feeds, draw, self.infer(feeds, draw))
        return self._last[2]

    def case_budget(
        self, case: str, kind: str, feeds: Arrays, may_draw: Callable[[], bool] = lambda: True
    ) -> CaseBudget | None:
        """Compute the budget on one input.

        Args:
            may_draw: function that returns whether there is time for more draws than the first ones.

        Returns:
            the budget. None if the file can't be evaluated; ``failure`` then has the reason.
        """
        if self.failure:
            return None
        if case not in self._cases:
            try:
                self._cases[case] = CaseBudget(
                    self.cached_answer, feeds, self._clipped_tensors, self.calibrated, may_draw
                )
                if self._cases[case].cut:
                    self.cut += [case]
            except NormdeployError as error:
                self.failure = str(error)
                return None
            # Only random inputs can show that ranges come from a calibration. The user's inputs are the inputs in use,
            # so values that are clipped on them are judged.
            if kind == "random":
                elements = sum(value.size for value in feeds.values())
                self._random.append(_RandomRun(elements, self._cases[case].clipped))
            if kind in _USUAL:
                for name in self._cases[case].float_outputs:
                    sums = self._sums.setdefault(name, [0.0, 0.0])
                    sums[:] = (a + b for a, b in zip(sums, self._cases[case].sums_of_squares(name), strict=True))
        return self._cases[case]

    def _clipped_tensors(self) -> frozenset[str]:
        """Return the quantized tensors that the last run clipped."""
        if self._runner is not None:
            return self._runner.clipped_tensors()
        return frozenset()

    def trust_ranges(self) -> bool:
        """Trust the file's ranges if a calibration on inputs like these could have given them.

        The ranges of a calibration include all values of the runs that it saw. So each range must include all values of
        at least one random run here. Small runs are not used, because a wrong range may include a few values by chance.

        Returns:
            True if the ranges are trusted from now on.
        """
        if self.calibrated or self.altered or not self._random:
            return False
        enough = statistics.median(run.elements for run in self._random)
        clipped = [run.clipped for run in self._random if run.elements >= enough]
        # All inputs count here, not only random ones: zeros may be out of range too, for example a black image.
        every = frozenset[str]().union(*(budget.clipped for budget in self._cases.values()))
        if not every or any(all(name in names for names in clipped) for name in every):
            return False
        self.calibrated = every
        for case, budget in self._cases.items():
            if budget.clipped:
                budget.cut = budget.run(budget.feeds, RoundingDraw("exact"))
                self.cut.append(case)
        return True

    def describe_clipped_ranges(self, label: str) -> str | None:
        """Describe the inputs that exceed the calibrated ranges, as a note.

        Returns:
            a note, or None if nothing was clipped.
        """
        if not self.cut:
            return None
        reached = sorted(self.list_saturations(), key=lambda s: -s.beyond)
        named = "; ".join(map(str, reached[:1])) + (f"; {len(reached) - 1} more" if len(reached) > 1 else "")
        return (
            f"{label}: {len(self.cut)} of {len(self._cases)} inputs exceed the calibrated ranges ({named})."
            " Clipped values are not judged; pass inputs that the model will see (--inputs), or a metric"
        )

    def relative_error(self, output: str) -> float | None:
        """Compute the effect of the steps alone, relative to the output (root mean squares).

        Returns:
            the ratio; None for an integer output.
        """
        if output not in self._sums:
            return None
        return _relative_size(*self._sums[output])

    def list_saturations(self) -> list[Saturation]:
        """List the quantized tensors whose values exceeded their ranges.

        Returns:
            one saturation for each.
        """
        if self._runner is None:
            return []
        return [s for s in self._runner.list_saturations() if s]

    def explain_failure(self, runtime: str) -> str | None:
        """Explain the failure of a runtime.

        Returns:
            a reason, or None if the numbers explain the failure.
        """
        altered = "a weight, a scale or a zero point differs from the model's (bisect finds it)"
        clipped = sorted(self.list_saturations(), key=lambda s: -s.beyond)
        if clipped:
            named = "; ".join(map(str, clipped[:_NAMED]))
            if len(clipped) > _NAMED:
                more = f"; {len(clipped) - _NAMED} more saturate"
            else:
                more = ""
            advice = "calibrate on inputs like these, or pass inputs like the calibration samples"
            return f"{named}{more}; {advice}" + (f"; or {altered}" if runtime == UNROUNDED else "")
        if runtime == UNROUNDED:
            return f"activations are not rounded in this run, so {altered}"
        return None


@dataclass(frozen=True)
class _RandomRun:
    """Random run of a file.

    Attributes:
        elements: number of elements of the inputs.
        clipped: quantized tensors that were clipped.
    """

    elements: int
    clipped: frozenset[str]


def _is_undecided(error: Array, bound: Array) -> bool:
    """Return whether more draws may still raise the bound above the error."""
    return bool((error > bound).any()) and not bool((error > _HOPELESS * bound).any())


def _relative_size(steps: float, size: float) -> float:
    if size:
        return float(np.sqrt(steps / size))
    if steps:
        return float("inf")
    return 0.0


def raise_to_floor(moved: Array) -> Array:
    """Raise each nonzero change to at least half of the root mean square of all changes.

    Few draws say little about a single element.

    Returns:
        change of each element.
    """
    if moved.size:
        typical = float(np.sqrt(np.mean(moved**2)))
    else:
        typical = 0.0
    return np.where(moved > 0, np.maximum(moved, _FLOOR * typical), 0.0)


@dataclass
class _Spread:
    """Changes of the elements in the draws so far.

    Attributes:
        moved: output -> largest change of each element, float32.
        width: factor by which the drawn roundings are wider than a step.
        runs: number of draws.
    """

    moved: dict[str, Array]
    width: float
    runs: int = 0

    @classmethod
    def of_outputs(cls, outputs: Arrays, width: float) -> Self:
        """Start without draws, for the floating-point outputs.

        Returns:
            a spread with zero changes.
        """
        floats = {name: value for name, value in outputs.items() if value.dtype.kind == "f"}
        return cls({name: np.zeros(value.shape, np.float32) for name, value in floats.items()}, width)

    def add(self, run: Arrays, center: Arrays) -> None:
        """Add one draw."""
        self.runs += 1
        for name, widest in self.moved.items():
            if run[name].shape == widest.shape:
                np.maximum(widest, absolute_difference(run[name], center[name], one_sided=0.0), out=widest)


@dataclass
class CaseBudget:
    """Error budget on one input.

    Attributes:
        run: function that evaluates the file with a draw of roundings.
        last_clipped: function that returns the quantized tensors that the last run clipped.
        calibrated: quantized tensors with trusted ranges.
        may_draw: function that returns whether there is time for more draws. It is not called before the first draws.
        clipped: quantized tensors that the file clips.
        cut: the file with clipping but without rounding, if only trusted ranges clip; otherwise None.
        center: the file without rounding of activations and without clipping.
        plain: the file with its own rounding and clipping.
    """

    run: Callable[[Arrays, RoundingDraw], RunResult]
    feeds: Arrays
    last_clipped: Callable[[], frozenset[str]] = frozenset
    calibrated: frozenset[str] = frozenset()
    may_draw: Callable[[], bool] = lambda: True
    clipped: frozenset[str] = field(init=False)
    cut: RunResult | None = field(init=False)
    center: RunResult = field(init=False)
    plain: RunResult = field(init=False)
    # Source of error -> draws of roundings, and draws of roundings that are 4 times as wide.
    _spread: dict[str, _Spread] = field(init=False)
    _wide: dict[str, _Spread] = field(init=False)

    def __post_init__(self) -> None:
        self.plain = self.run(self.feeds, RoundingDraw())
        self.clipped = self.last_clipped()
        by_calibration = bool(self.clipped) and self.clipped <= self.calibrated
        if by_calibration:
            self.cut = self.run(self.feeds, RoundingDraw("exact"))
        else:
            self.cut = None
        self.center = self.run(self.feeds, UNBOUNDED)
        self._spread = {source: _Spread.of_outputs(self.center, 1.0) for source in BOTH}
        self._wide = {source: _Spread.of_outputs(self.center, EAGER_MULTIPLE) for source in BOTH}
        self._run_more_draws(self._spread, BOTH, _RUNS)

    @property
    def float_outputs(self) -> Collection[str]:
        """Return the floating-point outputs."""
        return self._spread["weights"].moved

    def _run_draw(self, source: str, seed: int, width: float = 1.0) -> RunResult:
        if source == "weights":
            return self.run(self.feeds, RoundingDraw("exact", seed, clips=False, width=width))
        return self.run(self.feeds, RoundingDraw(seed, clips=False, width=width))

    def _run_more_draws(self, spreads: Mapping[str, _Spread], sources: Sequence[str], least: int = 1) -> None:
        """Double the number of draws, and make at least ``least``."""
        for source in sources:
            spread = spreads[source]
            for _ in range(max(spread.runs, least)):
                spread.add(self._run_draw(source, spread.runs, spread.width), self.center)

    def allowed_error(self, output: str, sources: tuple[str, ...], base: Array, error: Array | None = None) -> Array:
        """Compute the allowed error of each element.

        Args:
            sources: sources of error to allow, of ``BOTH``.
            base: allowed error without any quantization.
            error: actual error; more draws are made while it exceeds the bound. None for no more draws.

        Returns:
            the bound for each element.
        """
        if output not in self.float_outputs or self.center[output].shape != base.shape:
            return base
        bound = self._bound_of_elements(output, sources, base)
        if error is None:
            return bound
        first = self._spread[sources[0]]
        while first.runs < _MOST_RUNS and _is_undecided(error, bound) and self.may_draw():
            self._run_more_draws(self._spread, sources)
            bound = self._bound_of_elements(output, sources, base)
        if bool((error > bound).any()):
            bound = np.maximum(bound, self._wide_bound(output, sources, base, error))
        return bound

    def _wide_bound(self, output: str, sources: tuple[str, ...], base: Array, error: Array) -> Array:
        """Return the bound from draws that are `EAGER_MULTIPLE` times as wide. More draws are made while ``error``
        exceeds it.
        """
        while True:
            bound = np.asarray(base + sum(self._wide[source].moved[output].astype(np.float64) for source in sources))
            made = self._wide[sources[0]].runs
            outside = int((error > bound).sum())
            if not outside or made >= _MOST_WIDE or (made and outside > max(_FEW, error.size // 100)):
                return bound
            if not self.may_draw():
                return bound
            self._run_more_draws(self._wide, sources, _RUNS)

    def _bound_of_elements(self, output: str, sources: tuple[str, ...], base: Array) -> Array:
        total = np.zeros(base.shape)
        for source in sources:
            total += raise_to_floor(self._spread[source].moved[output].astype(np.float64))
        return np.asarray(base + EAGER_MULTIPLE * total)

    def sums_of_squares(self, output: str) -> tuple[float, float]:
        """Sum the squares of the steps' effect and of the output over the elements.

        Returns:
            (sum for the steps, sum for the output).
        """
        value = self.center[output]
        steps = sum(self._spread[source].moved[output].astype(np.float64) ** 2 for source in BOTH)
        return float(np.nansum(steps)), float(np.nansum(np.where(np.isfinite(value), value, 0.0) ** 2))

    def relative_error(self, output: str) -> float:
        """Compute the effect of the steps relative to the output (root mean squares).

        Returns:
            the ratio.
        """
        return _relative_size(*self.sums_of_squares(output))

    def explain_integers(self, output: str, value: Array) -> Array:
        """Find the integers that also result from one of the draws.

        Returns:
            mask of these elements.
        """
        right = np.zeros(value.shape, bool)
        for seed in range(_MOST_RUNS):
            for source in BOTH:
                run = self._run_draw(source, seed)[output]
                if run.shape == value.shape:
                    right |= run == value
            if right.all() or not self.may_draw():
                break
        return right


class UnroundedReference:
    """Quantized file that is the reference of another file. It is evaluated without rounding its activations."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        from ...runtimes.quantized_float64 import QuantizedRunner

        self._runner = QuantizedRunner(proto)
        self._answers: dict[tuple[str, bool], RunResult] = {}

    def answer_case(self, case: str, feeds: Arrays, clips: bool) -> RunResult:
        """Evaluate the reference on the input named ``case``.

        Args:
            clips: True to clip values to the ranges.

        Returns:
            the outputs.

        Raises:
            NormdeployError: a node can't be computed in float64.
        """
        if (case, clips) not in self._answers:
            self._answers[case, clips] = self._runner.run_with_draw(feeds, RoundingDraw("exact", clips=clips))
        return self._answers[case, clips]


class FileReplica(HeldRunner):
    """Runtime that evaluates the file itself in float64."""

    def __init__(self, budget: StepBudget, draw: RoundingDraw, name: str) -> None:
        self.name = name
        self._budget = budget
        self._draw = draw

    def infer(self, feeds: Arrays) -> RunResult:
        """Evaluate one input.

        Returns:
            the outputs by the model's names.

        Raises:
            RuntimeUnavailable: a node can't be computed in float64.
        """
        try:
            return self._budget.cached_answer(feeds, self._draw)
        except NormdeployError as error:
            raise RuntimeUnavailable(str(error)) from error
