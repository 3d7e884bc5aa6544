"""Epsilons that a file has and the model has not, where no output shows them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnxruntime.transformers.float16 import convert_float_to_float16
from torch import nn

import normdeploy
from normdeploy import verify


class Words(nn.Module):
    """Norms of embeddings, which no input makes small."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer, self.group = nn.Embedding(9, 16), nn.LayerNorm(16, eps=1e-6), nn.GroupNorm(2, 16)
        self.epsilon = epsilon

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.group(self.layer(self.table(words)))
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)


class Tripled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(3.0 * x, (16,), eps=1e-6)


WORDS = (torch.tensor([0, 3, 8, 5]),)


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("reference", ["module", "file"])
def test_a_foreign_epsilon_is_named_and_the_models_are_not(reference: str, dynamo: bool, tmp_path: Path) -> None:
    notes = {}
    for epsilon in (1e-6, 1e-7):
        path = tmp_path / f"{epsilon}.onnx"
        if dynamo:
            torch.onnx.export(Words(epsilon).eval(), WORDS, dynamo=True, verbose=False).save(path)
        else:
            torch.onnx.export(Words(epsilon).eval(), WORDS, path, dynamo=False)
        model = Words(1e-6).eval() if reference == "module" else tmp_path / f"{1e-6}.onnx"
        comparison = verify(model, path, WORDS if reference == "module" else (), seeds=1)
        notes[epsilon] = [note for note in comparison.notes if "epsilon" in note]
    assert notes[1e-6] == []
    (note,) = notes[1e-7]
    assert "the epsilon 1e-07 of" in note
    assert "not one of the model's (1e-06, 1e-05)" in note


def test_an_epsilon_that_half_precision_can_not_hold_is_the_models(tmp_path: Path) -> None:
    torch.onnx.export(Words(1e-9).eval(), WORDS, tmp_path / "wide.onnx", dynamo=False)
    onnx.save(convert_float_to_float16(onnx.load(tmp_path / "wide.onnx")), tmp_path / "half.onnx")
    notes = verify(Words(1e-9).eval(), tmp_path / "half.onnx", WORDS, seeds=1).notes
    assert not any("the epsilon" in note for note in notes)


def test_an_epsilon_into_which_a_scale_was_folded_is_the_models(tmp_path: Path) -> None:
    """LayerNorm of 3x has an epsilon of 1e-6 / 9 where the factor is gone."""
    model = nn.Sequential(nn.Linear(16, 16), Tripled()).eval()
    normdeploy.export(model, torch.ones(2, 16), output=tmp_path / "m.onnx")
    notes = verify(model, tmp_path / "m.onnx", (torch.ones(2, 16),), seeds=1).notes
    assert not any("the epsilon" in note for note in notes)
