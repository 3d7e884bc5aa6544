"""Random roundings of a model whose rounding decides a choice: which of two nearly equal scores is larger."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from normdeploy.compare.error_bounds import MOST_RUNS, ErrorBounds
from normdeploy.compare.perturbation import find_unexplained
from normdeploy.loading import from_module
from normdeploy.model import LoadedModel
from normdeploy.runtimes import RunResult
from normdeploy.runtimes.rounding_noise import FLOAT32, RoundingRunner
from normdeploy.verbs.verify.rounding_effect import RoundingEffect


class Ranked(nn.Module):
    """Return the box with the higher of two scores, as a detector does for each of its queries.

    The scores differ by ``units`` times the spacing of float32 numbers. The drawn errors alone never reverse four
    units. With the margin of choices, one draw in ten reverses them, and no draw reverses a thousand units.
    """

    def __init__(self, units: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.tensor([0.65, 0.65 - units * 2.0**-24]))
        self.boxes = nn.Parameter(torch.tensor([[1.0], [2.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = (self.scores * x).topk(1, dim=-1).indices
        return self.boxes[best[:, 0]]


def ranked(units: int) -> LoadedModel:
    return from_module(Ranked(units).eval(), inputs=["x[batch,1]"])


# Eight draws reverse the order in all samples with a probability of 1 %, 48 draws with one of 94 %.
FEEDS = {"x": np.linspace(1.1, 1.9, 8, dtype=np.float32)[:, None]}


def find_unmoved(moved: RunResult, chosen: RunResult) -> str | None:
    """Find a sample for which no draw has chosen the other box."""
    return None if all((np.maximum(moved[name], chosen[name]) > 0.5).all() for name in moved) else "a box"


def test_choices_that_few_draws_miss_are_explained_by_more_draws() -> None:
    effect = RoundingEffect(ranked(4), FEEDS, FLOAT32)
    assert effect.find_beyond(find_unmoved) is None
    assert 8 < effect.draws <= MOST_RUNS


def test_choice_that_rounding_does_not_decide_stays_unexplained() -> None:
    effect = RoundingEffect(ranked(1000), FEEDS, FLOAT32)
    assert effect.find_beyond(find_unmoved) == "a box"
    assert effect.draws == MOST_RUNS


def test_ordered_values_keep_the_drawn_error() -> None:
    """The margin holds for the choice alone: a wrong score among the chosen ones still shows."""

    class Scores(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 1.1).topk(2, dim=-1).values

    model = from_module(Scores().eval(), inputs=["x[batch,4]"])
    feeds = {"x": np.random.default_rng(0).uniform(1, 2, (16, 4)).astype(np.float32)}
    effect = RoundingEffect(model, feeds, FLOAT32)
    effect.draw(8)
    # A product and its factor are rounded, and the operand of topk: three roundings of numbers below 2.2.
    for changes in (effect.moved, effect.chosen):
        assert all(change.max() <= 3 * 2.2 * FLOAT32 for change in changes.values())


def test_bound_allows_the_other_box_of_a_near_tie_and_no_third_one() -> None:
    """PyTorch returns box 1. A file returns the other box, or 4.9, which is neither of the two boxes."""
    runner = RoundingRunner(ranked(4))
    (output,), reference = runner.infer(FEEDS), runner.infer(FEEDS)
    eager = {output: np.ones((8, 1), np.float32)}
    bounds = ErrorBounds(
        reference, eager, partial(runner.run_rounded, FEEDS), reordered=partial(runner.run_reordered, FEEDS)
    )
    wrong = np.abs(np.full((8, 1), 4.9) - reference[output])
    assert (wrong > bounds.allowed_error(output, 1.0, wrong)).all()
    other = np.abs(np.full((8, 1), 2.0) - reference[output])
    assert (other <= bounds.allowed_error(output, 1.0, other)).all()


class Largest(nn.Module):
    """Return value and index of the larger of two scores that differ by four units."""

    def __init__(self, find: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.find = find
        self.scores = nn.Parameter(torch.tensor([0.65, 0.65 - 4 * 2.0**-24]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.find(self.scores * x)


@pytest.mark.parametrize(
    "find",
    [
        lambda y: y.max(-1),
        lambda y: y.max(dim=-1, keepdim=True),
        lambda y: y.neg().min(1),
        lambda y: y.neg().kthvalue(1),
        lambda y: y.sort(descending=True),
    ],
    ids=["max", "max with its axis", "min", "kthvalue", "sort"],
)
def test_operators_that_return_values_and_indices_choose_with_the_margin(
    find: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    model = from_module(Largest(find).eval(), inputs=["x[batch,1]"])
    effect = RoundingEffect(model, FEEDS, FLOAT32)
    effect.draw(48)
    (values, indices) = model.outputs
    assert not effect.moved[indices].any()
    assert (effect.chosen[indices] == 1).any()
    # The two scores differ by four units of 2**-24 times x, and are rounded besides.
    assert max(effect.moved[values].max(), effect.chosen[values].max()) < 20 * FLOAT32


class Classes(nn.Module):
    """Return the class of each sample. The shape is [batch], so the batch is one row."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.tensor([0.65, 0.65 - 4 * 2.0**-24, 0.1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scores * x).argmax(-1)


def test_near_tie_of_one_sample_explains_no_class_of_another_sample() -> None:
    model = from_module(Classes().eval(), inputs=["x[batch,3]"])
    feeds = {"x": np.array([[1.5, 1.5, 1.5], [0.0, 0.5, 9.0]], np.float32)}
    (output,) = model.outputs
    find = RoundingEffect(model, feeds, FLOAT32).find_beyond
    right, tied, wrong = np.array([0, 2]), np.array([1, 2]), np.array([0, 1])
    assert find(lambda moved, chosen: find_unexplained(tied, right, moved[output], 0.0, chosen[output])) is None
    assert find(lambda moved, chosen: find_unexplained(wrong, right, moved[output], 0.0, chosen[output])) is not None


class Settled(nn.Module):
    """Return the place of the larger of two numbers that depend on sizes alone. They differ by four units."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = torch.arange(2, device=x.device)
        scores = (x.shape[0] * 0 + each) * -(4 * 2.0**-24) + 0.65
        return x + scores.argmax(-1)


def test_order_of_numbers_that_depend_on_no_data_is_never_reversed() -> None:
    model = from_module(Settled().eval(), inputs=["x[batch,1]"])
    effect = RoundingEffect(model, FEEDS, FLOAT32)
    effect.draw(16)
    assert all((change < 0.5).all() for change in (*effect.moved.values(), *effect.chosen.values()))
