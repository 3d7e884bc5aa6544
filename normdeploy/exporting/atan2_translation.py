"""Translate atan2 correctly for all four quadrants, the axes, both zeros, infinities and NaN.

torch's exporter (2.13, onnxscript 0.7.2) writes atan(y / x) and adds ±π depending on y > 0. So atan2(0, −1), the phase
of a negative real number, is −π in the file but π in PyTorch. Where PyTorch gives NaN, the file gives 0. This
translation computes t from the smaller and the larger of |y| and |x|:

    t = atan(smaller / larger)
    t = π/2 − t if |y| > |x|
    t = π − t if x is negative or −0

and applies the sign of y.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op


def atan2(self: Any, other: Any) -> Any:
    """Compute the angle of the point (other, self).

    Returns:
        angles in [−π, π], with the broadcast shape.
    """
    y = self
    x = other

    def make_constant(value: float) -> Any:
        return op.Constant(value=ir.tensor(np.array(value, y.dtype.numpy())))

    zero = make_constant(0.0)

    def is_negative(value: Any) -> Any:
        # −0 is recognized by its reciprocal, −Inf.
        return op.Or(op.Less(value, zero), op.And(op.Equal(value, zero), op.Less(op.Reciprocal(value), zero)))

    up = op.Abs(y)
    along = op.Abs(x)
    is_steep = op.Greater(up, along)
    # The quotient of two zeros or two infinities is NaN, so equal magnitudes are handled separately.
    equal = op.Where(op.Equal(up, zero), zero, make_constant(1.0))
    quotient = op.Where(is_steep, op.Div(along, up), op.Div(up, along))
    angle = op.Atan(op.Where(op.Equal(up, along), equal, quotient))
    angle = op.Where(is_steep, op.Sub(make_constant(math.pi / 2), angle), angle)
    angle = op.Where(is_negative(x), op.Sub(make_constant(math.pi), angle), angle)
    # The sign is applied as a factor: a product keeps −0, but onnxruntime's Where loses its sign.
    sign = op.Where(is_negative(y), make_constant(-1.0), make_constant(1.0))
    return op.Mul(angle, op.Where(op.Or(op.IsNaN(y), op.IsNaN(x)), make_constant(math.nan), sign))


# In the format of torch.onnx.export's custom_translation_table.
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {torch.ops.aten.atan2.default: atan2}
