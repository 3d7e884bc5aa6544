"""The comparison of an exported file with PyTorch uses the model that was traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import normdeploy


class Cancelling(nn.Module):
    """Subtract two products that are equal without rounding, so that only the effect of rounding explains errors."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(32, 4, generator=generator))
        self.register_buffer("order", torch.randperm(32, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight - x[:, self.order] @ self.weight[self.order]


INPUTS = {"inputs": ["x[batch,32]"], "dims": ["batch=1:2:8"]}


def test_model_is_traced_once_if_only_rounding_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    trace = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        traces.append(args)
        return trace(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    normdeploy.export(Cancelling().eval(), **INPUTS)
    assert len(traces) == 1


def test_file_with_renamed_inputs_is_compared_with_pytorch() -> None:
    result = normdeploy.export(Cancelling().eval(), **INPUTS, input_names=["a"], output_names=["b"])
    assert not [note for note in result.notes if "not compared with PyTorch" in note]
