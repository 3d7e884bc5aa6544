"""A failure that needs certain integers says which."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import normdeploy
from normdeploy.verbs.verify.failure_inputs import find_failing_integers


def lengths(*values: int) -> dict[str, np.ndarray]:
    return {"x": np.ones(3, np.float32), "lengths": np.array(values)}


def test_an_integer_that_every_failing_case_has_is_named() -> None:
    told = find_failing_integers([lengths(0, 7), lengths(5, 0)], [lengths(7, 5), lengths(1, 12)])
    assert told == "only when 'lengths' contains 0, which no passing input contains"


def test_an_integer_that_a_passing_case_has_too_is_not_named() -> None:
    assert not find_failing_integers([lengths(0, 7)], [lengths(0, 5), lengths(9, 7)])


def test_an_integer_between_those_that_pass_is_not_named() -> None:
    """Of token ids one that is drawn once says nothing."""
    assert not find_failing_integers([lengths(3, 7)], [lengths(2, 5), lengths(9, 7)])


class Mean(nn.Module):
    """The mean of as many elements as the length says."""

    is_guarded = True

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        counts = lengths.clamp(min=1) if self.is_guarded else lengths
        return (x * mask).sum(1) / counts.to(x.dtype)


def test_a_file_that_gives_nan_at_length_0_alone_says_so(tmp_path: Path) -> None:
    damaged = Mean().eval()
    damaged.is_guarded = False
    args = (torch.randn(2, 12), torch.tensor([12, 7]))
    torch.onnx.export(damaged, args, tmp_path / "mean.onnx", dynamo=True, verbose=False)
    found = normdeploy.verify(Mean().eval(), tmp_path / "mean.onnx", args, seeds=1)
    failed = [r for r in found.results if not r]
    assert failed
    assert all("only when 'lengths' contains 0, which no passing input contains" in r.reason for r in failed)
