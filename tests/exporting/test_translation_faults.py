"""Operators that torch's exporter writes as another function are refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normdeploy
from normdeploy.errors import ExportError


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def export(function: Callable[[Tensor], Tensor], shape: str, dims: list[str]) -> normdeploy.ExportResult:
    return normdeploy.export(Net(function).eval(), torch.ones(2, 3, 14, 14), inputs=f"x[{shape}]", dims=dims)


OPEN = ("b,3,h,w", ["b=1:2:4", "h=7:14:28", "w=7:14:28"])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.scatter_reduce(3, (x > 0).long(), x, "mean"), "scatter_reduce drops"),
        (lambda x: F.avg_pool2d(x, 2, divisor_override=3), "avg_pool2d drops divisor_override"),
        (lambda x: F.avg_pool3d(x[:, :, None], (1, 2, 2), divisor_override=3), "avg_pool3d drops divisor_override"),
        (lambda x: F.adaptive_avg_pool2d(x, (2, 2)), "adaptive pool"),
        (lambda x: F.adaptive_max_pool2d(x, (2, 2)), "adaptive pool"),
        (lambda x: F.interpolate(x, scale_factor=0.5, mode="area"), "adaptive pool"),
        (lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact"), "nearest-exact"),
        (lambda x: F.cross_entropy(x, x.argmax(1), label_smoothing=0.1, reduction="none"), "label_smoothing"),
    ],
)
def test_operator_written_as_another_function_is_refused(function: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export(function, *OPEN)


@pytest.mark.parametrize(
    ("function", "shape", "dims"),
    [
        (lambda x: F.adaptive_avg_pool2d(x, 1), *OPEN),
        (lambda x: F.adaptive_avg_pool2d(x, (2, 2)), "b,3,14,14", ["b=1:2:4"]),
        (lambda x: F.avg_pool2d(x, 2), *OPEN),
        (lambda x: x.scatter_reduce(3, (x > 0).long(), x, "sum"), *OPEN),
    ],
)
def test_operator_written_right_is_exported(function: Callable[[Tensor], Tensor], shape: str, dims: list[str]) -> None:
    assert normdeploy.verify(export(function, shape, dims), seeds=1)


@pytest.mark.parametrize("reduce", [torch.mean, torch.sum])
def test_reduction_to_a_scalar_is_verified(reduce: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    result = normdeploy.export(Net(lambda x: x * reduce(x)).eval(), torch.randn(3, 4))
    assert normdeploy.verify(result)
