"""Prepare torch.ao's FakeQuantize modules for torch.export.

Two tensors of such a module are flags: whether forward observes its input, and whether forward rounds. torch.export
can't trace code that depends on a tensor's value. For inference these flags are constant, so this module fixes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.ao.quantization.fake_quantize import FakeQuantize

from ..errors import ExportError

# Lower-level operators that return the rounded tensor and a mask of the elements inside the range. torch 2.13 has
# kernels but no shape functions for them.
_WITHOUT_SHAPES = (
    "fake_quantize_per_tensor_affine_cachemask",
    "fake_quantize_per_channel_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
)


def fix_fake_quantizers(module: nn.Module) -> None:
    """Make the FakeQuantize modules of ``module`` round with their stored scales, in place.

    Raises:
        ExportError: a module still observes, so its scale would follow each input.
    """
    for name, part in module.named_modules():
        if not isinstance(part, FakeQuantize):
            continue
        if int(part.observer_enabled[0]):
            raise ExportError(
                f"the fake quantizer {name!r} still observes, so its scale changes with each input; call "
                "model.apply(torch.ao.quantization.disable_observer) after calibration"
            )
        part.forward = _make_rounding_forward(part) if int(part.fake_quant_enabled[0]) else _pass_through  # type: ignore[method-assign]


def _pass_through(x: torch.Tensor) -> torch.Tensor:
    return x


def _make_rounding_forward(part: FakeQuantize) -> Callable[[torch.Tensor], torch.Tensor]:
    low = part.activation_post_process.quant_min
    high = part.activation_post_process.quant_max
    axis = part.ch_axis

    def round_per_channel(x: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_channel_affine(x, part.scale, part.zero_point, axis, low, high)

    def round_per_tensor(x: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(x, scale, zero, low, high)

    if part.is_per_channel:
        return round_per_channel
    # With one scale for the whole tensor, the operator for single numbers is used, as ONNX requires.
    scale, zero = float(part.scale), int(part.zero_point)
    return round_per_tensor


@contextmanager
def register_fake_quantizer_shapes() -> Iterator[None]:
    """Register shape functions of torch's fake quantizers within the context. Without them, torch can't trace dynamic
    sizes.
    """

    def output_shapes(x: torch.Tensor, *settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)

    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in _WITHOUT_SHAPES:
            library.impl(name, output_shapes, "Meta")
        yield
