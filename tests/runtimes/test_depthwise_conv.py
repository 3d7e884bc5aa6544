"""Convolutions of single channels in float64, beside torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from normdeploy.loading import from_module
from normdeploy.runtimes.depthwise_conv import convolve_channels
from normdeploy.runtimes.torch_runners import Float64Runner


def draw(seed: int, *shape: int) -> torch.Tensor:
    """Draw N(0, 1) in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("dims", "multiplier", "kernel", "stride", "padding", "dilation"),
    [
        (1, 1, 3, 1, 1, 1),
        (1, 2, 4, 3, 0, 2),
        (2, 1, (3, 5), (2, 1), (1, 2), 1),
        (2, 3, 3, 1, 0, (1, 2)),
        (2, 1, 1, 2, 0, 1),
        (3, 2, (1, 2, 3), 2, (0, 1, 1), 1),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_single_channels_equals_torch(
    dims: int, multiplier: int, kernel: Any, stride: Any, padding: Any, dilation: Any, biased: bool
) -> None:
    operator = (torch.ops.aten.conv1d, torch.ops.aten.conv2d, torch.ops.aten.conv3d)[dims - 1].default
    sizes = (kernel,) * dims if isinstance(kernel, int) else kernel
    x, w = draw(0, 2, 6, *(9, 10, 11)[:dims]), draw(1, 6 * multiplier, 1, *sizes)
    bias = draw(2, 6 * multiplier) if biased else None
    given = [[n] * dims if isinstance(n, int) else list(n) for n in (stride, padding, dilation)]
    convolved = convolve_channels(operator._schema, (x, w, bias, *given, 6))
    assert convolved is not None
    torch.testing.assert_close(convolved, operator(x, w, bias, *given, 6), rtol=1e-13, atol=1e-13)


def test_single_channels_leaves_other_convolutions_to_torch() -> None:
    operator = torch.ops.aten.conv2d.default
    # Two channels in a group, one group, a kernel larger than the input.
    given = [1, 1], [0, 0], [1, 1]
    assert convolve_channels(operator._schema, (draw(0, 1, 6, 5, 5), draw(1, 6, 2, 3, 3), None, *given, 3)) is None
    assert convolve_channels(operator._schema, (draw(0, 1, 1, 5, 5), draw(1, 6, 1, 3, 3), None, *given, 1)) is None
    assert convolve_channels(operator._schema, (draw(0, 1, 6, 2, 2), draw(1, 6, 1, 3, 3), None, *given, 6)) is None


def test_single_channels_keeps_what_is_not_finite_in_its_place() -> None:
    x, w = draw(0, 1, 2, 5, 5), draw(1, 2, 1, 3, 3)
    x[0, 0, 2, 2], x[0, 1, 0, 0] = float("nan"), float("inf")
    given = [1, 1], [1, 1], [1, 1]
    operator = torch.ops.aten.conv2d.default
    convolved = convolve_channels(operator._schema, (x, w, None, *given, 2))
    torch.testing.assert_close(convolved, operator(x, w, None, *given, 2), equal_nan=True)


def test_reference_of_many_channels_calls_no_operator_for_each() -> None:
    net = nn.Conv2d(256, 256, 3, padding=1, groups=256).eval()
    model = from_module(net, torch.randn(1, 256, 8, 8))
    runner = Float64Runner(model)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        runner.infer(model.samples(0))
    # A few for each of the 9 elements of the kernel. Called for each channel, convolutions and their parts were 4,000.
    assert sum(event.count for event in profiled.key_averages()) < 256
