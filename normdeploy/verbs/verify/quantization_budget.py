"""Compute the allowed error of a quantized file from the steps of its scales (its error budget).

    |value − reference| ≤ default bound + 4 · (a + w)

``w`` is how far an element moves if each stored weight lies anywhere within half a step of its code. ``a`` is how far
it moves if the grid of each activation quantizer shifts by a fraction of a step (`runtimes.quantized_float64`). Both
are the largest of a few draws, evaluated in float64. If half of their root mean square over the output is larger, that
counts instead, because few draws say little about a single element. More draws are made while an element exceeds its
bound. The factor 4 is the margin between two draws, as in `compare.error_bounds`.

Both are first order in the steps and follow every nonlinearity. An element that is still outside may be off by the
effect of roundings 4 times as wide. At a kink this exceeds 4 times the effect of one draw, which is zero for a ReLU
after a negative sum, or for a choice between two values.

The file is judged four times:

- in float64 without rounding activations: only w is allowed. Weights, scales or zero points that differ from the
  model's exceed it, and so does a DequantizeLinear that does not invert its QuantizeLinear. Ranges clip here too,
  because a range may act as a ReLU. Clipping is not rounding and has no budget, so a range that is too small exceeds
  it.
- in float64 with the file's rounding: a + w.
- in each runtime: a + w from the reference, and a from the file's own float64 evaluation. A value rounded to the other
  side counts as one step there.

A file that records the ranges of its calibration (`graphs.quantization_info.RECORD`) does not fail for inputs beyond
them. It is compared with the model without clipping and rounding. On inputs beyond the ranges, its rounded outputs are
compared with its own, clipped but not rounded. Clipped values are reported but not judged. The record must match the
file's scales; otherwise its ranges are judged as those of any file.

A file from another tool has no record. If a calibration on inputs like these could have given its ranges
(`StepBudget.trust_ranges`), they are trusted and the file is compared in the same way.

If 4 times the effect of the steps exceeds the output (root mean squares), zeros would pass too. The budget is then
meaningless and the file fails; only a metric can judge it.
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
# Most elements outside the bound (or 1 % of all) for which more draws are made.
_FEW = 8
# Multiple of the bound that more draws can't reach: the largest of 48 draws is about twice that of 3.
_HOPELESS = 4.0
_NAMED = 3
_USUAL = ("random", "given")
# Relative effect of the steps above which zeros would lie within the budget.
VOID = 1 / EAGER_MULTIPLE


class StepBudget:
    """Error budget of one quantized file.

    Attributes:
        calibrated: quantized tensors whose ranges are trusted as those of a calibration.
        altered: reason why a recorded range is not trusted; "" if all are.
        failure: reason why the budget can't be computed; None if it can.
        cut: inputs on which calibrated ranges clip values.
    """

    def __init__(self, subject: RenamedFile, calibrated: Collection[str] = (), altered: str = "") -> None:
        self._subject = subject
        self._runner: QuantizedRunner | None = None
        self._cases: dict[str, CaseBudget] = {}
        # Output -> sums of squares: effect of the steps, output.
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
        """Run the file as `infer` does, or reuse a result for these very ``feeds``.

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
            may_draw: returns whether there is time for more draws than the first ones.

        Returns:
            the budget; None if the file can't be evaluated, with the reason in ``failure``.
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
            # The user's inputs are those that the file will meet, so values clipped there count.
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

        A calibration sees at least one run, and its ranges hold all of that run. So each range must hold all of at
        least one random run here. Small runs are left out, because a wrong range may hold a few elements by chance.

        Returns:
            True if the ranges are trusted from now on.
        """
        if self.calibrated or self.altered or not self._random:
            return False
        enough = statistics.median(run.elements for run in self._random)
        clipped = [run.clipped for run in self._random if run.elements >= enough]
        # Zeros may be out of range too, for example a black image.
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
        """Note the inputs beyond the calibrated ranges.

        Returns:
            a note, or None if nothing was clipped.
        """
        if not self.cut:
            return None
        reached = sorted(self.list_saturations(), key=lambda s: -s.beyond)
        named = "; ".join(map(str, reached[:1])) + (f"; {len(reached) - 1} more" if len(reached) > 1 else "")
        return (
            f"{label}: {len(self.cut)} of {len(self._cases)} inputs lie beyond the calibrated ranges ({named}). What is"
            " cut off there is not judged; give inputs that the model will meet (--inputs), or a metric"
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
            a reason, or None if the numbers alone explain it.
        """
        altered = "a weight, a scale or a zero point is not the model's (bisect finds which)"
        clipped = sorted(self.list_saturations(), key=lambda s: -s.beyond)
        if clipped:
            named = "; ".join(map(str, clipped[:_NAMED]))
            if len(clipped) > _NAMED:
                more = f"; {len(clipped) - _NAMED} more saturate"
            else:
                more = ""
            advice = "calibrate on inputs like these, or give inputs like those of the calibration"
            return f"{named}{more}; {advice}" + (f"; or {altered}" if runtime == UNROUNDED else "")
        if runtime == UNROUNDED:
            return f"no rounding of activations is in this: {altered}"
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
    """Raise each nonzero movement to at least half of their root mean square.

    Few draws say little about a single element.

    Returns:
        movement of each element.
    """
    if moved.size:
        typical = float(np.sqrt(np.mean(moved**2)))
    else:
        typical = 0.0
    return np.where(moved > 0, np.maximum(moved, _FLOOR * typical), 0.0)


@dataclass
class _Spread:
    """Movement of the elements over the draws so far.

    Attributes:
        moved: output -> largest movement of each element, float32.
        width: factor on the width of the drawn roundings.
        runs: number of draws.
    """

    moved: dict[str, Array]
    width: float
    runs: int = 0

    @classmethod
    def of_outputs(cls, outputs: Arrays, width: float) -> Self:
        """Start without draws, for the floating-point outputs.

        Returns:
            a spread with zero movements.
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
        run: evaluates the file with a draw.
        last_clipped: returns the quantized tensors that the last run clipped.
        calibrated: quantized tensors with trusted ranges.
        may_draw: returns whether there is time; called before all draws but the first ones.
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
    # By source of error: draws of the steps, and draws 4 times as wide.
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
        """Return the bound from draws `EAGER_MULTIPLE` times as wide; more are made while ``error`` exceeds it."""
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
        """Find the integers that some draw gives too.

        Returns:
            mask of the explained elements.
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
    """Quantized file as the reference of another, evaluated without rounding its activations."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        from ...runtimes.quantized_float64 import QuantizedRunner

        self._runner = QuantizedRunner(proto)
        self._answers: dict[tuple[str, bool], RunResult] = {}

    def answer_case(self, case: str, feeds: Arrays, clips: bool) -> RunResult:
        """Evaluate the reference on the input named ``case``.

        Args:
            clips: clip to the ranges.

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
