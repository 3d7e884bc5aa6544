"""Logarithms of sums of exponentials give PyTorch's values where a plain form overflows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normdeploy
from normdeploy.ort_sessions.session import open_session

X = torch.tensor([[-300.0, -100.0, -17.0, -0.5], [0.0, 0.5, 17.0, 300.0]])
Y = torch.tensor([[-299.0, -100.0, 80.0, 0.25], [0.0, 90.0, -17.0, 300.0]])
CHANCES = torch.tensor([[0.0, 1.0, 0.25, 0.5], [1.0, 0.0, 1.0, 0.5]])
UNIT = 2.0**-24


class Computed(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "log_sigmoid": lambda x, y: F.logsigmoid(x + y - y),
    "logaddexp": torch.logaddexp,
    "logaddexp2": torch.logaddexp2,
    "loss": lambda x, y: F.binary_cross_entropy_with_logits(x, CHANCES, reduction="none") + 0 * y,
    "mean loss": lambda x, y: F.binary_cross_entropy_with_logits(x, CHANCES) + 0 * y.sum(),
    "weighted loss": lambda x, y: (
        F.binary_cross_entropy_with_logits(
            x,
            CHANCES,
            weight=torch.tensor([1.0, 2.0, 3.0, 4.0]),
            pos_weight=torch.tensor([2.0, 0.5, 1.0, 3.0]),
            reduction="sum",
        )
        + 0 * y.sum()
    ),
    "soft margin": lambda x, y: F.multilabel_soft_margin_loss(x, (CHANCES > 0.3).float()) + 0 * y.sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_large_numbers_give_the_value_of_float64(name: str) -> None:
    net = Computed(FUNCTIONS[name]).eval()
    made = normdeploy.export(net, (X, Y))
    (given,) = open_session(made.proto.SerializeToString()).run(None, {"x": X.numpy(), "y": Y.numpy()})
    right = net(X.double(), Y.double()).numpy()
    # Sums of at most a dozen terms, none larger than ten times the largest number that goes in.
    assert np.abs(given - right).max() <= 12 * UNIT * 10 * 300


def test_infinite_numbers_add_as_in_torch() -> None:
    infinite = torch.tensor([[-torch.inf, torch.inf, -torch.inf, 3.0]])
    other = torch.tensor([[-torch.inf, torch.inf, 2.0, -torch.inf]])
    made = normdeploy.export(Computed(torch.logaddexp).eval(), (X[:1], Y[:1]))
    feeds = {"x": infinite.numpy(), "y": other.numpy()}
    (given,) = open_session(made.proto.SerializeToString()).run(None, feeds)
    assert given.tolist() == torch.logaddexp(infinite, other).tolist()
