"""What rounded source coordinates do to a resized tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normdeploy
from normdeploy.runtimes.resize_error import resize_error_bound

FLOAT32 = 2.0**-24


class Resized(nn.Module):
    def __init__(self, size: tuple[int, int], mode: str, align: bool) -> None:
        super().__init__()
        self.size, self.mode, self.align = size, mode, align

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size=self.size, mode=self.mode, align_corners=self.align)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("size", [(60, 78), (50, 50), (33, 41)])
def test_a_float32_resize_lies_within_what_its_coordinates_do(size: tuple[int, int], align: bool, mode: str) -> None:
    x = torch.randn(1, 2, 40, 52, generator=torch.Generator().manual_seed(0))
    x[0, 0, 20, 30] = 100.0
    resized = Resized(size, mode, align)
    away = (resized(x).double() - resized(x.double())).abs().numpy()
    off = resize_error_bound(x.double().numpy(), (1, 2, *size), FLOAT32)
    rounding = 16 * FLOAT32 * float(x.abs().max())
    assert (away <= 2 * off + rounding).all()


def test_equal_neighbors_are_off_by_nothing() -> None:
    assert not resize_error_bound(np.full((1, 1, 5, 5), 3.0), (1, 1, 8, 7), FLOAT32).any()


@pytest.mark.parametrize(
    ("shape", "size", "align"),
    [((1, 3, 40, 52), (60, 78), False), ((1, 3, 28, 28), (50, 50), True), ((1, 3, 32, 32), (128, 128), True)],
)
def test_a_right_resize_to_any_size_is_verified(
    shape: tuple[int, ...], size: tuple[int, int], align: bool, tmp_path: Path
) -> None:
    made = normdeploy.export(Resized(size, "bilinear", align).eval(), torch.zeros(shape), output=tmp_path / "m.onnx")
    comparison = normdeploy.verify(made)
    assert comparison, comparison.table()


def test_other_corners_are_no_rounding(tmp_path: Path) -> None:
    sample = torch.zeros(1, 3, 40, 52)
    made = normdeploy.export(Resized((60, 78), "bilinear", False).eval(), sample, output=tmp_path / "m.onnx")
    assert not normdeploy.verify(Resized((60, 78), "bilinear", True).eval(), made.path, inputs=["x[1,3,40,52]"])


class Antialiased(nn.Module):
    def __init__(self, size: tuple[int, int], mode: str) -> None:
        super().__init__()
        self.size, self.mode = size, mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size=self.size, mode=self.mode, antialias=True)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(60, 78), (21, 17), (7, 9)])
def test_an_antialiased_resize_lies_within_what_its_coordinates_do(size: tuple[int, int], mode: str) -> None:
    x = torch.randn(1, 2, 40, 52, generator=torch.Generator().manual_seed(0))
    x[0, 0, 20, 30] = 100.0
    resized = Antialiased(size, mode)
    away = (resized(x).double() - resized(x.double())).abs().numpy()
    off = resize_error_bound(x.double().numpy(), (1, 2, *size), FLOAT32, antialias=True)
    rounding = 16 * FLOAT32 * float(x.abs().max())
    assert (away <= 2 * off + rounding).all()


@pytest.mark.parametrize(("shape", "size"), [((1, 2, 13, 16), (21, 17)), ((1, 2, 224, 224), (57, 57))])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_a_right_antialiased_resize_is_verified(
    shape: tuple[int, ...], size: tuple[int, int], mode: str, tmp_path: Path
) -> None:
    made = normdeploy.export(Antialiased(size, mode).eval(), torch.zeros(shape), output=tmp_path / "m.onnx")
    comparison = normdeploy.verify(made)
    assert comparison, comparison.table()


def test_a_resize_without_antialiasing_is_no_rounding_of_one_with_it(tmp_path: Path) -> None:
    sample = torch.zeros(1, 3, 40, 52)
    made = normdeploy.export(Resized((21, 17), "bilinear", False).eval(), sample, output=tmp_path / "m.onnx")
    assert not normdeploy.verify(Antialiased((21, 17), "bilinear").eval(), made.path, inputs=["x[1,3,40,52]"])
