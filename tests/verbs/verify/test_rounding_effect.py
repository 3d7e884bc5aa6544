"""Random roundings of a model whose rounding decides a choice: which of two nearly equal scores is larger."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from normdeploy.compare.error_bounds import MOST_RUNS, RUNS
from normdeploy.compare.perturbation import find_unexplained
from normdeploy.loading import from_module
from normdeploy.model import LoadedModel
from normdeploy.runtimes import RunResult
from normdeploy.runtimes.rounding_noise import FLOAT32, RoundingRunner
from normdeploy.runtimes.torch_runners import Float64Runner
from normdeploy.verbs.verify.rounding_effect import RoundingEffect


class Ranked(nn.Module):
    """Return the box with the higher of two scores, as a detector does for each of its queries.

    The scores differ by ``units`` times the spacing of float32 numbers. Eight draws reverse one unit in some of the
    samples only, and no draw reverses a thousand units.
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


FEEDS = {"x": np.linspace(1.1, 1.9, 8, dtype=np.float32)[:, None]}


def find_unmoved(moved: RunResult) -> str | None:
    """Find a sample for which no draw has chosen the other box."""
    return None if all((change > 0.5).all() for change in moved.values()) else "a box"


def test_choices_that_few_draws_miss_are_explained_by_more_draws() -> None:
    effect = RoundingEffect(ranked(1), FEEDS, FLOAT32)
    assert effect.find_beyond(find_unmoved) is None
    assert 8 < effect.draws <= MOST_RUNS


def test_difference_that_one_draw_explains_needs_no_more_draws() -> None:
    effect = RoundingEffect(ranked(1), FEEDS, FLOAT32)
    assert effect.find_beyond(lambda moved: None if any(map(np.any, moved.values())) else "a box") is None
    assert effect.draws == 1


def test_difference_that_errors_of_eager_explain_needs_no_draw() -> None:
    model = ranked(1)
    (output,) = model.outputs
    beside = {output: np.full((8, 1), 1.5, np.float32)}
    effect = RoundingEffect(model, FEEDS, FLOAT32, beside)
    assert effect.find_beyond(lambda moved: None if (moved[output] == 0.5).all() else "a box") is None
    assert effect.draws == 0


def test_choice_that_rounding_does_not_decide_stays_unexplained() -> None:
    effect = RoundingEffect(ranked(1000), FEEDS, FLOAT32)
    assert effect.find_beyond(find_unmoved) == "a box"
    assert effect.draws == MOST_RUNS


class Classes(nn.Module):
    """Return the class of each sample. The shape is [batch], so the batch is one row."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.tensor([0.65, 0.65 - 2.0**-24, 0.1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scores * x).argmax(-1)


def test_near_tie_of_one_sample_explains_no_class_of_another_sample() -> None:
    model = from_module(Classes().eval(), inputs=["x[batch,3]"])
    feeds = {"x": np.array([[1.5, 1.5, 1.5], [0.0, 0.5, 9.0]], np.float32)}
    (output,) = model.outputs
    find = RoundingEffect(model, feeds, FLOAT32).find_beyond
    right, tied, wrong = np.array([0, 2]), np.array([1, 2]), np.array([0, 1])
    assert find(lambda moved: find_unexplained(tied, right, moved[output], 0.0)) is None
    assert find(lambda moved: find_unexplained(wrong, right, moved[output], 0.0)) is not None


class Sums(NamedTuple):
    """Sums of 64 products, one in each row, with their draws."""

    model: LoadedModel
    feeds: dict[str, np.ndarray]
    output: str
    right: np.ndarray
    drawn: np.ndarray
    typical: np.ndarray

    def scale_beside(self, errors: np.ndarray) -> np.ndarray:
        """Return the multiples of the draws in each row, if eager has these errors."""
        beside = {self.output: self.right + errors}
        effect = RoundingEffect(self.model, self.feeds, FLOAT32, beside)
        effect.draw(RUNS)
        return effect.moved[self.output] / self.drawn


@pytest.fixture(scope="module")
def sums() -> Sums:
    torch.manual_seed(0)
    model = from_module(nn.Linear(64, 1).eval(), inputs=["x[batch,64]"])
    feeds = {"x": np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)}
    (output,) = model.outputs
    runner = RoundingRunner(model)
    right = runner.infer(feeds)[output]
    rounded = np.array([runner.run_rounded(feeds, seed)[output] for seed in range(RUNS)])
    perturbed = np.array([runner.run_perturbed(feeds, FLOAT32, seed)[output] for seed in range(RUNS)])
    largest = np.maximum(np.abs(rounded - right), np.abs(perturbed - right))
    # ``beside`` is float64 here, so it has no spacing of its own.
    return Sums(model, feeds, output, right, largest.max(0), np.sqrt(np.square(largest).mean(0)))


@pytest.mark.parametrize(("multiple", "expected"), [(0.5, 1.0), (3.0, 3.0), (100.0, 8.0)])
def test_errors_of_eager_scale_the_draws_up_to_eightfold(sums: Sums, multiple: float, expected: float) -> None:
    errors = multiple * sums.typical
    # Eager has no error in one row, so only the scaled draws move it.
    errors[0] = 0.0
    np.testing.assert_allclose(sums.scale_beside(errors)[0], expected, rtol=0.01)


def test_choice_of_eager_in_one_row_scales_no_draws_of_other_rows(sums: Sums) -> None:
    errors = sums.typical.copy()
    errors[0] *= 1000
    scales = sums.scale_beside(errors)
    assert scales[0] > 100
    np.testing.assert_allclose(scales[1:], 1.0)


def test_draws_that_are_small_by_chance_scale_no_draws_of_other_rows(sums: Sums) -> None:
    errors = np.full_like(sums.typical, np.sqrt(np.square(sums.typical).mean()))
    # In one of the rows, all draws are small.
    assert (errors / sums.drawn).max() > 2
    assert np.median(sums.scale_beside(errors)) < 1.5


def test_few_draws_are_not_scaled() -> None:
    model = from_module(nn.Linear(4, 1).eval(), inputs=["x[batch,4]"])
    feeds = {"x": np.ones((2, 4), np.float32)}
    (output,) = model.outputs
    beside = Float64Runner(model).infer(feeds)[output]
    beside[0] += 1
    effect = RoundingEffect(model, feeds, FLOAT32, {output: beside})
    effect.draw(1)
    plain = RoundingEffect(model, feeds, FLOAT32)
    plain.draw(1)
    np.testing.assert_array_equal(effect.moved[output][1:], plain.moved[output][1:])


@pytest.mark.parametrize(("change", "expected"), [(2.0, 2.0), (1e6, 8.0)])
def test_runs_of_another_evaluation_explain_up_to_eight_draws(sums: Sums, change: float, expected: float) -> None:
    effect = RoundingEffect(sums.model, sums.feeds, FLOAT32)
    effect.draw(RUNS)
    before = effect.moved[sums.output].copy()
    changes = np.zeros_like(before)
    changes[3] = change * before[3]
    effect.include_runs({sums.output: changes})
    after = effect.moved[sums.output]
    # The reference is float64 here, so the last rounding adds next to nothing to the draw.
    np.testing.assert_allclose(after[3], expected * before[3], rtol=1e-6)
    np.testing.assert_array_equal(np.delete(after, 3), np.delete(before, 3))
