"""Epsilons that a file has and the model has not, where no output shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

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


WORDS = (torch.tensor([0, 3, 8, 5]),)


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("reference", ["module", "file"])
def test_a_foreign_epsilon_is_named_and_the_models_are_not(reference: str, dynamo: bool, tmp_path: Path) -> None:
    notes = {}
    for epsilon in (1e-6, 3e-6):
        path = tmp_path / f"{epsilon}.onnx"
        if dynamo:
            torch.onnx.export(Words(epsilon).eval(), WORDS, dynamo=True, verbose=False).save(path)
        else:
            torch.onnx.export(Words(epsilon).eval(), WORDS, path, dynamo=False)
        model = Words(1e-6).eval() if reference == "module" else tmp_path / f"{1e-6}.onnx"
        comparison = verify(model, path, WORDS if reference == "module" else (), seeds=1)
        notes[epsilon] = [note for note in comparison.notes if "epsilon" in note]
    assert notes[1e-6] == []
    (note,) = notes[3e-6]
    assert "the epsilon 3e-06 of" in note
    assert "none of the model's (1e-06, 1e-05)" in note
