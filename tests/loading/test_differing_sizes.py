"""Sizes at which the module's code takes another branch than the trace are not sizes of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.errors import InputError
from normdeploy.loading.live_module import from_module


class AtLeastTwo(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if 2 * x.shape[0] >= 4 else x * 3


class MoreThanOneStep(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.reshape(-1, 8)
        return y * 2 if y.shape[0] > 1 else y * 3


class ProductOfSizes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] * x.shape[1] >= 4 else x * 3


class PastOrNone(nn.Module):
    def forward(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        y = torch.cat([past, x])
        return y * 2 if past.shape[0] != 1 else y * 3


class EvenSizes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x * 3


class EqualSizes(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() + y.sum() if x.shape[0] == y.shape[0] else x.sum() - y.sum()


@pytest.mark.parametrize(
    ("module", "inputs", "least"),
    [
        (AtLeastTwo(), ["x[n,4]"], {"n": 2}),
        (ProductOfSizes(), ["x[n,m]"], {"n": 2, "m": 2}),
        (PastOrNone(), ["x[n,4]", "past[past_n,4]"], {"n": 1, "past_n": 2}),
    ],
)
def test_sizes_that_nobody_stated_begin_above_another_branch(
    module: nn.Module, inputs: list[str], least: dict[str, int]
) -> None:
    model = from_module(module.eval(), inputs=inputs)
    assert {name: dim.min for name, dim in model.named_dims.items()} == least
    assert sum("takes another branch" in note for note in model.notes) == sum(size == 2 for size in least.values())


@pytest.mark.parametrize(
    ("module", "dim", "told"),
    [
        (AtLeastTwo(), "n=1:4:8", r"at n=1, .* another branch than at n=2, .*: start at 2, with --dim n=2:4:8,"),
        (AtLeastTwo(), "n=0:4:8", r"at n=1, .* another branch than at n=2"),
        (AtLeastTwo(), "n=1:1:2", r"start at 2, with --dim n=2:2:2,"),
    ],
)
def test_a_stated_range_with_two_branches_is_refused(module: nn.Module, dim: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        from_module(module.eval(), inputs=["x[n,4]"], dims=[dim])


def test_a_stated_range_of_one_branch_is_taken() -> None:
    assert not from_module(AtLeastTwo().eval(), inputs=["x[n,4]"], dims=["n=2:4:8"]).notes
    assert not from_module(AtLeastTwo().eval(), inputs=["x[n,4]"], dims=["n=1:1:1"]).notes


def test_the_branch_of_one_step_is_not_the_branch_of_two_steps() -> None:
    with pytest.raises(InputError, match="contains the size 2"):
        from_module(MoreThanOneStep().eval(), inputs=["x[n,4]"], dims=["n=2:4:8:2"])


@pytest.mark.parametrize("dims", [(), ("n=2:4:8",)])
def test_a_branch_for_multiples_leaves_the_multiples(dims: tuple[str, ...]) -> None:
    model = from_module(EvenSizes().eval(), inputs=["x[n,4]"], dims=dims)
    assert model.named_dims["n"].step == 2


def test_equal_sizes_with_another_branch_are_refused() -> None:
    with pytest.raises(InputError, match=r"at n = m = 2, .* use one name .* or fix one of them.*--dim m=8:8:8"):
        from_module(EqualSizes().eval(), inputs=["x[n,4]", "y[m,4]"])
    assert from_module(EqualSizes().eval(), inputs=["x[n,4]", "y[n,4]"]).named_dims.keys() == {"n"}


def test_a_python_file_has_the_same_limit(tmp_path: Path) -> None:
    source = tmp_path / "net.py"
    source.write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * 2 if x.shape[0] > 1 else x * 3\n"
        "def make():\n"
        "    return Net().eval()\n"
    )
    with pytest.raises(InputError, match="at n=1"):
        normdeploy.export(f"{source}:make", inputs=["x:float32[n,4]"], dims=["n=1:4:8"], trust=True)


class Noisy(nn.Module):
    """Module whose results differ from call to call, whatever the sizes are."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls


class Drawing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape[0])


class RefusesOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            raise ValueError("one row")
        return x * 2


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x * self.count


@pytest.mark.parametrize("module", [Noisy(), Drawing(), RefusesOne(), Counting()])
def test_a_module_that_differs_for_another_reason_keeps_its_sizes(module: nn.Module) -> None:
    state = torch.get_rng_state()
    model = from_module(module.eval(), inputs=["x[n]"])
    assert model.named_dims["n"].min == 1
    assert all(not value.any() for value in model.program.state_dict.values())
    assert torch.equal(torch.get_rng_state(), state)
