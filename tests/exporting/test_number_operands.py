"""A number minus an integer tensor, and other operators with a number first: torch's exporter alone fails for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from normdeploy.exporting import number_operands
from normdeploy.exporting.exporter import export_to_proto
from normdeploy.exporting.number_operands import promote_number_operands
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


def test_number_of_sizes_is_no_tensor_and_a_failure_restores_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sizes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (1.0 - x) + (x.shape[0] * 0.5 - x)

    x = torch.ones(3, 2, dtype=torch.int64)
    program = torch.export.export(Sizes().eval(), (x,), dynamic_shapes={"x": {0: torch.export.Dim("n")}})
    before = str(program.graph)
    with promote_number_operands(program):
        assert str(program.graph) != before
    assert str(program.graph) == before
    promote, calls = number_operands._promote, []

    def fail_at_second(change: Any) -> None:
        promote(change)
        calls.append(change)
        if len(calls) == 2:
            raise ValueError

    monkeypatch.setattr(number_operands, "_promote", fail_at_second)
    with pytest.raises(ValueError), promote_number_operands(program):
        pass
    assert str(program.graph) == before
