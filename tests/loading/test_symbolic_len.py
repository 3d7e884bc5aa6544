"""``len(x)`` of a tensor while a model is traced."""

from __future__ import annotations

import torch
from torch import nn

from normdeploy.loading import from_module
from normdeploy.loading.symbolic_len import trace_len_symbolically


class Counted(nn.Module):
    """Queries for each sample of a batch, counted by ``len``, as many detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.queries.repeat(len(x), 1, 1)
        return torch.cat([queries, x[:, None].expand(-1, len(self.queries[0]), -1)], 1)


def test_len_of_a_tensor_stays_dynamic() -> None:
    model = from_module(Counted().eval(), inputs=["x[batch,4]"])
    assert [str(dim) for dim in model.inputs[0].shape] == ["batch=1:8:64", "4"]


def test_len_is_pythons_own_again_after_the_trace() -> None:
    with trace_len_symbolically(Counted()):
        assert "len" in globals()
    assert "len" not in globals()
