"""Asserts of the trace: torch's guesses go, what the module asks for stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import normdeploy
from normdeploy.errors import InputError
from normdeploy.loading.live_module import from_module
from normdeploy.model import LoadedModel
from normdeploy.runtimes.torch_runners import EagerRunner

DIMS = ["b=1:2:4", "h=8:16:32", "w=8:16:32"]


def _padded(x: torch.Tensor, step: int) -> torch.Tensor:
    h, w = x.shape[-2:]
    return functional.pad(x, (0, (step - w % step) % step, 0, (step - h % step) % step))


class PadsToFours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, w = x.shape[-2:]
        y = self.conv(_padded(x, 4))
        return (y * functional.adaptive_avg_pool2d(y, 1))[:, :, :h, :w]


class PadsToWindows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, w = x.shape[-2:]
        y = _padded(x, 2)
        b, c, high, wide = y.shape
        windows = y.reshape(b, c, high // 2, 2, wide // 2, 2).softmax(-1)
        return windows.reshape(b, c, high, wide)[:, :, :h, :w]


class Branches(PadsToFours):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if x.shape[-1] % 4 == 0 else y * 1.5


class Asks(PadsToFours):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[-1] % 4 == 0)
        return super().forward(x)


def _traced(net: nn.Module) -> LoadedModel:
    torch.manual_seed(0)
    return from_module(net.eval(), torch.randn(2, 3, 16, 16), inputs=["x[b,3,h,w]"], dims=DIMS)


@pytest.mark.parametrize("net", [PadsToFours(), PadsToWindows()])
def test_a_model_that_pads_to_a_multiple_runs_at_every_size(net: nn.Module) -> None:
    model, x = _traced(net), torch.randn(1, 3, 13, 22)
    with EagerRunner(model) as runner, torch.no_grad():
        (given,) = runner.infer({"x": x.numpy()}).values()
        assert torch.allclose(torch.from_numpy(given), net(x), rtol=1e-6, atol=1e-6)


def test_verify_of_a_model_that_pads_leaves_no_size_out() -> None:
    torch.manual_seed(0)
    result = normdeploy.export(PadsToFours().eval(), torch.randn(2, 3, 16, 16), inputs=["x[b,3,h,w]"], dims=DIMS)
    verdict = normdeploy.verify(result, seeds=3)
    assert verdict
    assert not [note for note in verdict.notes if "not run" in note]


@pytest.mark.parametrize("net", [Branches(), Asks()])
def test_a_branch_or_the_users_own_condition_limits_the_sizes(net: nn.Module) -> None:
    model = _traced(net)
    with EagerRunner(model) as runner, pytest.raises(InputError, match="multiples of 4: use 16 or 20"):
        runner.infer({"x": torch.randn(1, 3, 16, 18).numpy()})


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[1] % 2 == 0)
        return x.reshape(x.shape[0], x.shape[1] // 2, 8)


def test_a_guess_goes_though_the_module_refuses_other_sizes() -> None:
    """The trace asks that half of the length is not 1; of 3 elements, the module asks for an even number."""
    args = (torch.randn(2, 6, 4),)
    made = normdeploy.export(Halves().eval(), args, inputs=["x[b,l,4]"])
    assert normdeploy.verify(Halves().eval(), made.proto, args, inputs=["x[b,l,4]"])


class Subsamples(nn.Module):
    """Two convolutions of stride 2, as before a speech encoder. torch can't decide conditions on the divided length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv1d(8, 8, 5, stride=2), nn.Conv1d(8, 8, 5, stride=2)
        self.mix = nn.Conv1d(8, 8, 3, padding="same", groups=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x.transpose(1, 2))).transpose(1, 2)
        return y + 2 * self.mix(y.transpose(1, 2)).transpose(1, 2)


def test_model_with_a_divided_length_takes_each_size_of_a_stated_range() -> None:
    net = Subsamples().eval()
    model = from_module(net, inputs=["x[batch,frames,8]"], dims=["batch=1:2:3", "frames=17:32:64"])
    for frames in (17, 18, 20, 33, 64):
        x = torch.randn(2, frames, 8)
        with EagerRunner(model) as runner, torch.no_grad():
            (given,) = runner.infer({"x": x.numpy()}).values()
            torch.testing.assert_close(torch.from_numpy(given), net(x))


def test_range_below_the_sizes_of_the_trace_is_refused_without_multiples() -> None:
    with pytest.raises(InputError, match="accepts only from 17 to 64"):
        from_module(Subsamples().eval(), inputs=["x[batch,frames,8]"], dims=["batch=1:2:3", "frames=16:32:64"])
