"""What a run of a model leaves behind in torch."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.loading.torch_state import preserve_torch_state


def state() -> tuple[object, ...]:
    return (
        torch._C._functorch.get_dynamic_layer_stack_depth(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


def change_all() -> None:
    torch._C._functorch._vmap_increment_nesting(2, "error")
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)


def change_all_and_fail() -> None:
    with preserve_torch_state():
        change_all()
        raise ZeroDivisionError


def test_what_a_failing_forward_changed_is_put_back() -> None:
    before = state()
    with pytest.raises(ZeroDivisionError):
        change_all_and_fail()
    assert state() == before


def test_what_a_forward_leaves_changed_is_put_back() -> None:
    before = state()
    with preserve_torch_state():
        change_all()
    assert state() == before


class Vmapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mapped: torch.Tensor = torch.vmap(lambda row: self.linear(self.norm(row)))(x)
        return mapped


class Setting(nn.Module):
    """Sets what belongs to the whole process, and fails at other sizes than 3."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        if x.shape[0] != 3:
            raise ValueError("three rows are wanted")
        result: torch.Tensor = self.linear(x)
        return result


def test_a_model_that_maps_over_rows_is_verified_and_so_is_the_next() -> None:
    comparison = normdeploy.verify(normdeploy.export(Vmapped().eval(), torch.randn(3, 8)))
    assert comparison, comparison.table()
    following = normdeploy.verify(normdeploy.export(nn.LayerNorm(8).eval(), torch.randn(3, 8)))
    assert following, following.table()


def test_a_forward_that_sets_defaults_and_fails_leaves_them() -> None:
    before = state()
    with pytest.raises(normdeploy.errors.NormdeployError, match="three rows are wanted"):
        normdeploy.export(Setting().eval(), torch.randn(2, 8))
    assert state() == before


class Derived(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.how = nn.LayerNorm(8), how

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(x)).sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "grad":
            return torch.func.grad(self.energy)(x)  # type: ignore[no-any-return]
        if self.how == "jvp":
            return torch.func.jvp(self.energy, (x,), (torch.ones_like(x),))[1]  # type: ignore[no-any-return]
        with torch.enable_grad():
            leaf = x.detach().requires_grad_(True)
            return torch.autograd.grad(self.energy(leaf), leaf)[0]


@pytest.mark.parametrize("how", ["grad", "jvp", "autograd"])
def test_a_derivative_in_the_forward_is_refused_by_name(how: str) -> None:
    before = state()
    with pytest.raises(normdeploy.errors.ExportError, match="differentiates in its forward"):
        normdeploy.export(Derived(how).eval(), torch.randn(3, 8))
    assert state() == before


def test_exports_at_the_same_time_leave_the_streams() -> None:
    streams = (sys.stdout, sys.stderr)

    def export(channels: int) -> bool:
        module = nn.Sequential(nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels)).eval()
        made = normdeploy.export(module, inputs=["x[b,3,8,8]"])
        return bool(normdeploy.verify(module, made.proto, inputs=["x[b,3,8,8]"], seeds=1))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(export, [4, 8, 12, 16]))
    assert (sys.stdout, sys.stderr) == streams
    assert torch.get_default_dtype() == torch.float32
