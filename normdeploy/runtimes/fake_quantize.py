"""Compute operators that round to a quantized grid in float64; torch has them only for float32.

The codes are q = clamp(rint(x/s + z), low, high), and the dequantized values are (q − z)·s. A model that contains these
operators rounds by design, so its reference rounds in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_FAKE = "aten::fake_quantize_per_"
_QUANTIZE = "quantized_decomposed::quantize_per_"
_DEQUANTIZE = "quantized_decomposed::dequantize_per_"


def rounds_to_grid(name: str) -> bool:
    """Return whether an operator rounds to a quantized grid.

    Args:
        name: name of the operator's schema.
    """
    return name.startswith((_FAKE, _QUANTIZE))


def fake_quantize_float64(name: str, args: Sequence[Any]) -> torch.Tensor | None:
    """Compute a fake-quantize, quantize or dequantize operator in float64.

    Args:
        name: name of the operator's schema.
        args: x, scale, zero point, then axis (per channel), lowest and highest code, and dtype (quantize).

    Returns:
        The result. None for any other operator, and for a fake-quantize or quantize operator whose input is not
        float64.
    """
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
