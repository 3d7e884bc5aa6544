"""Runtimes beside eager and the float64 reference, case after case, and the verdict on each (the rule:
``normdeploy.verbs.verify.verify``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch

from ...compare.bounds import Bounds, is_lost
from ...compare.tally import Tally
from ...compare.ties import Ties
from ...errors import InputError
from ...precision.retype import FORMATS
from ...runtimes import RunResult
from ...runtimes.eager import HALVES
from .answers import Answer, is_comparable, is_undefined
from .candidates import HALF_TYPES, Candidate
from .cases import DATASET, LENIENT, OWN_KINDS, Case, elements
from .measured import Measures, settled
from .open_bounds import OpenBounds
from .originals import FileModel, Original, Reference, compares_inside, own_runner, run_by, unit_roundoff
from .overflow import Overflows
from .policy import Policy
from .results import OutputResult
from .spending import Clock, processor_time
from .steps import ROUNDED, UNROUNDED
from .tallying import Tallying
from .verdicts import results_of

_NARROW = 3  # nodes without a float64 form, named
_REFUSALS = 3  # sizes that the model does not take, each told with the error


class Trial:
    """Eager in one precision, what float64 says, and the runtimes that are judged by them.

    ``precision``: "" is the model's own. In half precision inputs are rounded to it, for the reference too.
    ``each``: every element has a bound of its own (``bounds``), which costs some runs of the reference for each case.
    ``policy``: rules that were given; ``dataset``: samples are among the cases, on which alone metrics are measured.
    ``quantized``: every file is, and has a budget of its steps. ``clock``: what all of it may take; None: any time.
    """

    def __init__(
        self,
        model: Original,
        reference: Reference,
        precision: str,
        *,
        each: bool = False,
        policy: Policy | None = None,
        dataset: bool = False,
        quantized: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.model, self.precision, self.notes = model, precision, list[str]()
        self.narrow = ""  # the nodes of a reference file that have no float64 form
        self._clock = Clock(float("inf")) if clock is None else clock
        self._quantized_alone = quantized
        self._dataset, self._settled = dataset, False
        self._each, self._refused = each, list[tuple[str, str]]()
        # Processor seconds for each element of the inputs.
        self._pace = 0.0
        # Results that stand in for those of a runtime, where these are known not to be the file's fault.
        self._stand_ins = (Overflows(self.notes).within_range, OpenBounds(self.notes).unclipped)
        self.answers: list[Answer] = []
        self.candidates: list[Candidate] = []
        self._reference = reference
        half = HALVES.get(precision)
        self._half_type = half
        self._beyond_range = False
        self.eager = Candidate(*own_runner(model, half))
        self.tallying = Tallying(model, self.eager, policy or Policy(), self._clock)
        self._half = FORMATS[precision].dtype if precision else None
        self._compares_inside = compares_inside(model)
        self._unit = 4 * (unit_roundoff(model) if half is None else FORMATS[precision].unit)

    def prepare(self, cases: Sequence[Case]) -> Iterator[None]:
        """Run eager and the reference on every case, yielding before each, until half of the time is over.

        The user's own inputs are run whatever they take.
        """
        with self.eager.make() as self.eager.runner:
            for case in cases:
                yield
                if self.answers and case.kind not in OWN_KINDS and not self._has_time(case):
                    self._clock.cases.append(case.name)
                    continue
                start = processor_time()
                self._answer(case)
                self._pace = (processor_time() - start) / self._elements(case)
        self.eager.runner = None
        if not self.answers:
            raise InputError(
                f"{run_by(self.eager.name)} runs on none of the inputs that were made, such as"
                f" {' '.join(self._refused[0])}; say which sizes and values it takes with --dim and --input, or"
                " give --inputs"
            )
        self.notes += [f"not run at {case}: {error}" for case, error in self._refused[:_REFUSALS]]
        if more := self._refused[_REFUSALS:]:
            rest = f" and {len(more) - _REFUSALS} more" if more[_REFUSALS:] else ""
            self.notes.append(f"nor at {', '.join(case for case, _ in more[:_REFUSALS])}{rest}")
        if narrow := self._reference.narrow():
            self.narrow = ", ".join(narrow[:_NARROW])
            self.narrow += f" and {len(narrow) - _NARROW} more" if narrow[_NARROW:] else ""
            self.notes.append(
                f"no float64 form: {self.narrow}; onnxruntime ran it in its own type for the reference too, so"
                " its results may differ by the roundings of two runs"
            )

    def _has_time(self, case: Case) -> bool:
        """Return whether there is time for a case, if each element of its inputs takes as long as in the last one."""
        return not self._clock.is_half_over() and self._clock.has(self._pace * self._elements(case))

    def _elements(self, case: Case) -> int:
        sizes = {name: dim.opt for name, dim in self.model.dims.items()} | dict(case.sizes)
        return max(elements(self.model, sizes), 1)

    def _answer(self, case: Case) -> None:
        feeds = self._fed(case)
        assert self.eager.runner is not None
        try:
            eager = self.eager.runner.infer(feeds)
        except InputError as error:
            # Values that a module may refuse, NaN say, were promised by nobody.
            if case.promised and case.kind not in LENIENT:
                raise InputError(f"{case.name}: {error}") from error
            self._refused.append((case.name, str(error)))
            return
        start = processor_time()
        reference = self._reference.runner.infer(feeds)
        may_draw = partial(self.tallying.may_draw, case.name, processor_time() - start)
        self._settle(reference)
        if case.kind == DATASET:
            self.answers.append(Answer(case, {}, reference, Ties(lambda seed: {}, reference, {})))
            self.tallying.measure(self.eager, self.answers[-1], eager)
            return
        integers = {name: value for name, value in eager.items() if value.dtype.kind in "iub"}
        ties = Ties(
            lambda seed: self._reference.runner.perturbed(feeds, self._unit, seed),
            reference,
            integers,
            lambda seed: self._rounded(feeds, seed),
            may_draw,
        )
        bounds = None
        if self._each and not (self._quantized_alone and self.tallying.rules_decide):
            own, rounded = eager, partial(self._rounded, feeds)
            if (wide := self._in_wide_range(case, feeds, eager, reference)) is not None:
                own, rounded = wide, partial(self._reference.runner.rounded, feeds, half=torch.bfloat16)
            bounds = Bounds(reference, own, rounded, may_draw)
            for name in bounds.outputs if case.kind not in LENIENT else ():
                self.tallying.ratios[name] = max(self.tallying.ratios.get(name, 1.0), bounds.ratio(name))
        lenient = case.kind in LENIENT or (isinstance(self.model, FileModel) and is_undefined(eager, reference))
        self.answers.append(Answer(case, feeds, reference, ties, bounds, eager if lenient else None))
        for name, value in eager.items():
            self.eager.tallies.setdefault((name, case.kind), Tally(value.dtype))
        self.tallying.keep(self.eager, self.answers[-1], eager)

    def _in_wide_range(
        self, case: Case, feeds: Mapping[str, np.ndarray], eager: RunResult, reference: RunResult
    ) -> RunResult | None:
        """Return the answer with bfloat16's roundings where float16 loses an output for its range; None elsewhere.

        An overflow is no rounding, so it widens no bound: bfloat16 has fewer digits, and float32's range.
        """
        if self._half != np.float16 or case.kind not in {"random", *OWN_KINDS}:
            return None
        lost = [name for name, value in eager.items() if value.dtype.kind == "f" and is_lost(value, reference[name])]
        if not lost:
            return None
        wide = self._reference.runner.rounded(feeds, 0, torch.bfloat16)
        beyond = [name for name in lost if not is_lost(wide[name], reference[name])]
        if not beyond:
            return None
        # The first input tells the kind.
        if not self._beyond_range:
            self.notes.append(
                f"values leave float16's range at {case.name}: {', '.join(beyond)} keeps no digit there, and some in"
                " bfloat16, by whose roundings such inputs are judged"
            )
        self._beyond_range = True
        return {name: wide[name].astype(value.dtype) for name, value in eager.items()}

    def _fed(self, case: Case) -> dict[str, np.ndarray]:
        feeds, half = case.make(), self._half
        if half is None:
            return feeds
        return {
            n: v.astype(half).astype(v.dtype) if v.dtype in (np.float32, np.float64) else v for n, v in feeds.items()
        }

    def _settle(self, reference: RunResult) -> None:
        """The rules for each output, once it is known what they are."""
        if not self._settled and self.tallying.policy:
            self.tallying.policy, notes = settled(self.tallying.policy, reference)
            self.notes += notes
            self.eager.measures = Measures(self.tallying.policy, self._dataset)
        self._settled = True

    def _rounded(self, feeds: Mapping[str, np.ndarray], seed: int) -> RunResult:
        return self._reference.runner.rounded(feeds, seed, self._half_type)

    def take(self, candidate: Candidate) -> None:
        """Run a loaded candidate on every case, and keep it to be judged."""
        self.candidates.append(candidate)
        candidate.measures = Measures(self.tallying.policy, self._dataset)
        if candidate.name == UNROUNDED and self.tallying.by_rules_alone(candidate):
            candidate.unavailable = "the rules given decide on the file as it rounds"
            return
        self._run(candidate, bounded=True)
        if candidate.skipped and not candidate.tallies:
            candidate.unavailable = (
                "every case lies outside the engine's profile; build it for the sizes that the model takes"
            )
        candidate.runner = None

    def retake(self, candidate: Candidate) -> None:
        """Run a candidate on every case anew, whose file is judged otherwise now."""
        if candidate.unavailable or candidate.failure:
            return
        candidate.tallies, candidate.measures, candidate.ran = {}, Measures(self.tallying.policy, self._dataset), 0
        with ExitStack() as stack:
            candidate.load(stack)
            self._run(candidate, bounded=True)
        candidate.runner = None

    def passes(self, fresh: Candidate, outputs: Collection[str], names: Sequence[str] = ()) -> bool:
        """Whether a candidate that is not loaded yet is right in ``outputs``, on every case or on those called
        ``names``."""
        fresh.measures = Measures(self.tallying.policy, self._dataset)
        with ExitStack() as stack:
            fresh.load(stack)
            self._run(fresh, names, deciding=outputs)
        ran = any(output in outputs for output, _ in fresh.tallies)
        return ran and not fresh.failure and not fresh.unavailable and not self.tallying.fails(fresh, outputs)

    def measured(self, fresh: Candidate, names: Sequence[str]) -> list[OutputResult]:
        """Run a candidate that is not loaded yet on the cases called ``names``, and return what it comes to."""
        fresh.measures = Measures(self.tallying.policy, self._dataset)
        with ExitStack() as stack:
            fresh.load(stack)
            self._run(fresh, names)
        return self.results(fresh)

    def _run(
        self, candidate: Candidate, names: Sequence[str] = (), *, bounded: bool = False, deciding: Collection[str] = ()
    ) -> None:
        """Run a loaded candidate on the cases of ``names``, all if there are none.

        Args:
            bounded: while there is time.
            deciding: until one of these outputs fails.
        """
        for answer in self.answers:
            if self.tallying.fails(candidate, deciding):
                return
            if (names and answer.case.name not in names) or not is_comparable(candidate, answer, self._compares_inside):
                continue
            # One input is run whatever it takes, or nothing would be known of the runtime.
            late = bounded and bool(candidate.tallies) and self._clock.is_over()
            if late and answer.case.kind not in OWN_KINDS:
                title = f"{candidate.file} in {candidate.name}" if candidate.file else candidate.name
                self._clock.unrun.setdefault(title, []).append(answer.case.name)
                continue
            result = candidate.infer(
                answer.case, self._fed(answer.case) if answer.case.kind == DATASET else answer.feeds
            )
            if result is not None:
                narrow = {n: self._narrow(candidate, n, v) for n, v in result.items()}
                known = {n: v for n, v in narrow.items() if n in answer.reference}
                for stand_in in self._stand_ins:
                    known |= stand_in(candidate, answer, known)
                self.tallying.keep(candidate, answer, narrow | known)

    def _narrow(self, candidate: Candidate, output: str, value: np.ndarray) -> np.ndarray:
        """Inputs and outputs of a half-precision file may have been kept in float32; float64 is the evaluator's own."""
        if candidate.name in (ROUNDED, UNROUNDED) and output in self.model.outputs and value.dtype == np.float64:
            with np.errstate(over="ignore"):
                return value.astype(self.tallying.dtype_of(output))
        own = self.tallying.dtype_of(output) if output in self.model.outputs else None
        holds_half = candidate.subject is not None and bool(candidate.subject.computing.halves)
        if own not in HALF_TYPES or not (self._half == own or holds_half):
            return value
        with np.errstate(over="ignore"):
            return value.astype(own) if value.dtype in (np.float32, *HALF_TYPES) else value

    def results(self, candidate: Candidate) -> list[OutputResult]:
        """Return one result for each output, none where it was not run."""
        return results_of(self, candidate)
