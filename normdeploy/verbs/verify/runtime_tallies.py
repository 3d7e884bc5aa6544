"""What each runtime gives, output by output, beside eager and the reference."""

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
    """Fills the tallies of runtimes.

    ``eager``: one correct evaluation in the model's type. ``policy``: rules that were given. ``ratios``: how many units
    eager needs, by output (`normdeploy.compare.error_bounds`). ``clock``: what all of it may take.
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
        """Whether rules that were given decide on every output, and the default rule on none."""
        return not self.policy.required and all(self.policy.rules_for(output) for output in self.model.outputs)

    def skips_step_budget(self, candidate: RuntimeCandidate) -> bool:
        """Whether a file is quantized and rules decide on it: what its steps may do, which takes dozens of runs in
        float64, is then not asked."""
        return self.rules_decide and candidate.subject is not None and candidate.subject.steps is not None

    def dtype_of(self, output: str) -> np.dtype:
        """Return the type of an output, as eager gives it."""
        # Not by a search: each of many outputs is asked for, on each input.
        return next(tally.dtype for kind in KINDS if (tally := self.eager.tallies.get((output, kind))) is not None)

    def eager_tally(self, output: str, kind: str) -> ErrorTally:
        """Eager's tally of the kind of cases that a tally is of."""
        return self.eager.tallies[output, kind.removesuffix(AGAINST)]

    def has_wrong_output(self, candidate: RuntimeCandidate, outputs: Collection[str]) -> bool:
        """Return whether one of ``outputs`` is wrong on an input that was run."""
        return any(
            tally.failure_ratio(self.eager_tally(*key)) > 1
            for key, tally in candidate.tallies.items()
            if key[0] in outputs
        )

    def has_time_for_draws(self, case: str, seconds: float = 0.0) -> bool:
        """Return whether there is time for more roundings, each of some seconds; where there is none, the case is
        noted."""
        if self._clock.has_time(seconds):
            return True
        self._clock.undecided[case] = None
        return False

    def measure_rules(self, candidate: RuntimeCandidate, answer: CaseAnswer, result: RunResult) -> None:
        for output in self.model.outputs:
            candidate.measures.add(
                output, answer.case, result.get(output), answer.reference[output], self.dtype_of(output)
            )

    def tally_result(self, candidate: RuntimeCandidate, answer: CaseAnswer, result: RunResult) -> None:
        self.measure_rules(candidate, answer, result)
        steps = self._step_budget(candidate, answer)
        for output in self.model.outputs if answer.case.kind != DATASET else ():
            dtype = self.dtype_of(output)
            if dtype.kind in "iub" and answer.case.kind in NONFINITE:
                # what an index or a comparison is there, nothing defines
                continue
            tally = candidate.tallies.setdefault((output, answer.case.kind), ErrorTally(dtype))
            if steps is not None and answer.bounds is not None:
                self._tally_quantized(candidate, answer, output, result.get(output), steps)
                continue
            if self.skips_step_budget(candidate):
                bounds = None
            else:
                bounds = answer.bounds
            open_ = not self._has_failed_already(candidate, output, answer.case.kind)
            tally.add(
                answer.case.name,
                result.get(output),
                answer.reference[output],
                partial(answer.ties.explain_elements, output, draws=open_),
                bound=None if bounds is None else partial(self._allowed_error, bounds, output, draws=open_),
                peer=None if answer.eager is None else answer.eager[output],
            )

    def _has_failed_already(self, candidate: RuntimeCandidate, output: str, kind: str) -> bool:
        """Return whether an output fails already on a kind of input that is as plain, and speaks for it.

        Draws of roundings can't change its verdict then. They took most of the time of a wrong file: dozens of runs in
        float64 for each input.
        """
        return any(
            tally.failure_ratio(self.eager_tally(output, failing)) > 1
            for failing in (*KINDS, *(kind + AGAINST for kind in KINDS))
            if kind_rank(failing) <= kind_rank(kind) and (tally := candidate.tallies.get((output, failing))) is not None
        )

    def _allowed_error(self, bounds: ErrorBounds, output: str, error: Array, *, draws: bool) -> Array:
        return bounds.allowed_error(output, self.ratios.get(output, 1.0), error if draws else None)

    def _step_budget(self, candidate: RuntimeCandidate, answer: CaseAnswer) -> CaseBudget | None:
        """What the steps of a quantized file allow on this input; None of other files."""
        if candidate.subject is None or candidate.subject.steps is None or answer.case.kind == DATASET:
            return None
        if self.skips_step_budget(candidate):
            return None
        may_draw = partial(self.has_time_for_draws, answer.case.name)
        return candidate.subject.steps.case_budget(answer.case.name, answer.case.kind, answer.feeds, may_draw)

    def _tally_quantized(
        self, candidate: RuntimeCandidate, answer: CaseAnswer, output: str, value: Array | None, steps: CaseBudget
    ) -> None:
        """Against the reference, and of a runtime against the file's own float64 too."""
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
            # Where the rounded reference is 0, this one need not be, and is rounded to the output's type.
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
        """What a quantized file is held against: the reference; where its ranges cut something off, itself with these
        ends alone. Without rounding, a reference that is quantized itself is not rounded either."""
        if candidate.name != UNROUNDED:
            if steps.cut is None:
                return answer.reference
            return steps.cut
        if self._unrounded is None:
            return answer.reference
        clips = candidate.subject is None or candidate.subject.steps is None or not candidate.subject.steps.calibrated
        return self._unrounded.answer_case(answer.case.name, answer.feeds, clips)
