"""What Fourier transforms round, and where a NaN goes in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import normdeploy
from normdeploy.runtimes.fourier_error import find_transformed_axes, frame_roundings, spread_nan

FLOAT32 = 2.0**-24


class Power(nn.Module):
    """|rfft|² of each row: all bins but the first of a constant row cancel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x).abs().pow(2)


class ShortTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.stft(x, 64, 16, window=self.window, return_complex=True))


class Plane(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.fft.fft2(x))


def frames(kind: str, count: int) -> torch.Tensor:
    if kind == "constant":
        return torch.full((3, count), 0.7)
    if kind == "ramp":
        return torch.linspace(0, 1, count).repeat(3, 1)
    return torch.randn(3, count, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["constant", "random", "ramp"])
@pytest.mark.parametrize("count", [64, 400, 509])
def test_a_fast_transform_in_float32_lies_within_its_level(kind: str, count: int) -> None:
    rows = frames(kind, count)
    exact = torch.fft.rfft(rows.double())
    level = FLOAT32 * (exact.abs() + frame_roundings(rows, exact, [1]))
    assert ((torch.fft.rfft(rows) - exact).abs() <= 4 * level).all()


@pytest.mark.parametrize("count", [64, 400, 509])
def test_a_transform_by_a_matrix_in_float32_lies_within_its_level(count: int) -> None:
    rows = frames("random", count)
    exact = torch.fft.rfft(rows.double())
    angle = torch.outer(torch.arange(count), torch.arange(exact.shape[-1])).double() * (2 * torch.pi / count)
    made = torch.complex(rows @ angle.cos().float(), rows @ -angle.sin().float())
    level = FLOAT32 * (exact.abs() + frame_roundings(rows, exact, [1]))
    assert ((made - exact).abs() <= 4 * level).all()


@pytest.mark.parametrize(
    ("module", "shape"),
    [(Power(), (2, 64)), (ShortTime(), (2, 512)), (Plane(), (2, 8, 8))],
    ids=["power", "stft", "2d"],
)
def test_a_right_transform_is_verified_on_frames_that_cancel_and_that_hold_nan(
    module: nn.Module, shape: tuple[int, ...], tmp_path: Path
) -> None:
    comparison = normdeploy.verify(normdeploy.export(module.eval(), torch.randn(shape), output=tmp_path / "m.onnx"))
    assert comparison, comparison.table()


def test_a_window_off_by_a_thousandth_is_no_rounding(tmp_path: Path) -> None:
    made = normdeploy.export(ShortTime().eval(), torch.randn(2, 512), output=tmp_path / "m.onnx")
    proto = onnx.load(made.path)
    window = next(t for t in proto.graph.initializer if tuple(t.dims) == (64,))
    values = numpy_helper.to_array(window) * np.float32(1.001)
    window.CopyFrom(numpy_helper.from_array(values, window.name))
    onnx.save(proto, tmp_path / "wrong.onnx")
    assert not normdeploy.verify(ShortTime().eval(), tmp_path / "wrong.onnx", torch.randn(2, 512))


def test_one_nan_reaches_every_bin_of_its_frame_alone() -> None:
    x = torch.ones(2, 8, dtype=torch.float64)
    x[0, 3] = float("nan")
    spread = spread_nan("fft_rfft", (x,), {}, torch.fft.rfft(x))
    parts = torch.view_as_real(spread)
    assert parts[0].isnan().all()
    assert parts[1].isfinite().all()


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "axes"),
    [
        ("fft_rfft", (None,), {}, [2]),
        ("fft_rfft", (None, None, 1), {}, [1]),
        ("fft_fft", (None,), {"dim": 0}, [0]),
        ("fft_fft2", (None,), {}, [1, 2]),
        ("fft_fftn", (None,), {}, [0, 1, 2]),
        ("_fft_c2c", (None, [1], 0, True), {}, [1]),
        ("stft", (None,), {}, [1]),
        ("mul", (None, None), {}, None),
    ],
)
def test_the_axes_of_a_transform(op: str, args: tuple[object, ...], kwargs: dict[str, int], axes: object) -> None:
    assert find_transformed_axes(op, args, kwargs, torch.zeros(2, 3, 4, dtype=torch.complex64)) == axes
