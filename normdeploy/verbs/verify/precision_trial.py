"""Run eager mode, the float64 reference and each runtime on every case, and judge the runtimes.

``normdeploy.verbs.verify.file_comparison`` documents the rule.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import numpy as np
import torch

from ...compare.error_bounds import ErrorBounds, has_lost_all_digits
from ...compare.error_tally import ErrorTally
from ...compare.policy import Policy
from ...compare.rounding_ties import RoundingTies
from ...errors import InputError
from ...inputs.input_cases import DATASET, LENIENT, OWN_KINDS, InputCase, count_elements
from ...precision.type_conversion import FORMATS
from ...runtimes import Runner, RunResult
from ...runtimes.ordering_operators import ChoiceWatcher
from ...runtimes.torch_runners import HALVES, EagerRunner, Float64Runner, HalfRunner
from ...types import Array, Arrays
from .case_answers import CaseAnswer, divides_zero_by_zero, is_comparable
from .choice_judgment import ChoiceJudge, FollowedCase
from .compute_budget import BudgetClock, processor_time
from .file_choices import ChoiceReader
from .followed_choices import WrongChoice
from .output_results import OutputResult
from .output_verdicts import candidate_results
from .quantization_budget import ROUNDED, UNROUNDED
from .reference_models import (
    FileModel,
    FloatReference,
    Original,
    compares_inside,
    model_unit_roundoff,
    own_precision_runner,
    runtime_label,
)
from .rule_measures import OutputMeasures, resolve_policy
from .runtime_candidates import HALF_TYPES, RuntimeCandidate
from .runtime_tallies import RuntimeTallies
from .stand_in_results import StandInResults
from .wording import list_some

# Maximum number of nodes without a float64 form that a note names.
_NARROW = 3
# Maximum number of notes on cases that the model refused.
_REFUSALS = 3


def round_inputs(feeds: Arrays, half: np.dtype | None) -> dict[str, Array]:
    """Round floating-point inputs to ``half`` and keep their dtypes.

    Args:
        half: dtype to round to; None for no rounding.

    Returns:
        input name -> array.
    """
    if half is None:
        return dict(feeds)
    return {n: v.astype(half).astype(v.dtype) if v.dtype in (np.float32, np.float64) else v for n, v in feeds.items()}


def _show_choices(runner: Runner, choices: ChoiceWatcher | None) -> AbstractContextManager[None]:
    """Return a context in which ``choices`` sees the choices of a runner of PyTorch."""
    if choices is None or not isinstance(runner, EagerRunner | HalfRunner | Float64Runner):
        return nullcontext()
    return runner.guided(choices)


class PrecisionTrial:
    """Comparison in one precision: eager mode, the float64 reference, and the runtimes that are judged by the two.

    Args:
        precision: half precision of the trial; inputs are rounded to it, also for the reference. "" for the model's own
            precision.
        each: True to compute an allowed error for each element (`ErrorBounds`), which takes several runs of the
            reference for each case.
        policy: rules given by the user.
        dataset: True if there are samples of a dataset among the cases. Metrics are then measured only on the samples.
        quantized: True if every file is quantized and has an error budget.
        clock: limit on the time; None for no limit.
    """

    def __init__(
        self,
        model: Original,
        reference: FloatReference,
        precision: str,
        *,
        each: bool = False,
        policy: Policy | None = None,
        dataset: bool = False,
        quantized: bool = False,
        clock: BudgetClock | None = None,
    ) -> None:
        self.model, self.precision, self.notes = model, precision, list[str]()
        # Description of the nodes of a reference file that have no float64 form.
        self.narrow = ""
        self._clock = BudgetClock(float("inf")) if clock is None else clock
        self._quantized_alone = quantized
        self._dataset = dataset
        self._settled = False
        self._each, self._refused = each, list[tuple[str, str]]()
        # Processor seconds for each element of the inputs.
        self._pace = 0.0
        self._stand_ins = StandInResults(self.notes)
        self.answers: list[CaseAnswer] = []
        self.candidates: list[RuntimeCandidate] = []
        self._reference = reference
        half = HALVES.get(precision)
        self._half_type = half
        self._beyond_range = False
        self.eager = RuntimeCandidate(*own_precision_runner(model, half))
        self.tallying = RuntimeTallies(model, self.eager, policy or Policy(), self._clock)
        self._half = FORMATS[precision].dtype if precision else None
        self._compares_inside = compares_inside(model)
        self._unit = 4 * (model_unit_roundoff(model) if half is None else FORMATS[precision].unit_roundoff)
        self._choices = ChoiceJudge(
            model, reference, self.eager.make, self._unit, half, self.tallying.has_time_for_draws
        )

    def prepare_answers(self, cases: Sequence[InputCase]) -> Iterator[None]:
        """Run eager mode and the reference on every case until half of the time is over.

        The user's own inputs always run.

        Yields:
            None before each case.

        Raises:
            InputError: the model fails on an input that it must accept, or fails on all inputs.
        """
        with self.eager.make() as self.eager.runner:
            for case in cases:
                yield
                if self.answers and case.kind not in OWN_KINDS and not self._has_time(case):
                    self._clock.cases.append(case.name)
                    continue
                start = processor_time()
                self._answer_case(case)
                self._pace = (processor_time() - start) / self._count_elements(case)
        self.eager.runner = None
        if not self.answers:
            raise InputError(
                f"{runtime_label(self.eager.name)} fails on all generated inputs, such as"
                f" {' '.join(self._refused[0])}; state the valid sizes and values with --dim and --input, or"
                " pass --inputs"
            )
        self.notes += [f"not run at {case}: {error}" for case, error in self._refused[:_REFUSALS]]
        if more := self._refused[_REFUSALS:]:
            self.notes.append(f"nor at {list_some([case for case, _ in more], _REFUSALS)}")
        if narrow := self._reference.describe_narrow_nodes():
            self.narrow = list_some(narrow, _NARROW)
            self.notes.append(
                f"no float64 form: {self.narrow}; onnxruntime ran it in its own dtype for the reference as"
                " well, so its results may differ by the roundings of two runs"
            )

    def _has_time(self, case: InputCase) -> bool:
        """Return whether there is time for a case, estimated from the time per element in the last case."""
        return not self._clock.is_half_over() and self._clock.has_time(self._pace * self._count_elements(case))

    def _count_elements(self, case: InputCase) -> int:
        sizes = self.model.usual_sizes | dict(case.sizes)
        return max(count_elements(self.model, sizes), 1)

    def _answer_case(self, case: InputCase) -> None:
        feeds = self._rounded_feeds(case)
        assert self.eager.runner is not None
        choices = self._choices.make_watcher()
        try:
            with _show_choices(self.eager.runner, choices):
                eager = self.eager.runner.infer(feeds)
        except InputError as error:
            # A module may refuse certain inputs, such as those with NaN. This does not fail the comparison.
            if case.promised and case.kind not in LENIENT:
                raise InputError(f"{case.name}: {error}") from error
            self._refused.append((case.name, str(error)))
            return
        start = processor_time()
        with _show_choices(self._reference.float64_runner, choices):
            reference = self._reference.float64_runner.infer(feeds)
        may_draw = partial(self.tallying.has_time_for_draws, case.name, processor_time() - start)
        self._resolve_rules(reference)
        if case.kind == DATASET:
            self.answers.append(CaseAnswer(case, {}, reference, RoundingTies(lambda seed: {}, reference, {})))
            self.tallying.measure_rules(self.eager, self.answers[-1], eager)
            return
        integers = {name: value for name, value in eager.items() if value.dtype.kind in "iub"}
        ties = RoundingTies(
            lambda seed: self._reference.float64_runner.run_perturbed(feeds, self._unit, seed),
            reference,
            integers,
            partial(self._run_rounded, feeds, choices),
            may_draw,
        )
        bounds = None
        if self._each and not (self._quantized_alone and self.tallying.rules_decide):
            own = eager
            rounded = partial(self._run_rounded, feeds, choices)
            if (wide := self._answer_in_bfloat16(case, feeds, eager, reference)) is not None:
                own = wide
                rounded = partial(self._reference.float64_runner.run_rounded, feeds, half=torch.bfloat16)
            bounds = ErrorBounds(reference, own, rounded, may_draw)
            for name in bounds.outputs if case.kind not in LENIENT else ():
                self.tallying.ratios[name] = max(self.tallying.ratios.get(name, 1.0), bounds.eager_ratio(name))
        lenient = case.kind in LENIENT or (isinstance(self.model, FileModel) and divides_zero_by_zero(eager, reference))
        self.answers.append(CaseAnswer(case, feeds, reference, ties, bounds, eager if lenient else None, choices))
        for name, value in eager.items():
            self.eager.tallies.setdefault((name, case.kind), ErrorTally(value.dtype))
        self.tallying.tally_result(self.eager, self.answers[-1], eager)

    def _answer_in_bfloat16(
        self, case: InputCase, feeds: Arrays, eager: RunResult, reference: RunResult
    ) -> RunResult | None:
        """Return the result with bfloat16's roundings if an output exceeds float16's range; otherwise None.

        An overflow is not a rounding error, so it must not increase the allowed errors. bfloat16 has fewer digits than
        float16 but the range of float32.
        """
        if self._half != np.float16 or case.kind not in {"random", *OWN_KINDS}:
            return None
        lost = [
            name
            for name, value in eager.items()
            if value.dtype.kind == "f" and has_lost_all_digits(value, reference[name])
        ]
        if not lost:
            return None
        wide = self._reference.float64_runner.run_rounded(feeds, 0, torch.bfloat16)
        beyond = [name for name in lost if not has_lost_all_digits(wide[name], reference[name])]
        if not beyond:
            return None
        # A note is written only for the first such input.
        if not self._beyond_range:
            self.notes.append(
                f"values exceed float16's range at {case.name}: in float16 no digit of {', '.join(beyond)} is right"
                " there; in bfloat16 some are. So such inputs are judged with the allowed error of bfloat16"
            )
        self._beyond_range = True
        return {name: wide[name].astype(value.dtype) for name, value in eager.items()}

    def _rounded_feeds(self, case: InputCase) -> dict[str, Array]:
        return round_inputs(case.make(), self._half)

    def _resolve_rules(self, reference: RunResult) -> None:
        """Split the rules by output. This is done on the first case, because it gives the dtypes of the outputs."""
        if not self._settled and self.tallying.policy:
            self.tallying.policy, notes = resolve_policy(self.tallying.policy, reference)
            self.notes += notes
            self.eager.measures = OutputMeasures(self.tallying.policy, self._dataset)
        self._settled = True

    def _run_rounded(self, feeds: Arrays, choices: ChoiceWatcher | None, seed: int) -> RunResult:
        runner = self._reference.float64_runner
        with _show_choices(runner, choices):
            return runner.run_rounded(feeds, seed, self._half_type)

    def run_candidate(self, candidate: RuntimeCandidate) -> None:
        """Run a loaded candidate on every case, and keep it for judgment."""
        self.candidates.append(candidate)
        candidate.measures = OutputMeasures(self.tallying.policy, self._dataset)
        if candidate.name == UNROUNDED and self.tallying.skips_step_budget(candidate):
            candidate.unavailable = "your rules decide on the file as it rounds"
            return
        self._run_cases(candidate, bounded=True)
        if candidate.skipped and not candidate.tallies:
            candidate.unavailable = (
                "all cases are outside the engine's profile; build it for the sizes that the model accepts"
            )
        candidate.runner = None

    def rerun_candidate(self, candidate: RuntimeCandidate) -> None:
        """Run a candidate on every case again, after the rule for its file has changed."""
        if candidate.unavailable or candidate.failure:
            return
        candidate.tallies, candidate.measures, candidate.ran = (
            {},
            OutputMeasures(self.tallying.policy, self._dataset),
            0,
        )
        with ExitStack() as stack:
            candidate.load(stack)
            self._run_cases(candidate, bounded=True)
        candidate.runner = None

    def rejudge_within_ranges(self) -> None:
        """Run the candidates of each failed quantized file again if its ranges may come from a calibration.

        A quantized file of another tool does not record its ranges. If a calibration on inputs like these could have
        given the ranges, they are trusted. Values that they clip are then not judged, as for a file with recorded
        ranges (`quantization_budget`).
        """
        budgets = {id(c.subject.steps): c.subject.steps for c in self.candidates if c.subject and c.subject.steps}
        for budget in budgets.values():
            own = [c for c in self.candidates if c.subject is not None and c.subject.steps is budget]
            if any(not result for c in own for result in self.candidate_results(c)) and budget.trust_ranges():
                for candidate in own:
                    self.rerun_candidate(candidate)

    def passes(self, fresh: RuntimeCandidate, outputs: Collection[str], names: Sequence[str] = ()) -> bool:
        """Check whether a candidate that is not loaded yet is right in ``outputs``.

        Args:
            names: cases to run; empty for every case.

        Returns:
            True if the candidate ran and none of the outputs is wrong.
        """
        fresh.measures = OutputMeasures(self.tallying.policy, self._dataset)
        with ExitStack() as stack:
            fresh.load(stack)
            self._run_cases(fresh, names, deciding=outputs)
        ran = any(output in outputs for output, _ in fresh.tallies)
        return (
            ran and not fresh.failure and not fresh.unavailable and not self.tallying.has_wrong_output(fresh, outputs)
        )

    def measure_candidate(self, fresh: RuntimeCandidate, names: Sequence[str]) -> list[OutputResult]:
        """Run a candidate that is not loaded yet on the cases in ``names``.

        Returns:
            one result for each output.
        """
        fresh.measures = OutputMeasures(self.tallying.policy, self._dataset)
        with ExitStack() as stack:
            fresh.load(stack)
            self._run_cases(fresh, names)
        return self.candidate_results(fresh)

    def _run_cases(
        self,
        candidate: RuntimeCandidate,
        names: Sequence[str] = (),
        *,
        bounded: bool = False,
        deciding: Collection[str] = (),
    ) -> None:
        """Run a loaded candidate on the cases in ``names``, or on all if there are none.

        Args:
            bounded: True to stop when the time is over.
            deciding: outputs; the run stops when one of them fails.
        """
        with self._choices.open_reader(candidate) as reader:
            self._run_cases_with(candidate, names, reader, bounded=bounded, deciding=deciding)

    def _run_cases_with(
        self,
        candidate: RuntimeCandidate,
        names: Sequence[str],
        reader: ChoiceReader,
        *,
        bounded: bool,
        deciding: Collection[str],
    ) -> None:
        """Run a candidate whose choices ``reader`` reads, as `_run_cases` does."""
        for answer in self.answers:
            if self.tallying.has_wrong_output(candidate, deciding):
                return
            if (names and answer.case.name not in names) or not is_comparable(candidate, answer, self._compares_inside):
                continue
            # At least one input always runs, so that something is known about the runtime.
            late = bounded and bool(candidate.tallies) and self._clock.is_over()
            if late and answer.case.kind not in OWN_KINDS:
                if candidate.file_label:
                    title = f"{candidate.file_label} in {candidate.name}"
                else:
                    title = candidate.name
                self._clock.unrun.setdefault(title, []).append(answer.case.name)
                continue
            result = candidate.infer(
                answer.case, self._rounded_feeds(answer.case) if answer.case.kind == DATASET else answer.feeds
            )
            if result is not None:
                narrow = {n: self._cast_to_model_type(candidate, n, v) for n, v in result.items()}
                known = {n: v for n, v in narrow.items() if n in answer.reference}
                known = self._stand_ins.replace_excused(candidate, answer, known)
                self._judge_result(candidate, answer, narrow | known, reader)

    def _judge_result(
        self, candidate: RuntimeCandidate, answer: CaseAnswer, result: RunResult, reader: ChoiceReader
    ) -> None:
        """Add the outputs of a candidate on one input to its tallies.

        If rounding decides a choice of the model, the outputs are compared with the reference that makes the
        candidate's choices. This comes before the dozens of random roundings that a failure needs, because these rarely
        make the same choices. Without such a reference, every output passes that is as far from the reference as
        another choice.
        """
        self.tallying.measure_rules(candidate, answer, result)
        if self.tallying.rules_decide or not self._choices.may_follow(candidate, answer):
            self.tallying.tally_errors(candidate, answer, result)
            return
        failing = self.tallying.failing_outputs(candidate)
        before = copy.deepcopy(candidate.tallies)
        self.tallying.tally_errors(candidate, answer, result, draws=False)
        passes = self.tallying.failing_outputs(candidate) <= failing
        if passes and (not answer.has_near_ties or answer.case.kind in LENIENT or self._clock.is_over()):
            return
        plain = candidate.tallies
        followed = self._choices.follow(candidate, answer, reader)
        if isinstance(followed, FollowedCase):
            candidate.tallies = copy.deepcopy(before)
            self.tallying.tally_errors(candidate, followed.answer, result)
            if self.tallying.failing_outputs(candidate) <= failing:
                if followed.agreement.differing:
                    candidate.followed[answer.case.name] = followed.agreement
                return
        # The pairs of operators may be wrong, or the time too short for the random roundings that a failure needs.
        is_decisive = self._choices.has_fixed_order and answer.case.kind not in LENIENT and not self._clock.is_over()
        if isinstance(followed, FollowedCase) and is_decisive:
            return
        if passes:
            candidate.tallies = plain
        else:
            candidate.tallies = before
            self.tallying.tally_errors(candidate, answer, result)
        if isinstance(followed, WrongChoice) and is_decisive:
            self._refuse_choice(candidate, answer, followed, failing)

    def _refuse_choice(
        self, candidate: RuntimeCandidate, answer: CaseAnswer, choice: WrongChoice, failing: Collection[str]
    ) -> None:
        """Let the outputs fail that depend on a choice that rounding does not explain.

        Args:
            failing: outputs that failed on other inputs.
        """
        if not self.tallying.failing_outputs(candidate) <= set(failing):
            # The errors show that the outputs are wrong.
            candidate.wrong_choice = candidate.wrong_choice or f"{choice.text}, at {answer.case.name}"
            return
        for output in self._choices.certainly_wrong_outputs(choice):
            tally = candidate.tallies.get((output, answer.case.kind))
            if tally is not None and output not in failing:
                tally.refuse(answer.case.name, choice.text)

    def _cast_to_model_type(self, candidate: RuntimeCandidate, output: str, value: Array) -> Array:
        """Cast a result to the dtype that the output has in the model.

        A half-precision file may have float32 inputs and outputs, and the evaluator returns float64.
        """
        if candidate.name in (ROUNDED, UNROUNDED) and output in self.model.outputs and value.dtype == np.float64:
            with np.errstate(over="ignore"):
                return value.astype(self.tallying.dtype_of(output))
        if output in self.model.outputs:
            own = self.tallying.dtype_of(output)
        else:
            own = None
        holds_half = candidate.subject is not None and bool(candidate.subject.computing.halves)
        if own not in HALF_TYPES or not (self._half == own or holds_half):
            return value
        with np.errstate(over="ignore"):
            if value.dtype in (np.float32, *HALF_TYPES):
                return value.astype(own)
            return value

    def candidate_results(self, candidate: RuntimeCandidate) -> list[OutputResult]:
        """Judge all outputs of a candidate.

        Returns:
            one result for each output; none if the candidate was not run.
        """
        return candidate_results(self, candidate)
