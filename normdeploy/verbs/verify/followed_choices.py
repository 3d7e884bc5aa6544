"""Compare a file with the reference that follows the file's choices, if rounding explains these choices.

A detector keeps the queries with the highest scores (`topk`). If two scores are nearly equal, rounding decides which of
them comes first. The outputs of a correct file may then be far from the reference, whose order is another one. With k
such pairs, random roundings of the reference have the order of the file only in one of 2^k runs.

So a file is right if one possible order gives its outputs:

1. The file's own indices are read (`file_choices`).
2. The reference runs in float64 with these indices (`runtimes.ordering_operators`). So do eager mode and the random
   roundings of the reference, from which the allowed errors follow as for any case (`compare.error_bounds`).
3. The scores have allowed errors by the same rule. If scores within these errors can't have the file's order
   (`compare.pick_order`), the file has made a wrong choice.
4. Otherwise the file's outputs are compared with this reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import torch

from ...compare.error_bounds import ErrorBounds
from ...compare.number_text import format_number, format_pair
from ...compare.pick_order import PassedTie, ScorePair, find_passed_tie, find_widest_inversion
from ...model import LoadedModel
from ...runtimes import RunResult
from ...runtimes.ordering_operators import ChoiceFollower, OrderingOperator, line_up_scores
from ...runtimes.rounding_noise import RoundingRunner
from ...runtimes.torch_runners import HALVES, EagerRunner, HalfRunner
from ...types import Array, Arrays
from .file_choices import ChoiceReader

Eager = EagerRunner | HalfRunner


@dataclass(frozen=True)
class FollowedRuns:
    """Runs of the reference and of eager mode that follow a file's choices on one input.

    Attributes:
        follower: the choices.
        reference: outputs in float64.
        eager: outputs in the model's own type.
        bounds: allowed errors of the outputs.
        differing: number of picks that differ from those of the reference.
        widest: the two scores whose order rounding explains least; None if the scores have no other order.
    """

    follower: ChoiceFollower
    reference: RunResult
    eager: RunResult
    bounds: ErrorBounds
    differing: int
    widest: ScorePair | None


@dataclass(frozen=True)
class WrongChoice:
    """Choice of a file that rounding does not explain.

    Attributes:
        is_certain: False if the picks may belong to another operator: indices that can't be those of the operator.
        text: description of the choice.
    """

    operator: OrderingOperator
    is_certain: bool
    text: str


def follow_file(
    model: LoadedModel, proto: onnx.ModelProto, feeds: Arrays, precision: str = "", *, optimize: bool, provider: str
) -> FollowedRuns | WrongChoice | None:
    """Run a model with the choices that a file makes in onnxruntime.

    Args:
        proto: file whose inputs have the model's names.
        precision: "fp16" or "bf16" if the file computes in this type; "" for the model's own types.
        optimize, provider: as for ``OrtRunner``.

    Returns:
        the runs, or a choice that rounding does not explain. None if the file's choices are unknown.

    Raises:
        InputError, NormdeployError: the model does not run on this input.
    """
    types = {v.name: onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in proto.graph.input}
    with ChoiceReader(model, lambda: proto, optimize=optimize, provider=provider) as reader:
        picks = reader.read({name: feeds[name].astype(kind) for name, kind in types.items() if name in feeds})
        if picks is None or reader.paired is None:
            return None
    half = HALVES.get(precision)
    with EagerRunner(model) if half is None else HalfRunner(model, half) as eager:
        return follow_choices(RoundingRunner(model), eager, reader.paired.operators, picks, feeds, half)


def follow_choices(
    reference: RoundingRunner,
    eager: Eager,
    operators: Sequence[OrderingOperator],
    picks: Sequence[Array],
    feeds: Arrays,
    half: torch.dtype | None = None,
    may_draw: Callable[[], bool] = lambda: True,
) -> FollowedRuns | WrongChoice:
    """Run a model with the choices of a file, and check the choices.

    Args:
        picks: the file's indices for each operator.
        half: dtype of the random roundings; None for the model's own dtypes.
        may_draw: returns whether there is time for more random roundings.

    Returns:
        the runs, or a choice that rounding does not explain.

    Raises:
        InputError, NormdeployError: the model does not run on this input.
    """
    follower = ChoiceFollower(operators, picks)
    with reference.guided(follower):
        exact = reference.infer(feeds)
    if follower.misfit is not None:
        operator = follower.misfit.operator
        return WrongChoice(operator, False, f"{_describe_operator(operator)} has {follower.misfit.reason}")
    differing = follower.differing
    scores = follower.scores
    with eager.guided(follower):
        own = eager.infer(feeds)
    own_scores = follower.scores

    def run_rounded(seed: int) -> RunResult:
        with reference.guided(follower):
            rounded = reference.run_rounded(feeds, seed, half)
        return rounded | _name_scores(follower.scores)

    bounds = ErrorBounds(exact | _name_scores(scores), own | _name_scores(own_scores), run_rounded, may_draw)
    while True:
        ties = [(operator, _find_passed_tie(operator, scores, follower, bounds)) for operator in follower.operators]
        wrong = next(((operator, tie) for operator, tie in ties if tie is not None), None)
        if wrong is not None:
            # More roundings may move one of the scores.
            if bounds.draw_more():
                continue
            return WrongChoice(wrong[0], True, _describe_passed_tie(*wrong))
        pairs = [(operator, _find_widest(operator, scores, follower, bounds)) for operator in follower.operators]
        found = [(operator, pair) for operator, pair in pairs if pair is not None]
        if not found:
            return FollowedRuns(follower, exact, own, bounds, differing, None)
        operator, widest = max(found, key=lambda each: each[1].ratio)
        if widest.ratio <= 1:
            return FollowedRuns(follower, exact, own, bounds, differing, widest)
        if not bounds.draw_more():
            return WrongChoice(operator, True, _describe_wrong_order(operator, widest))


def _name_scores(scores: Arrays) -> RunResult:
    """Name scores so that no output has the same name."""
    return {_score_name(node): value for node, value in scores.items()}


def _score_name(node: str) -> str:
    return f"scores of {node}"


def _find_widest(
    operator: OrderingOperator, scores: Arrays, follower: ChoiceFollower, bounds: ErrorBounds
) -> ScorePair | None:
    """Find the two scores of an operator whose order rounding explains least."""
    name = _score_name(operator.node)
    exact = scores[operator.node].astype(np.float64)
    if name in bounds.outputs:
        room = bounds.allowed_error(name, bounds.eager_ratio(name))
    else:
        # Integers have no rounding error.
        room = np.zeros(exact.shape)
    values, picks, axis = line_up_scores(operator, exact, follower.picks[operator.node])
    return find_widest_inversion(
        values, room.reshape(values.shape), picks, axis, largest=operator.largest, in_order=operator.in_order
    )


def _find_passed_tie(
    operator: OrderingOperator, scores: Arrays, follower: ChoiceFollower, bounds: ErrorBounds
) -> PassedTie | None:
    """Find a pick of an argmax or argmin that is not the first of equal scores."""
    if operator.onnx_op == "TopK":
        # torch.topk picks any of equal scores.
        return None
    name = _score_name(operator.node)
    exact = scores[operator.node].astype(np.float64)
    unmoved = bounds.unmoved(name) if name in bounds.outputs else np.ones(exact.shape, bool)
    values, picks, axis = line_up_scores(operator, exact, follower.picks[operator.node])
    return find_passed_tie(values, unmoved.reshape(values.shape), picks, axis)


def _describe_passed_tie(operator: OrderingOperator, passed: PassedTie) -> str:
    return (
        f"{_describe_operator(operator)} picks index {passed.index}, but the model picks index {passed.first}, the"
        f" first of equal scores ({format_number(passed.score)})"
    )


def _describe_operator(operator: OrderingOperator) -> str:
    if operator.module:
        return f"{operator.name} of module {operator.module!r}"
    return operator.name


def _describe_wrong_order(operator: OrderingOperator, pair: ScorePair) -> str:
    first, second = format_pair(pair.first, pair.second)
    return (
        f"{_describe_operator(operator)} ranks the score {first} before {second}, which are {pair.gap:.2g} apart;"
        f" rounding explains {pair.room:.2g}"
    )
