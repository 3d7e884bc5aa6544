"""Translate PT2E's operators that quantize a whole tensor; torch's exporter drops the bounds of these operators or
can't write the operators at all.

onnxscript 0.7.2 treats the scale of the ``.tensor`` overloads as a Python number, and ignores ``quant_min`` and
``quant_max``: QuantizeLinear clamps to the whole range of the type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op

NAMESPACE = "quantized_decomposed"


def quantize(input: Any, scale: Any, zero_point: Any, quant_min: Any, quant_max: Any, dtype: int) -> Any:
    """Round to codes of ``dtype`` and clamp them to [``quant_min``, ``quant_max``].

    Returns:
        codes in the shape of ``input``; FP8 codes are clamped only to the type's own limits.
    """
    codes = op.QuantizeLinear(
        input, op.CastLike(_as_scalar(scale, np.float32), input), _cast_to_code(zero_point, dtype)
    )
    # FP8 saturates at its own limits.
    if ir.DataType(dtype).is_floating_point():
        return codes
    whole = np.iinfo(ir.DataType(dtype).numpy())
    if (quant_min, quant_max) == (whole.min, whole.max):
        return codes
    return op.Clip(codes, _cast_to_code(quant_min, dtype), _cast_to_code(quant_max, dtype))


def dequantize(
    input: Any, scale: Any, zero_point: Any, quant_min: Any, quant_max: Any, dtype: int, out_dtype: int | None = None
) -> Any:
    """Convert codes to numbers. The operator ignores ``quant_min`` and ``quant_max``.

    Returns:
        float32 numbers, or ``out_dtype`` if given.
    """
    scale = op.Cast(_as_scalar(scale, np.float32), to=ir.DataType.FLOAT)
    values = op.DequantizeLinear(input, scale, _cast_to_code(zero_point, dtype))
    if out_dtype in (None, -1):
        return values
    return op.Cast(values, to=out_dtype)


def _cast_to_code(value: Any, dtype: int) -> Any:
    return op.Cast(_as_scalar(value, np.int64), to=dtype)


def _as_scalar(value: Any, dtype: type[np.generic]) -> Any:
    """Make ``value`` a tensor of rank 0, because QuantizeLinear reads a scale of shape [1] as a scale per channel."""
    if isinstance(value, int | float):
        return op.Constant(value=ir.tensor(np.array(value, dtype)))
    return op.Reshape(value, op.Constant(value=ir.tensor(np.zeros(0, np.int64))))


def quantize_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Build the translation table. The operators must be registered in torch, as they are once a model that contains
    them is loaded.

    Returns:
        operator -> function.
    """
    operators = torch.ops.quantized_decomposed
    made = operators.quantize_per_tensor
    read = operators.dequantize_per_tensor
    return {
        made.default: quantize,
        made.tensor: quantize,
        made.tensor2: quantize,
        read.tensor: dequantize,
        read.tensor2: dequantize,
    }
