"""Checks of a tensor's values in forward."""

from __future__ import annotations

import torch
from torch import nn

import normdeploy


class Checked(nn.Module):
    """A norm beside a check of constant sizes, as detectors have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shapes = torch.as_tensor([[2, 3], [1, 1]])
        torch._check_tensor_all((shapes[:, 0] * shapes[:, 1]).sum() == 7)
        return self.norm(x)


def test_check_of_values_leaves_no_nodes() -> None:
    net = Checked().eval()
    result = normdeploy.export(net, inputs=["x[batch,4]"])
    assert [node.op_type for node in result.proto.graph.node] == ["LayerNormalization"]
    assert normdeploy.verify(net, result.proto, inputs=["x[batch,4]"])
