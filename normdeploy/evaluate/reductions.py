"""Reductions, softmax and the normalizations, each by the formula of its specification
(https://onnx.ai/onnx/operators).

Variances are means of centred squares, which lose nothing at a large offset. The one exception is
MeanVarianceNormalization, whose function body in the ONNX standard says E[x²] − E[x]².
"""

import math
from typing import Any

import numpy as np

from .core import Array, Attrs, Function, Inputs, Result, Table, Unsupported, float32, integers, optional
from .pointwise import divide

_EPSILON = float32(1e-5)
_SKIP_EPSILON = float32(1e-12)  # onnxruntime's default for its Skip… ops
_MVN_EPSILON = float32(1e-9)

Axes = tuple[int, ...] | None

# bound once, as Any: numpy's stubs have no overload for a keepdims that is not a literal
_add: Any = np.add.reduce
_multiply: Any = np.multiply.reduce
_maximum: Any = np.maximum.reduce
_minimum: Any = np.minimum.reduce


def _count(x: Array, axes: Axes) -> int:
    return x.size if axes is None else math.prod([x.shape[axis] for axis in axes])


def mean(x: Array, axes: Axes, keepdims: bool = True) -> Array:
    """Mean over ``axes`` (None: all) in x's type; several times faster than numpy's on small arrays. Integers truncate
    toward zero."""
    total = _add(x, axis=axes, keepdims=keepdims, dtype=x.dtype)
    n = _count(x, axes)
    return total / n if x.dtype.kind == "f" else divide(total, np.array(n, x.dtype))


def _sum(x: Array, axes: Axes, keepdims: bool) -> Array:
    return _add(x, axis=axes, keepdims=keepdims, dtype=x.dtype)


def _product(x: Array, axes: Axes, keepdims: bool) -> Array:
    return _multiply(x, axis=axes, keepdims=keepdims, dtype=x.dtype)


def _lowest(dtype: np.dtype[Any]) -> Any:
    return -math.inf if dtype.kind == "f" else False if dtype.kind == "b" else np.iinfo(dtype).min


def _highest(dtype: np.dtype[Any]) -> Any:
    return math.inf if dtype.kind == "f" else True if dtype.kind == "b" else np.iinfo(dtype).max


def _max(x: Array, axes: Axes, keepdims: bool) -> Array:
    return _maximum(x, axis=axes, keepdims=keepdims, initial=_lowest(x.dtype))


def _min(x: Array, axes: Axes, keepdims: bool) -> Array:
    return _minimum(x, axis=axes, keepdims=keepdims, initial=_highest(x.dtype))


def _l2(x: Array, axes: Axes, keepdims: bool) -> Array:
    root = np.sqrt(_sum(x * x, axes, keepdims))
    return root if x.dtype.kind == "f" else root.astype(x.dtype)


