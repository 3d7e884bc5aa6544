"""Collect the errors of each runtime in tallies: one for each output and kind of case, next to that of eager mode."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import ml_dtypes
import numpy as np

from ...compare.error_bounds import ErrorBounds
from ...compare.error_tally import ErrorTally
from ...compare.policy import Policy
from ...graphs.qoperator_expansion import unexpandable_ops
from ...graphs.quantization_info import is_quantized
from ...inputs.input_cases import DATASET, NONFINITE
from ...runtimes import RunResult
from ...types import Array
from .case_answers import CaseAnswer
from .compute_budget import BudgetClock
from .output_results import KINDS, kind_rank
from .quantization_budget import AGAINST, ROUNDED, UNROUNDED, CaseBudget, UnroundedReference
from .reference_models import FileModel, Original
from .runtime_candidates import RuntimeCandidate


class RuntimeTallies:
    """Fill the error tallies of runtimes.

    Attributes:
        eager: eager mode, or another correct evaluation in the model's own type.
        policy: rules given by the user.
        ratios: output -> error of eager mode in units (`normdeploy.compare.error_bounds`).
    """

    def __init__(self, model: Original, eager: RuntimeCandidate, policy: Policy, clock: BudgetClock) -> None:
        self.model = model
        self.eager = eager
        self.policy = policy
        self.ratios: dict[str, float] = {}
        self._clock = clock
        self._unrounded = None
        if isinstance(model, FileModel) and is_quantized(model.proto) and not unexpandable_ops(model.proto):
            self._unrounded = UnroundedReference(model.proto)

    @property
    def rules_decide(self) -> bool:
        """Return whether given rules decide on every output, so that the default rule decides on no output."""
        return not self.policy.required and all(self.policy.rules_for(output) for output in self.model.outputs)

    def skips_step_budget(self, candidate: RuntimeCandidate) -> bool:
        """Check whether only given rules decide on a quantized file.

        The error budget of the file, which takes dozens of runs in float64, is then not computed.

        Returns:
            True if the budget is not needed.
        """
        return self.rules_decide and candidate.subject is not None and candidate.subject.steps is not None

    def dtype_of(self, output: str) -> np.dtype:
        """Return the dtype of an output in eager mode."""
        # Each kind is looked up, because a search through all tallies for each output and input would be slow.
        return next(tally.dtype for kind in KINDS if (tally := self.eager.tallies.get((output, kind))) is not None)

    def eager_tally(self, output: str, kind: str) -> ErrorTally:
        """Return the tally of eager mode for an output and kind of case.

        ``kind`` has the suffix `AGAINST` if the errors are against the file's own float64 evaluation. Eager mode has
        only the tally of the kind without this suffix.
        """
        return self.eager.tallies[output, kind.removesuffix(AGAINST)]

    def has_wrong_output(self, candidate: RuntimeCandidate, outputs: Collection[str]) -> bool:
        """Check whether one of ``outputs`` has failed on an input so far.

        Returns:
            True if an error in one of their tallies exceeds the allowed error.
        """
        return any(
            tally.failure_ratio(self.eager_tally(*key)) > 1
            for key, tally in candidate.tallies.items()
            if key[0] in outputs
        )

    def failing_outputs(self, candidate: RuntimeCandidate) -> set[str]:
        """Return the outputs that have failed on an input so far."""
        return {
            output
            for (output, kind), tally in candidate.tallies.items()
            if tally.failure_ratio(self.eager_tally(output, kind)) > 1
        }

    def has_time_for_draws(self, case: str, seconds: float = 0.0) -> bool:
        """Check whether time is left for more random roundings. If not, record the case as undecided.

        Args:
            seconds: time that one draw takes.

        Returns:
            True if there is time.
        """
        if self._clock.has_time(seconds):
            return True
        self._clock.undecided[case] = None
        return False

    def measure_rules(self, candidate: RuntimeCandidate, answer: CaseAnswer, result: RunResult) -> None:
        """Measure the given rules on each output of one input."""
        for output in self.model.outputs:
            candidate.measures.add(
                output, answer.case, result.get(output), answer.reference[output], self.dtype_of(output)
            )

    def tally_result(self, candidate: RuntimeCandidate, answer: CaseAnswer, result: RunResult) -> None:
        """Add the outputs of one input to the tallies and to the measures of the given rules."""
        self.measure_rules(candidate, answer, result)
        self.tally_errors(candidate, answer, result)

    def tally_errors(
        self, candidate: RuntimeCandidate, answer: CaseAnswer, result: RunResult, *, draws: bool = True
    ) -> None:
        """Add the outputs of one input to the tallies.

        Args:
            draws: True to draw more random roundings before an output fails.
        """
        steps = self._step_budget(candidate, answer)
        for output in self.model.outputs if answer.case.kind != DATASET else ():
            dtype = self.dtype_of(output)
            if dtype.kind in "iub" and answer.case.kind in NONFINITE:
                # Indices and comparisons that result from non-finite numbers are undefined, so they are not judged.
                continue
            tally = candidate.tallies.setdefault((output, answer.case.kind), ErrorTally(dtype))
            if steps is not None and answer.bounds is not None:
                self._tally_quantized(candidate, answer, output, result.get(output), steps)
                continue
            if self.skips_step_budget(candidate):
                bounds = None
            else:
                bounds = answer.bounds
            open_ = draws and not self._has_failed_already(candidate, output, answer.case.kind)
            tally.add(
                answer.case.name,
                result.get(output),
                answer.reference[output],
                partial(answer.ties.explain_elements, output, draws=open_),
                bound=None if bounds is None else partial(self._allowed_error, bounds, output, draws=open_),
                peer=None if answer.eager is None else answer.eager[output],
            )

    def _has_failed_already(self, candidate: RuntimeCandidate, output: str, kind: str) -> bool:
        """Return whether an output has already failed on this kind of input or on a more ordinary kind.

        Its verdict is then decided, and more random roundings can't change it. For a wrong file, these roundings would
        take most of the time: dozens of runs in float64 for each input.
        """
        return any(
            tally.failure_ratio(self.eager_tally(output, failing)) > 1
            for failing in (*KINDS, *(kind + AGAINST for kind in KINDS))
            if kind_rank(failing) <= kind_rank(kind) and (tally := candidate.tallies.get((output, failing))) is not None
        )

    def _allowed_error(self, bounds: ErrorBounds, output: str, error: Array, *, draws: bool) -> Array:
        return bounds.allowed_error(output, self.ratios.get(output, 1.0), error if draws else None)

    def _step_budget(self, candidate: RuntimeCandidate, answer: CaseAnswer) -> CaseBudget | None:
        """Return the error budget of a quantized file on this input; None for other files."""
        if candidate.subject is None or candidate.subject.steps is None or answer.case.kind == DATASET:
            return None
        if self.skips_step_budget(candidate):
            return None
        may_draw = partial(self.has_time_for_draws, answer.case.name)
        return candidate.subject.steps.case_budget(answer.case.name, answer.case.kind, answer.feeds, may_draw)

    def _tally_quantized(
        self, candidate: RuntimeCandidate, answer: CaseAnswer, output: str, value: Array | None, steps: CaseBudget
    ) -> None:
        """Add the errors of a quantized file against the reference, and in runtimes also against its float64
        evaluation.
        """
        assert answer.bounds is not None
        case = answer.case
        dtype = self.dtype_of(output)
        floating = dtype.kind not in "iub"
        if floating:
            base = answer.bounds.allowed_error(output, self.ratios.get(output, 1.0))
        else:
            base = np.zeros(())
        open_ = not self._has_failed_already(candidate, output, case.kind)
        if self._unrounded is not None and candidate.name == UNROUNDED and base.size:
            # The allowed error was computed for the reference with rounding. An element of this reference may be 0
            # although it is not 0 without rounding. So every element gets the largest allowed error, or the rounding to
            # the output's type if that is larger.
            right = np.abs(self._quantized_reference(candidate, answer, steps)[output].astype(np.float64))
            base = np.maximum(base.max(), np.nan_to_num(right, posinf=0.0) * float(ml_dtypes.finfo(dtype).eps))
        candidate.tallies[output, case.kind].add(
            case.name,
            value,
            self._quantized_reference(candidate, answer, steps)[output],
            lambda v: (
                answer.ties.explain_elements(output, v, draws=open_)
                | (steps.explain_integers(output, v) if open_ else False)
            ),
            bound=(lambda error: steps.allowed_error(output, candidate.sources, base, error if open_ else None))
            if floating
            else None,
        )
        if not floating or candidate.name in (ROUNDED, UNROUNDED):
            return
        own = candidate.tallies.setdefault((output, case.kind + AGAINST), ErrorTally(dtype))
        open_against = not self._has_failed_already(candidate, output, case.kind + AGAINST)
        own.add(
            case.name + AGAINST,
            value,
            steps.plain[output],
            lambda v: v == steps.plain[output],
            bound=lambda error: steps.allowed_error(output, ("activations",), base, error if open_against else None),
        )

    def _quantized_reference(self, candidate: RuntimeCandidate, answer: CaseAnswer, steps: CaseBudget) -> RunResult:
        """Return the outputs that a quantized file is compared with.

        This is usually the reference. If trusted ranges of the file clip values, it is the file itself, clipped but not
        rounded. If the file is evaluated without rounding, a quantized reference is also evaluated without rounding.
        """
        if candidate.name != UNROUNDED:
            if steps.cut is None:
                return answer.reference
            return steps.cut
        if self._unrounded is None:
            return answer.reference
        clips = candidate.subject is None or candidate.subject.steps is None or not candidate.subject.steps.calibrated
        return self._unrounded.answer_case(answer.case.name, answer.feeds, clips)
