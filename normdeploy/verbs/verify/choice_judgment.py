"""Judge the outputs of a runtime by the reference that follows the file's choices (`followed_choices`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

import onnx
import torch
from torch.export.graph_signature import ConstantArgument

from ...compare.rounding_ties import RoundingTies
from ...errors import InputError, NormdeployError
from ...inputs.input_cases import DATASET, NONFINITE
from ...loading.program_signature import user_outputs
from ...model import LoadedModel
from ...precision.emulated_half import emulate_half
from ...runtimes import Runner
from ...runtimes.float64_evaluator import inline_functions
from ...runtimes.ordering_operators import (
    ChoiceWatcher,
    find_dependent_nodes,
    has_fixed_order,
    list_ordering_operators,
)
from ...runtimes.rounding_noise import RoundingRunner
from ...storage.onnx_files import load_onnx
from ...types import Array
from .case_answers import CaseAnswer
from .file_choices import ChoiceReader
from .followed_choices import Eager, FollowedRuns, WrongChoice, follow_choices
from .reference_models import FloatReference, Original
from .runtime_candidates import STEPWISE, OrderAgreement, RuntimeCandidate


@dataclass(frozen=True)
class FollowedCase:
    """Input on which a runtime orders nearly equal scores in another way than the reference.

    Attributes:
        answer: outputs of the reference with the choices of the runtime.
    """

    answer: CaseAnswer
    agreement: OrderAgreement


class ChoiceJudge:
    """Reference that follows the choices of each runtime, for the cases of one trial.

    Args:
        open_eager: opens eager mode.
        unit: change of parameters and inputs in a perturbed run, for integer outputs.
        half: half precision of the trial; None for the model's own precision.
        may_draw: returns whether there is time for more random roundings on an input, by its name.
    """

    def __init__(
        self,
        model: Original,
        reference: FloatReference,
        open_eager: Callable[[], Runner],
        unit: float,
        half: torch.dtype | None,
        may_draw: Callable[[str], bool],
    ) -> None:
        self._model = model
        self._reference = reference
        self._open_eager = open_eager
        self._unit = unit
        self._half = half
        self._may_draw = may_draw
        self._operators = list_ordering_operators(model.program.graph_module) if isinstance(model, LoadedModel) else []
        # Input -> last choices on this input, and the result. Two runtimes often make the same choices.
        self._known: dict[str, tuple[list[Array], FollowedCase | WrongChoice]] = {}

    @cached_property
    def has_fixed_order(self) -> bool:
        """Return whether every correct file has the operators in the order of the model."""
        if not isinstance(self._model, LoadedModel):
            return False
        return has_fixed_order(self._model.program.graph_module, self._operators or ())

    def make_watcher(self) -> ChoiceWatcher | None:
        """Make an observer of the choices of the reference's runs on one input.

        Returns:
            the observer; None if the model makes no choices that can be followed.
        """
        if not self._operators:
            return None
        return ChoiceWatcher(self._operators)

    def may_follow(self, candidate: RuntimeCandidate, answer: CaseAnswer) -> bool:
        """Check whether the choices of a runtime on an input can be read and followed.

        Returns:
            True if the model orders scores and onnxruntime runs the file.
        """
        subject = candidate.subject
        if not self._operators or subject is None or subject.steps is not None or answer.bounds is None:
            return False
        reads = bool(candidate.provider) or candidate.name == STEPWISE
        return reads and answer.case.kind != DATASET and answer.case.kind not in NONFINITE

    def open_reader(self, candidate: RuntimeCandidate) -> ChoiceReader:
        """Make the session that reads the choices of a runtime. It opens the file on the first input that needs it.

        Returns:
            the session.
        """
        return ChoiceReader(
            cast("LoadedModel", self._model),
            partial(_load_file, candidate),
            optimize=candidate.optimize,
            provider=candidate.provider or "cpu",
        )

    def follow(
        self, candidate: RuntimeCandidate, answer: CaseAnswer, reader: ChoiceReader
    ) -> FollowedCase | WrongChoice | None:
        """Follow the choices of a runtime on one input.

        Returns:
            the followed reference, or the choice that rounding does not explain. None if the choices are unknown.
        """
        picks = reader.read(candidate.file_feeds(answer.feeds))
        if picks is None or reader.paired is None:
            return None
        known = self._known.get(answer.case.name)
        if known is not None and _are_equal(known[0], picks):
            return known[1]
        runner = cast("RoundingRunner", self._reference.float64_runner)
        may_draw = partial(self._may_draw, answer.case.name)
        try:
            with self._open_eager() as eager:
                runs = follow_choices(
                    runner, cast("Eager", eager), reader.paired.operators, picks, answer.feeds, self._half, may_draw
                )
        except (InputError, NormdeployError):
            return None
        result = self._answer_case(runner, answer, runs, may_draw) if isinstance(runs, FollowedRuns) else runs
        self._known[answer.case.name] = picks, result
        return result

    def _answer_case(
        self, runner: RoundingRunner, answer: CaseAnswer, runs: FollowedRuns, may_draw: Callable[[], bool]
    ) -> FollowedCase:
        def run_perturbed(seed: int) -> dict[str, Array]:
            with runner.guided(runs.follower):
                return runner.run_perturbed(answer.feeds, self._unit, seed)

        def run_rounded(seed: int) -> dict[str, Array]:
            with runner.guided(runs.follower):
                return runner.run_rounded(answer.feeds, seed, self._half)

        integers = {name: value for name, value in runs.eager.items() if value.dtype.kind in "iub"}
        ties = RoundingTies(run_perturbed, runs.reference, integers, run_rounded, may_draw)
        eager = None if answer.eager is None else runs.eager
        followed = replace(answer, reference=runs.reference, ties=ties, bounds=runs.bounds, eager=eager)
        return FollowedCase(followed, OrderAgreement(runs.differing, runs.widest.ratio if runs.widest else 0.0))

    def certainly_wrong_outputs(self, choice: WrongChoice) -> list[str]:
        """List the outputs that a wrong choice makes wrong.

        Returns:
            names of the outputs that depend on the operator; none if the indices can't be those of the operator.
        """
        model = cast("LoadedModel", self._model)
        if not choice.is_certain:
            return []
        dependent = find_dependent_nodes(model.program.graph_module, choice.operator.node)
        values = [value for value in user_outputs(model.program) if not isinstance(value, ConstantArgument)]
        return [output for output, value in zip(model.outputs, values, strict=True) if value.name in dependent]


def _load_file(candidate: RuntimeCandidate) -> onnx.ModelProto:
    """Load the file as the runtime runs it."""
    assert candidate.subject is not None
    proto = load_onnx(candidate.subject.path)
    if candidate.name == STEPWISE:
        return emulate_half(inline_functions(proto))
    return proto


def _are_equal(some: list[Array], others: list[Array]) -> bool:
    return all(one.shape == other.shape and bool((one == other).all()) for one, other in zip(some, others, strict=True))
