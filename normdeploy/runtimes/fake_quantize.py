"""Operators that round to a quantized grid, in float64: torch has them for float32 alone.

q = clamp(rint(x/s + z), low, high), and (q − z)·s. A model that holds them rounds itself: it is compared as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_FAKE = "aten::fake_quantize_per_"
_QUANTIZE = "quantized_decomposed::quantize_per_"
_DEQUANTIZE = "quantized_decomposed::dequantize_per_"


def rounds_to_grid(name: str) -> bool:
    """Whether the operator of a schema's name rounds to a grid that it is given."""
    return name.startswith((_FAKE, _QUANTIZE))


def fake_quantize_float64(name: str, args: Sequence[Any]) -> torch.Tensor | None:
    """What the operator gives in float64; None for any other operator, or in another type than float64."""
    if not name.startswith((_FAKE, _QUANTIZE, _DEQUANTIZE)):
        return None
    x, scale, zero = args[:3]
    per_channel = "per_channel" in name
    if per_channel:
        shape = [1] * x.dim()
        shape[int(args[3])] = -1
        scale = scale.reshape(shape)
        zero = zero.reshape(shape)
    if zero is None:
        zero = 0
    if name.startswith(_DEQUANTIZE):
        return (x.double() - zero) * scale
    if x.dtype != torch.float64:
        return None
    low, high = args[4:6] if per_channel else args[3:5]
    codes = torch.clamp(torch.round(x / scale) + zero, low, high)
    if name.startswith(_QUANTIZE):
        return codes.to(args[-1])
    return (codes - zero) * scale
