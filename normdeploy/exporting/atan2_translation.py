"""Translates atan2 in a form that is right in all four quadrants, on the axes, at both zeros, at infinities and at NaN.

torch's exporter (2.13, onnxscript 0.7.2) writes atan(y / x) and moves it by ±π by the sign of y > 0. So the phase of a
negative real number, atan2(0, −1), becomes −π where PyTorch gives π, and NaN becomes 0. Here, with |y| and |x|,

    t = atan(smaller / larger), π/2 − t where |y| > |x|, π − t where x has the sign of −0; with the sign of y
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
    """The angle of the point (other, self) in [−π, π]."""
    y = self
    x = other

    def make_constant(value: float) -> Any:
        return op.Constant(value=ir.tensor(np.array(value, y.dtype.numpy())))

    zero = make_constant(0.0)

    def is_negative(value: Any) -> Any:
        # The reciprocal of −0 is −Inf.
        return op.Or(op.Less(value, zero), op.And(op.Equal(value, zero), op.Less(op.Reciprocal(value), zero)))

    up = op.Abs(y)
    along = op.Abs(x)
    is_steep = op.Greater(up, along)
    # Equal ones, zeros and infinities among them, have no quotient that is a number.
    equal = op.Where(op.Equal(up, zero), zero, make_constant(1.0))
    quotient = op.Where(is_steep, op.Div(along, up), op.Div(up, along))
    angle = op.Atan(op.Where(op.Equal(up, along), equal, quotient))
    angle = op.Where(is_steep, op.Sub(make_constant(math.pi / 2), angle), angle)
    angle = op.Where(is_negative(x), op.Sub(make_constant(math.pi), angle), angle)
    # A product keeps −0, which onnxruntime's Where does not.
    sign = op.Where(is_negative(y), make_constant(-1.0), make_constant(1.0))
    return op.Mul(angle, op.Where(op.Or(op.IsNaN(y), op.IsNaN(x)), make_constant(math.nan), sign))


# what torch.onnx.export takes as custom_translation_table
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {torch.ops.aten.atan2.default: atan2}
