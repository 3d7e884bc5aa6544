"""Translate logarithms of sums of exponentials in forms that do not overflow.

torch's exporter (2.13, onnxscript 0.7.2) writes log(sigmoid(x)) and log(exp(x) + exp(y)) literally, which gives −Inf
below −88 and Inf above 88 in float32. PyTorch computes the following forms, and so do these translations:

    log sigmoid(x)        = min(x, 0) − log(1 + exp(−|x|))
    log(exp(x) + exp(y))  = max(x, y) + log(1 + exp(−|x − y|))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op

# ATen's numbers for the reductions of torch's losses.
_MEAN, _SUM = 1, 2


def _constant_like(value: float, like: Any) -> Any:
    return op.Constant(value=ir.tensor(np.array(value, like.dtype.numpy())))


def _log_one_plus_exp(negative: Any) -> Any:
    """Compute log(1 + exp(negative)) of a number that is at most zero."""
    return op.Log(op.Add(op.Exp(negative), _constant_like(1.0, negative)))


def log_sigmoid(self: Any) -> Any:
    """Compute log sigmoid(x) as min(x, 0) − log(1 + exp(−|x|)).

    Returns:
        a tensor of the shape of x.
    """
    smaller = op.Min(self, _constant_like(0.0, self))
    return op.Sub(smaller, _log_one_plus_exp(_cast_like(op.Neg(op.Abs(self)), self)))


def binary_cross_entropy_with_logits(
    self: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = _MEAN
) -> Any:
    """Compute (1 − t)·x − (1 + (p − 1)·t)·log sigmoid(x), for targets t and positive weights p.

    Args:
        weight: factor of each loss; None for 1.
        pos_weight: p; None for 1.
        reduction: ATen's number: 1 for the mean, 2 for the sum, otherwise none.

    Returns:
        a scalar; without reduction, one loss per element.
    """
    one = _constant_like(1.0, self)
    chance = log_sigmoid(self)
    if pos_weight is not None:
        chance = op.Mul(op.Add(op.Mul(op.Sub(pos_weight, one), target), one), chance)
    loss = op.Sub(op.Mul(op.Sub(one, target), self), chance)
    if weight is not None:
        loss = op.Mul(loss, weight)
    if reduction == _MEAN:
        return op.ReduceMean(loss, keepdims=0)
    if reduction == _SUM:
        return op.ReduceSum(loss, keepdims=0)
    return loss


def logaddexp(self: Any, other: Any) -> Any:
    """Compute max(x, y) + log(1 + exp(−|x − y|)). For equal numbers, also if they are infinite, compute x + log 2.

    Returns:
        a tensor of the broadcast shape.
    """
    return _log_sum_exp_of_two(self, other, 1.0)


def logaddexp2(self: Any, other: Any) -> Any:
    """Compute `logaddexp` to the base 2.

    Returns:
        a tensor of the broadcast shape.
    """
    return _log_sum_exp_of_two(self, other, math.log(2.0))


def _log_sum_exp_of_two(self: Any, other: Any, base: float) -> Any:
    """Compute max(x, y) + log(1 + exp(−|x − y|·b)) / b, with b the logarithm of the base."""
    apart = op.Neg(op.Abs(op.Sub(self, other)))
    grown = _log_one_plus_exp(_cast_like(op.Mul(apart, _constant_like(base, self)), self))
    # The difference of equal infinities is NaN.
    grown = op.Where(op.Equal(self, other), _constant_like(math.log(2.0), self), grown)
    return op.Add(op.Max(self, other), op.Div(grown, _constant_like(base, self)))


def _cast_like(value: Any, like: Any) -> Any:
    value.dtype = like.dtype
    return value


# In the format of torch.onnx.export's custom_translation_table.
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.log_sigmoid.default: log_sigmoid,
    torch.ops.aten.binary_cross_entropy_with_logits.default: binary_cross_entropy_with_logits,
    torch.ops.aten.logaddexp.default: logaddexp,
    torch.ops.aten.logaddexp2.default: logaddexp2,
}
