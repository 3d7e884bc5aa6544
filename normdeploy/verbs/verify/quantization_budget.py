"""What a quantized file may be off by: the error budget that follows from the steps of its scales.

    |value − reference| ≤ default bound + 4 · (a + w)

``w`` and ``a`` are how far an element moves where the file is evaluated in float64 with each stored weight anywhere in
the half step around its code, and with the grid of each quantizer of data shifted by a part of a step
(`runtimes.quantized_float64`): the largest of a few draws, or half of the output's root mean square of these where that
is more, because few draws tell little of a single element; more are made while something lies outside. The 4 is the
room between two draws, as in ``bounds``. Both are first order in the steps, and follow every nonlinearity. What still
lies outside
is allowed what 4 times these roundings make of it, which at a kink is more than 4 times what a draw makes: nothing of
ReLU behind a negative sum, or of a choice between two values.

The file is judged four times:

- in float64 with no activation rounded: only w is allowed. Weights, scales or zero points that are not the model's, and
  a DequantizeLinear that is not the inverse of its QuantizeLinear, leave it. Ranges clip here too, as they do for ReLU;
  clipping is no rounding and has no budget, so that a range that is too small leaves it.
- in float64, rounded as the file says: a + w.
- in each runtime: a + w from the reference, and a from the file's own float64, where a value that is rounded to the
  other side is one step.

A file that records what ranges calibration gave (`graphs.quantization_info.RECORD`) is no worse for inputs beyond them.
There it is held against the model without any ends of ranges, and rounded against itself with ends and without
rounding; what the ends cut off is told, and judged by nothing. The record has to be what the file's scales say, or else
ranges are judged as those of any file.

A file of another tool records none. Its ranges are taken for those of a calibration where one on inputs like these can
have given them (`StepBudget.trust_ranges`), and it is held as above.

Where the budget is larger than the output (root mean squares), zeros would lie in it as well. It says nothing then, and
the file fails: only a metric can tell what it is worth.
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
# activations are not rounded, and ranges have no ends
UNBOUNDED = RoundingDraw("exact", clips=False)
_FLOOR = 0.5
_RUNS = 3
_MOST_RUNS = 48
_MOST_WIDE = 12
# elements that lie outside, or a hundredth of all, for which more draws are made
_FEW = 8
# times a bound, which no number of draws makes up: the largest of 48 is some twice that of 3
_HOPELESS = 4.0
_NAMED = 3
_USUAL = ("random", "given")
# of the output, from which on zeros would lie in the budget
VOID = 1 / EAGER_MULTIPLE


class StepBudget:
    """Of one quantized file.

    ``calibrated``: what quantizers make whose ranges are taken for those of a calibration; ``altered``: why one is not.
    """

    def __init__(self, subject: RenamedFile, calibrated: Collection[str] = (), altered: str = "") -> None:
        self._subject = subject
        self._runner: QuantizedRunner | None = None
        self._cases: dict[str, CaseBudget] = {}
        # output -> squares of what the steps do, of the output
        self._sums: dict[str, list[float]] = {}
        self._last: tuple[Arrays, RoundingDraw, RunResult] | None = None
        # why there is none
        self.failure: str | None = None
        self.calibrated = frozenset(calibrated)
        self.altered = altered
        # inputs of which something lies beyond the calibrated ranges
        self.cut: list[str] = []
        self._random: list[_RandomRun] = []

    def infer(self, feeds: Arrays, draw: RoundingDraw) -> RunResult:
        """One run, by the model's names.

        Raises:
            NormdeployError: a node can't be computed in float64.
        """
        if self._runner is None:
            from ...runtimes.quantized_float64 import QuantizedRunner

            self._runner = QuantizedRunner(rewrite_as_dequantize(load_onnx(self._subject.path)))
        return self._subject.model_results(self._runner.run_with_draw(self._subject.own_feeds(feeds), draw))

    def cached_answer(self, feeds: Arrays, draw: RoundingDraw) -> RunResult:
        """`infer`, or what a budget on these very ``feeds`` or the call before has of it already.

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
        """The budget on one input; None where the file can't be evaluated, which ``failure`` says.

        ``may_draw``: whether there is time for more draws than the first.
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
            # Inputs that a user gives are those that the file will meet: what is cut off there counts.
            if kind == "random":
                elements = sum(value.size for value in feeds.values())
                self._random.append(_RandomRun(elements, self._cases[case].clipped))
            if kind in _USUAL:
                for name in self._cases[case].float_outputs:
                    sums = self._sums.setdefault(name, [0.0, 0.0])
                    sums[:] = (a + b for a, b in zip(sums, self._cases[case].sums_of_squares(name), strict=True))
        return self._cases[case]

    def _clipped_tensors(self) -> frozenset[str]:
        """What the last run, as the file says, cut off."""
        if self._runner is not None:
            return self._runner.clipped_tensors()
        return frozenset()

    def trust_ranges(self) -> bool:
        """Take the ranges for those of a calibration, if one on inputs like these can have given them; whether it can.

        A calibration sees at least one run, and the range that it gives holds all of that run. So each range must hold
        all of one of the random runs here. Small runs are left out: a wrong range holds few elements by chance.
        """
        if self.calibrated or self.altered or not self._random:
            return False
        enough = statistics.median(run.elements for run in self._random)
        clipped = [run.clipped for run in self._random if run.elements >= enough]
        # Zeros may lie outside too, as a black image does.
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
        """What the calibrated ranges cut off, None where nothing."""
        if not self.cut:
            return None
        reached = sorted(self.list_saturations(), key=lambda s: -s.beyond)
        named = "; ".join(map(str, reached[:1])) + (f"; {len(reached) - 1} more" if len(reached) > 1 else "")
        return (
            f"{label}: {len(self.cut)} of {len(self._cases)} inputs lie beyond the calibrated ranges ({named}). What is"
            " cut off there is not judged; give inputs that the model will meet (--inputs), or a metric"
        )

    def relative_error(self, output: str) -> float | None:
        """What the steps alone move the output by over its size, root mean squares; None of integers."""
        if output not in self._sums:
            return None
        return _relative_size(*self._sums[output])

    def list_saturations(self) -> list[Saturation]:
        if self._runner is None:
            return []
        return [s for s in self._runner.list_saturations() if s]

    def explain_failure(self, runtime: str) -> str | None:
        """Return what a row that fails is told beside its numbers."""
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
    """``elements``: of the inputs; ``clipped``: what the file cuts off there."""

    elements: int
    clipped: frozenset[str]


def _is_undecided(error: Array, bound: Array) -> bool:
    """Whether more draws may yet bring what lies outside within."""
    return bool((error > bound).any()) and not bool((error > _HOPELESS * bound).any())


def _relative_size(steps: float, size: float) -> float:
    if size:
        return float(np.sqrt(steps / size))
    if steps:
        return float("inf")
    return 0.0


def raise_to_floor(moved: Array) -> Array:
    """Return how far elements move, each at least half of the root mean square of all: few draws say little of one."""
    if moved.size:
        typical = float(np.sqrt(np.mean(moved**2)))
    else:
        typical = 0.0
    return np.where(moved > 0, np.maximum(moved, _FLOOR * typical), 0.0)


@dataclass
class _Spread:
    """``moved``: output -> how far its elements move at most in the draws so far, float32."""

    moved: dict[str, Array]
    width: float
    runs: int = 0

    @classmethod
    def of_outputs(cls, outputs: Arrays, width: float) -> Self:
        """Start without a draw, for the floating outputs."""
        floats = {name: value for name, value in outputs.items() if value.dtype.kind == "f"}
        return cls({name: np.zeros(value.shape, np.float32) for name, value in floats.items()}, width)

    def add(self, run: Arrays, center: Arrays) -> None:
        """Take one more draw in."""
        self.runs += 1
        for name, widest in self.moved.items():
            if run[name].shape == widest.shape:
                np.maximum(widest, absolute_difference(run[name], center[name], one_sided=0.0), out=widest)


@dataclass
class CaseBudget:
    """On one input: ``center`` is the file without rounding of activations and without ends of ranges, ``plain`` as it
    says. ``cut``: where calibrated ranges cut something off, the file without rounding but with these ends.
    ``may_draw``: asked before all draws but the first."""

    run: Callable[[Arrays, RoundingDraw], RunResult]
    feeds: Arrays
    last_clipped: Callable[[], frozenset[str]] = frozenset
    calibrated: frozenset[str] = frozenset()
    may_draw: Callable[[], bool] = lambda: True
    # what the file cuts off, by the names that quantizers make
    clipped: frozenset[str] = field(init=False)
    cut: RunResult | None = field(init=False)
    center: RunResult = field(init=False)
    plain: RunResult = field(init=False)
    # by source: draws of the steps, and of 4 times these
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
        """The outputs that steps move by a part of themselves."""
        return self._spread["weights"].moved

    def _run_draw(self, source: str, seed: int, width: float = 1.0) -> RunResult:
        if source == "weights":
            return self.run(self.feeds, RoundingDraw("exact", seed, clips=False, width=width))
        return self.run(self.feeds, RoundingDraw(seed, clips=False, width=width))

    def _run_more_draws(self, spreads: Mapping[str, _Spread], sources: Sequence[str], least: int = 1) -> None:
        """Draw as often again as before, and ``least`` times at least."""
        for source in sources:
            spread = spreads[source]
            for _ in range(max(spread.runs, least)):
                spread.add(self._run_draw(source, spread.runs, spread.width), self.center)

    def allowed_error(self, output: str, sources: tuple[str, ...], base: Array, error: Array | None = None) -> Array:
        """The largest error of each element that passes; ``base``: without any quantization. More draws are made while
        ``error`` is not within."""
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
        """What draws of `EAGER_MULTIPLE` times the width allow; more of them are made while ``error`` is not within."""
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
        """Sums over the elements: of what the steps do, and of the output."""
        value = self.center[output]
        steps = sum(self._spread[source].moved[output].astype(np.float64) ** 2 for source in BOTH)
        return float(np.nansum(steps)), float(np.nansum(np.where(np.isfinite(value), value, 0.0) ** 2))

    def relative_error(self, output: str) -> float:
        """What the steps move the output by over its size, root mean squares."""
        return _relative_size(*self.sums_of_squares(output))

    def explain_integers(self, output: str, value: Array) -> Array:
        """Which integers some draw gives too."""
        right = np.zeros(value.shape, bool)
        for seed in range(_MOST_RUNS):
            for source in BOTH:
                run = self._run_draw(source, seed)[output]
                if run.shape == value.shape:
                    right |= run == value
                else:
                    right |= False
            if right.all() or not self.may_draw():
                break
        return right


class UnroundedReference:
    """A quantized file as the reference of another: what it says without rounding its activations."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        from ...runtimes.quantized_float64 import QuantizedRunner

        self._runner = QuantizedRunner(proto)
        self._answers: dict[tuple[str, bool], RunResult] = {}

    def answer_case(self, case: str, feeds: Arrays, clips: bool) -> RunResult:
        """On the input called ``case``; ``clips``: at the ends of its ranges.

        Raises:
            NormdeployError: a node can't be computed in float64.
        """
        if (case, clips) not in self._answers:
            self._answers[case, clips] = self._runner.run_with_draw(feeds, RoundingDraw("exact", clips=clips))
        return self._answers[case, clips]


class FileReplica(HeldRunner):
    """The file in float64 as a runtime of its own; ``types``: of the model's outputs."""

    def __init__(self, budget: StepBudget, draw: RoundingDraw, name: str) -> None:
        self.name = name
        self._budget = budget
        self._draw = draw

    def infer(self, feeds: Arrays) -> RunResult:
        """
        Raises:
            RuntimeUnavailable: a node can't be computed in float64.
        """
        try:
            return self._budget.cached_answer(feeds, self._draw)
        except NormdeployError as error:
            raise RuntimeUnavailable(str(error)) from error
