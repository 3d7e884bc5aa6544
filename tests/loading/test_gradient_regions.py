"""Regions without gradients, or without autocast: their operators stand in the main graph of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normdeploy.loading import from_module, from_program
from normdeploy.loading.gradient_regions import has_gradient_regions, inline_gradient_regions
from normdeploy.runtimes.ordering_operators import list_ordering_operators


class Picker(nn.Module):
    """Select the highest scores without gradients, as the indexer of a sparse attention does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Linear(8, 8)

    @torch.no_grad()
    def pick(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.scores(x).topk(2, -1).indices

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self.pick(x)
        return x.gather(-1, chosen), chosen


class Casting(nn.Module):
    """Multiply in bfloat16, with a region without gradients inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.inner(x)
            with torch.no_grad():
                z = self.inner(y) + y
            with torch.autocast("cpu", enabled=False):
                return self.inner(x) + z.float()


class Nested(nn.Module):
    """Multiply in bfloat16 in a region without gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.inner(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = self.inner(y)
        return x + z


def traced(module: nn.Module) -> torch.export.ExportedProgram:
    return torch.export.export(module.eval(), (torch.ones(3, 8),))


def test_choice_in_a_region_is_listed() -> None:
    model = from_module(Picker().eval(), inputs=["x[3,8]"])
    operators = list_ordering_operators(model.program.graph_module)
    assert operators is not None
    assert [operator.name for operator in operators] == ["topk"]


@pytest.mark.parametrize("module", [Picker, Casting, Nested])
def test_inlined_program_computes_the_same(module: type[nn.Module]) -> None:
    x = torch.linspace(-1, 2, 24).reshape(3, 8)
    program = traced(module())
    assert has_gradient_regions(program) or module is Casting
    expected = program.module()(x)
    inline_gradient_regions(program)
    assert not has_gradient_regions(program)
    torch.testing.assert_close(program.module()(x), expected, rtol=0, atol=0)
    # The outputs of the signature are nodes of the graph.
    program.validate()
    program.run_decompositions()


def test_region_with_another_autocast_stays_nested() -> None:
    program = traced(Casting())
    inline_gradient_regions(program)
    targets = [str(node.target) for node in program.graph_module.graph.nodes]
    assert any("wrap_with_autocast" in target for target in targets)
    nested = [str(n.target) for m in program.graph_module.children() for n in m.graph.nodes]  # type: ignore[union-attr]
    assert not any("set_grad" in target for target in nested)


def test_program_in_memory_is_not_changed() -> None:
    program = traced(Picker())
    model = from_program(program)
    assert has_gradient_regions(program)
    assert not has_gradient_regions(model.program)
