"""Random roundings of a model whose rounding decides a choice: which of two nearly equal scores is larger."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from normdeploy.compare.error_bounds import MOST_RUNS
from normdeploy.loading import from_module
from normdeploy.model import LoadedModel
from normdeploy.runtimes import RunResult
from normdeploy.runtimes.rounding_noise import FLOAT32
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


def find_unmoved(moved: RunResult) -> str | None:
    """Find a sample for which no draw has chosen the other box."""
    return None if all((change > 0.5).all() for change in moved.values()) else "a box"


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
    assert all(change.max() <= 3 * 2.2 * FLOAT32 for change in effect.moved.values())
