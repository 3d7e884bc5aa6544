"""A module is compared with its trace without being changed, and the trace's run is kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from normdeploy.loading import trace_comparison
from normdeploy.loading.live_module import from_module
from normdeploy.loading.trace_comparison import ParameterGuard
from normdeploy.runtimes.torch_runners import EagerRunner
from normdeploy.verbs.verify.export_check import run_expected


class WritesItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            self.weight.view(-1).mul_(2)
        return x @ self.weight


class AddsInPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1) * 2


@pytest.fixture(params=[0, 2**25])
def least_guarded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(trace_comparison, "LARGE", request.param)
    return int(request.param)


@pytest.mark.usefixtures("least_guarded")
def test_a_module_that_writes_its_weight_at_one_size_stays_as_it_is() -> None:
    module = WritesItsWeight().eval()
    model = from_module(module, inputs=["x[n,4]"], shared=True)
    assert (module.weight == 1).all()
    # The trace does not write, so that the size 1 is left out.
    assert model.named_dims["n"].min == 2


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.add_(1),
        lambda w: w.view(-1)[2:].zero_(),
        lambda w: torch.add(w, 1, out=w),
        lambda w: w.data.copy_(torch.zeros(4, 4)),
        lambda w: torch._foreach_mul_([torch.ones(1), w], 2),
        lambda w: w.__setitem__((0, 0), 5),
    ],
)
def test_a_write_to_a_parameter_is_stopped_before_it_happens(write: object) -> None:
    layer = nn.Linear(4, 4, bias=False).requires_grad_(False)
    before = layer.weight.clone()
    assert callable(write)
    with pytest.raises(RuntimeError, match="writes to a parameter"), ParameterGuard(layer):
        write(layer.weight)
    assert torch.equal(layer.weight, before)


def test_other_writes_are_not_stopped() -> None:
    layer = nn.Linear(4, 4).requires_grad_(False)
    with ParameterGuard(layer):
        y = layer(torch.ones(2, 4)).relu_()
        torch.add(layer.weight, 1, out=torch.empty(4, 4))
    assert y.shape == (2, 4)


@pytest.mark.usefixtures("least_guarded")
def test_the_run_of_a_trace_is_the_run_that_the_check_of_an_export_expects() -> None:
    model = from_module(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)).eval(), inputs=["x[n,4]"])
    feeds = model.samples(0, {"n": 1})
    runner = EagerRunner(model)
    run = runner.find_trace_run(feeds)
    assert run is not None
    expected = run_expected(model).runs[0]
    assert all(np.array_equal(expected.feeds[name], value) for name, value in feeds.items())
    (named,) = runner.trace_outputs(run).values()
    (infered,) = runner.infer(feeds).values()
    (taken,) = expected.outputs.values()
    assert named.tobytes() == infered.tobytes() == taken.tobytes()
    assert runner.find_trace_run(model.samples(1, {"n": 1})) is None
    assert runner.find_trace_run(model.samples(0, {"n": 2})) is None


def test_a_run_on_inputs_that_forward_changed_is_not_taken() -> None:
    model = from_module(AddsInPlace().eval(), inputs=["x[n,4]"])
    assert EagerRunner(model).find_trace_run(model.samples(0, {"n": 1})) is None