def _log_sum_exp(x: Array, axes: Axes, keepdims: bool) -> Array:
    top = _maximum(x, axis=axes, keepdims=True, initial=-math.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    log = np.log(_sum(np.exp(x - top), axes, True)) + top
    return log if keepdims else log.squeeze(axes)


def _reduction(reduce: Any) -> Function:
    """A reduction over axes from the attribute (up to opset 17; ReduceSum 12) or from the second input."""

    def evaluate(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
        axes = integers(inputs, 1, attrs, "axes")
        keepdims = bool(attrs.get("keepdims", 1))
        if axes:
            return reduce(inputs[0], tuple(axes), keepdims)
        return reduce(inputs[0], () if attrs.get("noop_with_empty_axes") else None, keepdims)

    return evaluate


def _softmax(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """Softmax along one axis; below opset 13 over all dims from ``axis`` on (default 1)."""
    x: Array = inputs[0]
    axes = (attrs.get("axis", -1),) if opset >= 13 else _from_axis(attrs.get("axis", 1), x.ndim)
    e = np.exp(x - _maximum(x, axis=axes, keepdims=True, initial=-math.inf))
    return e / _add(e, axis=axes, keepdims=True)


def standardize(x: Array, axes: Axes, epsilon: float) -> tuple[Array, Array, Array]:
    """(x − mean) / sqrt(var + epsilon) over ``axes`` (biased variance), the mean, and 1 / sqrt(var + epsilon)."""
    n = _count(x, axes)
    center = _add(x, axis=axes, keepdims=True) / n
    centered = x - center
    inverse = 1.0 / np.sqrt(_add(centered * centered, axis=axes, keepdims=True) / n + epsilon)
    centered *= inverse
    return centered, center, inverse


def _from_axis(axis: int, rank: int) -> tuple[int, ...]:
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of a tensor of rank {rank}: it must lie between {-rank} and {rank - 1}")
    return tuple(range(axis % rank, rank))


def _layer_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """LayerNormalization; outputs Y, Mean and InvStdDev (both with the reduced dims kept as 1)."""
    y, center, inverse = standardize(
        inputs[0], _from_axis(attrs.get("axis", -1), inputs[0].ndim), attrs.get("epsilon", _EPSILON)
    )
    return _affine(y, inputs[1], optional(inputs, 2)), center, inverse


def _affine(y: Array, scale: Array, bias: Array | None) -> Array:
    return y * scale if bias is None else y * scale + bias


def _inverse_rms(x: Array, axes: Axes, epsilon: float) -> Array:
    return 1.0 / np.sqrt(_add(x * x, axis=axes, keepdims=True) / _count(x, axes) + epsilon)


def _rms_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """RMSNormalization, and onnxruntime's SimplifiedLayerNormalization with its second output 1 / rms."""
    x = inputs[0]
    inverse = _inverse_rms(x, _from_axis(attrs.get("axis", -1), x.ndim), attrs.get("epsilon", _EPSILON))
    return x * inverse * inputs[1], inverse


def _residual(inputs: Inputs, bias: int) -> Array:
    total = inputs[0] + inputs[1]
    given = optional(inputs, bias)
    return total if given is None else total + given


def _skip_layer_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """onnxruntime's SkipLayerNormalization(input, skip, gamma, beta, bias); outputs Y, mean, 1 / std, input + skip +
    bias."""
    total = _residual(inputs, 4)
    y, center, inverse = standardize(total, (-1,), attrs.get("epsilon", _SKIP_EPSILON))
    return _affine(y, inputs[2], optional(inputs, 3)), center, inverse, total


def _skip_rms_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """onnxruntime's SkipSimplifiedLayerNormalization(input, skip, gamma, bias); outputs Y, none, 1 / rms, input + skip
    + bias."""
    total = _residual(inputs, 3)
    inverse = _inverse_rms(total, (-1,), attrs.get("epsilon", _SKIP_EPSILON))
    return total * inverse * inputs[2], None, inverse, total


def _per_channel(parameter: Array, x: Array) -> Array:
    """A vector of C parameters in the shape (1, C, 1, …); ValueError where it is not of length C.

    A vector x has one channel (https://onnx.ai/onnx/operators/onnx__BatchNormalization.html, Inputs).
    """
    if x.ndim == 1:
        return parameter.reshape(1)
    return parameter.reshape((1, x.shape[1]) + (1,) * (x.ndim - 2))


def _instance_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    x = inputs[0]
    y, _, _ = standardize(x, tuple(range(2, x.ndim)), attrs.get("epsilon", _EPSILON))
    return y * _per_channel(inputs[1], x) + _per_channel(inputs[2], x)


def _group_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """GroupNormalization; scale and bias hold one number a group at opset 18, one a channel from 21."""
    x, scale, bias = inputs[:3]
    groups, channels = attrs["num_groups"], x.shape[1]
    if channels % groups:
        raise ValueError(
            f"GroupNormalization of {channels} channels in {groups} groups: the groups must divide the channels"
        )
    if opset < 21:
        if not len(scale) == len(bias) == groups:
            raise ValueError(
                f"GroupNormalization 18 has one scale and bias a group: {groups}, not {len(scale)} and {len(bias)}"
            )
        scale, bias = scale.repeat(channels // groups), bias.repeat(channels // groups)
    grouped = x.reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups)
    y, _, _ = standardize(grouped, (2,), attrs.get("epsilon", _EPSILON))
    return y.reshape(x.shape) * _per_channel(scale, x) + _per_channel(bias, x)


def _batch_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """BatchNormalization of inference: (x − mean) / sqrt(var + epsilon) · scale + bias."""
    training = (
        attrs.get("training_mode", 0) if opset >= 14 else outputs > 1 or (opset < 7 and not attrs.get("is_test", 0))
    )
    if training:
        raise Unsupported("BatchNormalization in training mode")
    if not attrs.get("spatial", 1):
        raise Unsupported("BatchNormalization with spatial = 0")
    x = inputs[0]
    scale, bias, center, variance = (_per_channel(parameter, x) for parameter in inputs[1:5])
    return (x - center) / np.sqrt(variance + attrs.get("epsilon", _EPSILON)) * scale + bias


def _mean_variance_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """(x − E[x]) / (sqrt(E[x²] − E[x]²) + 1e-9), as the standard's function body computes it."""
    x = inputs[0]
    axes = tuple(attrs.get("axes", (0, 2, 3)))
    center = mean(x, axes)
    return (x - center) / (np.sqrt(mean(x * x, axes) - center * center) + _MVN_EPSILON)


def _lp_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """x / ‖x‖ₚ along one axis, p 1 or 2; zero where the norm is zero (stated from opset 22 on)."""
    x, axis = inputs[0], attrs.get("axis", -1)
    length = (
        _add(np.absolute(x), axis=axis, keepdims=True)
        if attrs.get("p", 2) == 1
        else np.sqrt(_add(x * x, axis=axis, keepdims=True))
    )
    return np.where(length == 0, 0.0, x / length)


_REDUCTIONS: dict[str, Any] = {
    "ReduceMean": mean,
    "ReduceSum": _sum,
    "ReduceMax": _max,
    "ReduceMin": _min,
    "ReduceProd": _product,
    "ReduceL1": lambda x, axes, keepdims: _sum(np.absolute(x), axes, keepdims),
    "ReduceL2": _l2,
    "ReduceSumSquare": lambda x, axes, keepdims: _sum(x * x, axes, keepdims),
    "ReduceLogSum": lambda x, axes, keepdims: np.log(_sum(x, axes, keepdims)),
    "ReduceLogSumExp": _log_sum_exp,
}

TABLE: Table = {
    **{("", op): _reduction(reduce) for op, reduce in _REDUCTIONS.items()},
    ("", "Softmax"): _softmax,
    ("", "LayerNormalization"): _layer_norm,
    ("", "RMSNormalization"): _rms_norm,
    ("", "InstanceNormalization"): _instance_norm,
    ("", "GroupNormalization"): _group_norm,
    ("", "BatchNormalization"): _batch_norm,
    ("", "MeanVarianceNormalization"): _mean_variance_norm,
    ("", "LpNormalization"): _lp_norm,
    ("", "SimplifiedLayerNormalization"): _rms_norm,
    ("com.microsoft", "LayerNormalization"): _layer_norm,
    ("com.microsoft", "SimplifiedLayerNormalization"): _rms_norm,
    ("com.microsoft", "SkipLayerNormalization"): _skip_layer_norm,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _skip_rms_norm,
}
