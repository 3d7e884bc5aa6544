"""Runs in torch that follow the choices of a file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from normdeploy.loading import from_module
from normdeploy.model import LoadedModel
from normdeploy.runtimes.ordering_operators import (
    ChoiceFollower,
    ChoiceWatcher,
    has_fixed_order,
    list_ordering_operators,
)
from normdeploy.runtimes.rounding_noise import RoundingRunner
from normdeploy.runtimes.torch_runners import EagerRunner

Function = Callable[[torch.Tensor], object]
ROWS = np.array([[3.0, 1.0, 2.0], [0.5, 0.7, 0.6]], np.float32)


class Applied(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x)


def load(function: Function) -> LoadedModel:
    return from_module(Applied(function).eval(), inputs=["x[2,3]"])


def run_following(model: LoadedModel, picks: list[np.ndarray]) -> tuple[list[np.ndarray], ChoiceFollower]:
    operators = list_ordering_operators(model.program.graph_module)
    assert operators is not None
    follower = ChoiceFollower(operators, picks)
    runner = RoundingRunner(model)
    with runner.guided(follower):
        outputs = runner.infer({"x": ROWS})
    return [*outputs.values()], follower


CASES = {
    "topk": (lambda x: x.topk(2), [[1, 0], [2, 1]]),
    "topk of the smallest": (lambda x: x.topk(2, largest=False), [[1, 0], [2, 1]]),
    "topk of another dim": (lambda x: x.topk(1, dim=0), [[1, 0, 1]]),
    "sort": (lambda x: x.sort(), [[2, 0, 1], [0, 1, 2]]),
    "stable sort": (lambda x: x.sort(stable=True, descending=True), [[2, 0, 1], [0, 1, 2]]),
    "max of a dim": (lambda x: x.max(1), [2, 0]),
    "min of a dim, kept": (lambda x: x.min(1, keepdim=True), [[2], [0]]),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_indices_are_those_of_the_picks(case: str) -> None:
    function, chosen = CASES[case]
    picks = np.array(chosen)
    model = load(function)
    (values, indices), follower = run_following(model, [picks])
    axis = 0 if "another" in case else 1
    kept = picks if picks.ndim == 2 else picks[:, None]
    np.testing.assert_array_equal(indices, picks)
    np.testing.assert_array_equal(values.reshape(kept.shape), np.take_along_axis(ROWS.astype(np.float64), kept, axis))
    assert follower.differing
    assert follower.misfit is None


@pytest.mark.parametrize(
    ("function", "chosen"),
    [
        (lambda x: x.argsort(dim=1), [[2, 0, 1], [0, 1, 2]]),
        (lambda x: x.argmax(1), [2, 0]),
        (lambda x: x.argmin(), 2),
        (lambda x: x.argmax(0, keepdim=True), [[1, 1, 1]]),
    ],
)
def test_indices_alone_are_those_of_the_picks(function: Function, chosen: object) -> None:
    (indices,), _ = run_following(load(function), [np.array(chosen)])
    np.testing.assert_array_equal(indices, chosen)


def test_rounded_perturbed_and_eager_runs_follow_too() -> None:
    model = load(lambda x: (x * 3).topk(1).indices)
    operators = list_ordering_operators(model.program.graph_module)
    assert operators is not None
    follower = ChoiceFollower(operators, [np.array([[1], [2]])])
    runner = RoundingRunner(model)
    eager = EagerRunner(model)
    feeds = {"x": ROWS}
    with runner.guided(follower), eager.guided(follower):
        every = [runner.run_rounded(feeds, 0), runner.run_perturbed(feeds, 0.1, 0), eager.infer(feeds)]
    for outputs in every:
        np.testing.assert_array_equal(next(iter(outputs.values())), [[1], [2]])
    # Outside of the context, the runs make their own choices.
    np.testing.assert_array_equal(next(iter(runner.infer(feeds).values())), [[0], [1]])


@pytest.mark.parametrize(
    ("picks", "reason"),
    [
        ([[0, 0], [1, 2]], "the same score twice"),
        ([[0, 3], [1, 2]], "outside of its 3 scores"),
        ([[0, 1]], "shape"),
    ],
)
def test_picks_that_are_no_picks_are_not_followed(picks: list[list[int]], reason: str) -> None:
    (indices,), follower = run_following(load(lambda x: x.topk(2).indices), [np.array(picks)])
    np.testing.assert_array_equal(indices, [[0, 2], [1, 2]])
    assert follower.misfit is not None
    assert reason in follower.misfit.reason


def test_missing_picks_are_the_best_of_the_other_scores_and_surplus_picks_are_left_out() -> None:
    model = load(lambda x: x.topk(2).indices)
    (fewer,), _ = run_following(model, [np.array([[1], [2]])])
    np.testing.assert_array_equal(fewer, [[1, 0], [2, 1]])
    (more,), _ = run_following(model, [np.array([[1, 0, 2], [2, 0, 1]])])
    np.testing.assert_array_equal(more, [[1, 0], [2, 0]])


def test_operators_whose_indices_are_not_read_make_no_choice() -> None:
    model = load(lambda x: (x.topk(2).values, x.max(1).values, x.sort().values))
    assert list_ordering_operators(model.program.graph_module) == []


def test_only_operators_that_depend_on_each_other_have_a_fixed_order() -> None:
    for function, fixed in [
        (lambda x: (x.argmax(0), x.argmax(1)), False),
        (lambda x: (x.argmax(0), x.argmin(1)), True),
        (lambda x: x.gather(1, x.topk(2).indices).topk(1).indices, True),
    ]:
        graph = load(function).program.graph_module
        operators = list_ordering_operators(graph)
        assert operators is not None
        assert has_fixed_order(graph, operators) is fixed


def test_watcher_sees_whether_two_runs_choose_differently() -> None:
    model = load(lambda x: x.topk(2).indices)
    watcher = ChoiceWatcher(list_ordering_operators(model.program.graph_module) or ())
    runner = RoundingRunner(model)
    with runner.guided(watcher):
        runner.infer({"x": ROWS})
        runner.infer({"x": ROWS + 1})
        assert not watcher.differ
        runner.infer({"x": -ROWS})
    assert watcher.differ
