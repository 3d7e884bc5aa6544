"""A model that fails in PyTorch on its example inputs: the layer, both values, the line, and what to state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normdeploy.errors import InputError
from normdeploy.loading import from_module


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Identity(), layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Fixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(3, 5)


CASES: dict[str, tuple[nn.Module, str, str]] = {
    "channels last": (
        nn.Conv2d(3, 8, 3),
        "x[b,32,32,3]",
        r"the Conv2d expects 3 channels in dim 1 but got the shape \[8, 32, 32, 3\]: the channels are last; pass"
        r" --input 'x\[b,3,32,32\]'$",
    ),
    "channels": (
        nn.Conv1d(3, 8, 3),
        "x[b,4,32]",
        r"the Conv1d expects 3 channels in dim 1 but got the shape \[8, 4, 32\]; pass that many",
    ),
    "features": (nn.Linear(7, 8), "x[b,9]", r"the Linear expects 7 features but got 9; pass the sizes"),
    "float indices": (
        nn.Embedding(100, 8),
        "x[b,s]",
        r"the Embedding expects indices but got float32; .* --input 'x:int64\[b,s\]\{0:100\}'$",
    ),
    "any other": (Fixed(), "x[b,7]", r": RuntimeError: The size of tensor a .*; describe its inputs with --input"),
}


@pytest.mark.parametrize(("layer", "spec", "said"), CASES.values(), ids=CASES)
def test_failing_model_names_the_layer_both_values_and_what_to_state(layer: nn.Module, spec: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        from_module(Net(layer).eval(), inputs=[spec])
    assert "in module 'body.1', line" in str(raised.value)
    assert "test_eager_failures.py (" in str(raised.value)
    assert "\n" not in str(raised.value)
