"""A number minus an integer tensor, and other operators with a number first: torch's exporter alone fails for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from normdeploy.exporting.exporter import export_to_proto
from normdeploy.loading import from_module


class Formula(nn.Module):
    def __init__(self, formula: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(x)


class Branches(nn.Module):
    """The subtraction is in a body of a conditional, which is a graph of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 4, lambda x: 1.5 - x, lambda x: 2.5 - x, (x,))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize(
    "module",
    [
        Formula(lambda x: 1.0 - x),
        Formula(lambda x: (1.5 - x) * -10000.0),
        Formula(lambda x: torch.rsub(x, 0.5, alpha=2)),
        Formula(lambda x: 7.5 // (x + 1)),
        Formula(lambda x: 5 // (x + 1)),
        Formula(lambda x: x // 2.5),
        Formula(lambda x: (x - 1) // 2),
        Formula(lambda x: torch.div(7.5, x + 1)),
        Formula(lambda x: torch.sub(7.5, x, alpha=2)),
        Formula(lambda x: torch.mul(7.5, x)),
        Formula(lambda x: torch.div(7.5, x + 1, rounding_mode="trunc")),
        Formula(lambda x: 1.0 - x.bool().to(x.dtype)),
        Branches(),
    ],
    ids=[
        "sub",
        "mask",
        "rsub",
        "divided",
        "divided integer",
        "divisor",
        "integers",
        "quotient",
        "scaled",
        "product",
        "truncated",
        "bool",
        "body",
    ],
)
def test_number_before_integers_is_exported(module: nn.Module, dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 3], [2, 1, 0]], dtype=dtype)
    model = from_module(module.eval(), (x,))
    before = str(model.program.graph_module.code)
    proto = export_to_proto(model)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (given,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    wanted = module(x).numpy()
    assert given.dtype == wanted.dtype
    np.testing.assert_array_equal(given, wanted)
    assert str(model.program.graph_module.code) == before
