"""Evaluate reductions, softmax and LpNormalization by the formulas of https://onnx.ai/onnx/operators."""

import math
from typing import Any

import numpy as np

from .elementwise_ops import divide
from .evaluator_core import Array, Attrs, Function, Inputs, Result, Table, integers_from

Axes = tuple[int, ...] | None

# The type is Any, because numpy's stubs lack an overload for a keepdims that is not a literal.
_add: Any = np.add.reduce
_multiply: Any = np.multiply.reduce
_maximum: Any = np.maximum.reduce
_minimum: Any = np.minimum.reduce


def _element_count(x: Array, axes: Axes) -> int:
    if axes is None:
        return x.size
    return math.prod([x.shape[axis] for axis in axes])


def mean(x: Array, axes: Axes, keepdims: bool = True) -> Array:
    """Compute the mean over ``axes``, several times faster than numpy's function on small arrays.

    Args:
        axes: None for all.

    Returns: x's dtype; integers truncate toward zero.
    """
    total = _add(x, axis=axes, keepdims=keepdims, dtype=x.dtype)
    n = _element_count(x, axes)
    if x.dtype.kind == "f":
        return total / n
    return divide(total, np.array(n, x.dtype))


def _sum(x: Array, axes: Axes, keepdims: bool) -> Array:
    return _add(x, axis=axes, keepdims=keepdims, dtype=x.dtype)


def _product(x: Array, axes: Axes, keepdims: bool) -> Array:
    return _multiply(x, axis=axes, keepdims=keepdims, dtype=x.dtype)


def _lowest_value(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "f":
        return -math.inf
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min


def _highest_value(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "f":
        return math.inf
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).max


def _max(x: Array, axes: Axes, keepdims: bool) -> Array:
    return _maximum(x, axis=axes, keepdims=keepdims, initial=_lowest_value(x.dtype))


def _min(x: Array, axes: Axes, keepdims: bool) -> Array:
    return _minimum(x, axis=axes, keepdims=keepdims, initial=_highest_value(x.dtype))


def _l2_norm(x: Array, axes: Axes, keepdims: bool) -> Array:
    root = np.sqrt(_sum(x * x, axes, keepdims))
    if x.dtype.kind == "f":
        return root
    return root.astype(x.dtype)


def _log_sum_exp(x: Array, axes: Axes, keepdims: bool) -> Array:
    top = _maximum(x, axis=axes, keepdims=True, initial=-math.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    log = np.log(_sum(np.exp(x - top), axes, True)) + top
    if keepdims:
        return log
    return log.squeeze(axes)


def _reduction_op(reduce: Any) -> Function:
    """Build the function of a reduction.

    The op's axes are an attribute (up to opset 17; ReduceSum: up to 12) or the second input.
    """

    def evaluate(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
        """Reduce over the axes. Without axes, reduce over all; with ``noop_with_empty_axes``, return the input.

        Returns: the output.
        """
        axes = integers_from(inputs, 1, attrs, "axes")
        keepdims = bool(attrs.get("keepdims", 1))
        if axes:
            return reduce(inputs[0], tuple(axes), keepdims)
        return reduce(inputs[0], () if attrs.get("noop_with_empty_axes") else None, keepdims)

    return evaluate


def _softmax(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """Compute softmax along one axis. Below opset 13, compute it over all dims from ``axis`` on, with the default 1."""
    x: Array = inputs[0]
    axes = (attrs.get("axis", -1),) if opset >= 13 else _axes_from(attrs.get("axis", 1), x.ndim)
    e = np.exp(x - _maximum(x, axis=axes, keepdims=True, initial=-math.inf))
    return e / _add(e, axis=axes, keepdims=True)


def _axes_from(axis: int, rank: int) -> tuple[int, ...]:
    if not -rank <= axis < rank:
        raise ValueError(
            f"axis {axis} is out of range for a tensor of rank {rank}: it must be between {-rank} and {rank - 1}"
        )
    return tuple(range(axis % rank, rank))


def _lp_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """Compute x / ‖x‖ₚ along one axis for p = 1 or 2. If the norm is zero, return zero (specified from opset 22 on)."""
    x = inputs[0]
    axis = attrs.get("axis", -1)
    if attrs.get("p", 2) == 1:
        length = _add(np.absolute(x), axis=axis, keepdims=True)
    else:
        length = np.sqrt(_add(x * x, axis=axis, keepdims=True))
    return np.where(length == 0, 0.0, x / length)


_REDUCTIONS: dict[str, Any] = {
    "ReduceMean": mean,
    "ReduceSum": _sum,
    "ReduceMax": _max,
    "ReduceMin": _min,
    "ReduceProd": _product,
    "ReduceL1": lambda x, axes, keepdims: _sum(np.absolute(x), axes, keepdims),
    "ReduceL2": _l2_norm,
    "ReduceSumSquare": lambda x, axes, keepdims: _sum(x * x, axes, keepdims),
    "ReduceLogSum": lambda x, axes, keepdims: np.log(_sum(x, axes, keepdims)),
    "ReduceLogSumExp": _log_sum_exp,
}

TABLE: Table = {
    **{("", op): _reduction_op(reduce) for op, reduce in _REDUCTIONS.items()},
    ("", "Softmax"): _softmax,
    ("", "LpNormalization"): _lp_norm,
}
