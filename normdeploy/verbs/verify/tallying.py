"""What each runtime gives, output by output, beside eager and the reference."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import ml_dtypes
import numpy as np

from ...compare.bounds import Bounds
from ...compare.tally import Tally
from ...graphs.qoperators import sealed
from ...graphs.quantized import is_quantized
from ...runtimes import RunResult
from .answers import Answer
from .candidates import Candidate
from .cases import DATASET, NONFINITE
from .originals import FileModel, Original
from .policy import Policy
from .results import KINDS, plainness
from .spending import Clock
from .steps import AGAINST, ROUNDED, UNROUNDED, CaseBudget, UnroundedReference


class Tallying:
    """Fills the tallies of runtimes.

    ``eager``: one correct evaluation in the model's type. ``policy``: rules that were given. ``ratios``: how many units
    eager needs, by output (`normdeploy.compare.bounds`). ``clock``: what all of it may take.
    """

    def __init__(self, model: Original, eager: Candidate, policy: Policy, clock: Clock) -> None:
        self.model, self.eager, self.policy = model, eager, policy
        self.ratios: dict[str, float] = {}
        self._clock = clock
        self._unrounded = None
        if isinstance(model, FileModel) and is_quantized(model.proto) and not sealed(model.proto):
            self._unrounded = UnroundedReference(model.proto)

    @property
    def rules_decide(self) -> bool:
        """Whether rules that were given decide on every output, and the default rule on none."""
        return not self.policy.required and all(self.policy.of(output) for output in self.model.outputs)

    def by_rules_alone(self, candidate: Candidate) -> bool:
        """Whether a file is quantized and rules decide on it: what its steps may do, which takes dozens of runs in
        float64, is then not asked."""
        return self.rules_decide and candidate.subject is not None and candidate.subject.steps is not None

    def dtype_of(self, output: str) -> np.dtype:
        """Return the type of an output, as eager gives it."""
        # Not by a search: each of many outputs is asked for, on each input.
        return next(tally.dtype for kind in KINDS if (tally := self.eager.tallies.get((output, kind))) is not None)

    def eager_tally(self, output: str, kind: str) -> Tally:
        """Eager's tally of the kind of cases that a tally is of."""
        return self.eager.tallies[output, kind.removesuffix(AGAINST)]

    def fails(self, candidate: Candidate, outputs: Collection[str]) -> bool:
        """Return whether one of ``outputs`` is wrong on an input that was run."""
        return any(
            tally.badness(self.eager_tally(*key)) > 1 for key, tally in candidate.tallies.items() if key[0] in outputs
        )

    def may_draw(self, case: str, seconds: float = 0.0) -> bool:
        """Return whether there is time for more roundings, each of some seconds; where there is none, the case is
        noted."""
        if self._clock.has(seconds):
            return True
        self._clock.undecided[case] = None
        return False

    def measure(self, candidate: Candidate, answer: Answer, result: RunResult) -> None:
        for output in self.model.outputs:
            candidate.measures.add(
                output, answer.case, result.get(output), answer.reference[output], self.dtype_of(output)
            )

    def keep(self, candidate: Candidate, answer: Answer, result: RunResult) -> None:
        self.measure(candidate, answer, result)
        steps = self._steps(candidate, answer)
        for output in self.model.outputs if answer.case.kind != DATASET else ():
            dtype = self.dtype_of(output)
            if dtype.kind in "iub" and answer.case.kind in NONFINITE:
                continue  # what an index or a comparison is there, nothing defines
            tally = candidate.tallies.setdefault((output, answer.case.kind), Tally(dtype))
            if steps is not None and answer.bounds is not None:
                self._keep_quantized(candidate, answer, output, result.get(output), steps)
                continue
            bounds = None if self.by_rules_alone(candidate) else answer.bounds
            open_ = not self._is_settled(candidate, output, answer.case.kind)
            tally.add(
                answer.case.name,
                result.get(output),
                answer.reference[output],
                partial(answer.ties.explained, output, draws=open_),
                bound=None if bounds is None else partial(self._allowed, bounds, output, draws=open_),
                peer=None if answer.eager is None else answer.eager[output],
            )

    def _is_settled(self, candidate: Candidate, output: str, kind: str) -> bool:
        """Return whether an output fails already on a kind of input that is as plain, and speaks for it.

        Draws of roundings can't change its verdict then. They took most of the time of a wrong file: dozens of runs in
        float64 for each input.
        """
        return any(
            tally.badness(self.eager_tally(output, failing)) > 1
            for failing in (*KINDS, *(kind + AGAINST for kind in KINDS))
            if plainness(failing) <= plainness(kind) and (tally := candidate.tallies.get((output, failing))) is not None
        )

    def _allowed(self, bounds: Bounds, output: str, error: np.ndarray, *, draws: bool) -> np.ndarray:
        return bounds.allowed(output, self.ratios.get(output, 1.0), error if draws else None)

    def _steps(self, candidate: Candidate, answer: Answer) -> CaseBudget | None:
        """What the steps of a quantized file allow on this input; None of other files."""
        if candidate.subject is None or candidate.subject.steps is None or answer.case.kind == DATASET:
            return None
        if self.by_rules_alone(candidate):
            return None
        may_draw = partial(self.may_draw, answer.case.name)
        return candidate.subject.steps.of(answer.case.name, answer.case.kind, answer.feeds, may_draw)

    def _keep_quantized(
        self, candidate: Candidate, answer: Answer, output: str, value: np.ndarray | None, steps: CaseBudget
    ) -> None:
        """Against the reference, and of a runtime against the file's own float64 too."""
        assert answer.bounds is not None
        case, dtype = answer.case, self.dtype_of(output)
        floating = dtype.kind not in "iub"
        base = answer.bounds.allowed(output, self.ratios.get(output, 1.0)) if floating else np.zeros(())
        open_ = not self._is_settled(candidate, output, case.kind)
        if self._unrounded is not None and candidate.name == UNROUNDED and base.size:
            # Where the rounded reference is 0, this one need not be, and is rounded to the output's type.
            right = np.abs(self._right(candidate, answer, steps)[output].astype(np.float64))
            base = np.maximum(base.max(), np.nan_to_num(right, posinf=0.0) * float(ml_dtypes.finfo(dtype).eps))
        candidate.tallies[output, case.kind].add(
            case.name,
            value,
            self._right(candidate, answer, steps)[output],
            lambda v: answer.ties.explained(output, v, draws=open_) | (steps.explained(output, v) if open_ else False),
            bound=(lambda error: steps.allowed(output, candidate.sources, base, error if open_ else None))
            if floating
            else None,
        )
        if not floating or candidate.name in (ROUNDED, UNROUNDED):
            return
        own = candidate.tallies.setdefault((output, case.kind + AGAINST), Tally(dtype))
        open_against = not self._is_settled(candidate, output, case.kind + AGAINST)
        own.add(
            case.name + AGAINST,
            value,
            steps.plain[output],
            lambda v: v == steps.plain[output],
            bound=lambda error: steps.allowed(output, ("activations",), base, error if open_against else None),
        )

    def _right(self, candidate: Candidate, answer: Answer, steps: CaseBudget) -> RunResult:
        """What a quantized file is held against: the reference; where its ranges cut something off, itself with these
        ends alone. Without rounding, a reference that is quantized itself is not rounded either."""
        if candidate.name != UNROUNDED:
            return answer.reference if steps.cut is None else steps.cut
        if self._unrounded is None:
            return answer.reference
        clips = candidate.subject is None or candidate.subject.steps is None or not candidate.subject.steps.calibrated
        return self._unrounded.answer(answer.case.name, answer.feeds, clips)
