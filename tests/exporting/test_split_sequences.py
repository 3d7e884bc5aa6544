"""torch's sequences of parts are written as a Split before norms are recognized."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normdeploy
from tests.support import run_onnxruntime


class Parts(nn.Module):
    def __init__(self, split: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part * (i + 1) for i, part in enumerate(self.split(x))], -1)


SPLITS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], str]] = {
    "equal parts": (lambda x: x.split(3, -1), "x[b,6]"),
    "a shorter last part": (lambda x: x.split(4, -1), "x[b,6]"),
    "sizes": (lambda x: x.split([1, 2, 3], -1), "x[b,6]"),
    "chunks": (lambda x: x.chunk(2, -1), "x[b,6]"),
    "a part that nothing reads": (lambda x: x.split([1, 2, 3], -1)[::2], "x[b,6]"),
    "parts in another order": (lambda x: x.split([1, 2, 3], -1)[::-1], "x[b,6]"),
}


@pytest.mark.parametrize("name", SPLITS)
def test_parts_are_of_one_split(name: str) -> None:
    split, spec = SPLITS[name]
    x = torch.randn(2, 6)
    net = Parts(split).eval()
    proto = normdeploy.export(net, (x,), inputs=[spec]).proto
    ops = [n.op_type for n in proto.graph.node]
    assert ops.count("Split") == 1
    assert not {"SplitToSequence", "SequenceAt"} & {*ops}
    np.testing.assert_array_equal(run_onnxruntime(proto, {"x": x.numpy()})[0], net(x).numpy())


class NormPerHead(nn.Module):
    """The layer norms of StableLM's heads."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(heads))
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(x, 1, dim=1)
        return torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], 1)


def test_norms_of_parts_are_merged_at_the_export() -> None:
    net = NormPerHead(4, 8).eval()
    x = torch.randn(2, 4, 5, 8)
    proto = normdeploy.export(net, (x,), inputs=["x[b,4,s,8]"]).proto
    assert [n.op_type for n in proto.graph.node] == ["LayerNormalization", "Mul"]
    with torch.no_grad():
        expected = net(x).numpy()
    np.testing.assert_allclose(run_onnxruntime(proto, {"x": x.numpy()})[0], expected, rtol=1e-5, atol=1e-6)
