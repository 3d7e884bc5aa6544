"""Evaluate norm ops at a random point."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .field_values import NotEvaluated, Value
from .op_call import Call
from .reduction_ops import root_of_squares
from .value_helpers import plain_size
from .window_ops import channel_shape


def evaluate_epsilon(call: Call) -> Value:
    stored = float(np.float32(call.attrs.get("epsilon", 1e-5)))
    return call.field.exact_numbers.get(stored) or call.number(stored)


def _standardize(call: Call, x: Value, axes: Sequence[int]) -> Value:
    centered = call.subtract(x, call.mean(x, axes))
    variance = call.mean(call.multiply(centered, centered), axes)
    return call.multiply(centered, call.inverse_root(call.add(variance, evaluate_epsilon(call))))


def _scale_and_shift(call: Call, y: Value, scale: Value | None, shift: Value | None) -> Value:
    if scale is not None:
        y = call.multiply(y, scale)
    return y if shift is None else call.add(y, shift)


def evaluate_layer_norm(call: Call) -> Value:
    if call.outputs > 1:
        raise NotEvaluated("LayerNormalization with statistics as outputs")
    x = call.data(0)
    axes = range(call.attrs.get("axis", -1) % x.rank, x.rank)
    return _scale_and_shift(call, _standardize(call, x, axes), call.optional(1), call.optional(2))


def evaluate_rms_norm(call: Call) -> Value:
    if call.outputs > 1:
        raise NotEvaluated(f"{call.op} with statistics as outputs")
    x = call.data(0)
    axes = range(call.attrs.get("axis", -1) % x.rank, x.rank)
    square = call.mean(call.multiply(x, x), axes)
    y = call.multiply(x, call.inverse_root(call.add(square, evaluate_epsilon(call))))
    return _scale_and_shift(call, y, call.optional(1), None)


def evaluate_instance_norm(call: Call) -> Value:
    x = call.data(0)
    scale, shift = (call.reshape(call.data(i), channel_shape(call.data(i), x)) for i in (1, 2))
    return _scale_and_shift(call, _standardize(call, x, range(2, x.rank)), scale, shift)


def evaluate_group_norm(call: Call) -> Value:
    x = call.data(0)
    groups = call.attrs["num_groups"]
    shape = [plain_size(n) for n in x.sizes]
    batch, channels, *sizes = shape
    if not isinstance(channels, int) or channels % groups:
        raise NotEvaluated("GroupNormalization whose groups do not divide the channels")
    y = call.reshape(x, (batch, groups, channels // groups, *sizes))
    y = _standardize(call, y, range(2, y.rank))
    scale, shift = call.data(1), call.data(2)
    if call.opset < 21:
        # One number per group
        y = _scale_and_shift(call, y, *(call.reshape(v, (groups, *(1,) * (y.rank - 2))) for v in (scale, shift)))
        return call.reshape(y, shape)
    y = call.reshape(y, shape)
    return _scale_and_shift(call, y, *(call.reshape(v, channel_shape(v, x)) for v in (scale, shift)))


def evaluate_batch_norm(call: Call) -> Value:
    if call.attrs.get("training_mode") or call.outputs > 1 or (call.opset < 7 and not call.attrs.get("is_test")):
        raise NotEvaluated("BatchNormalization in training mode")
    x = call.data(0)
    if x.rank < 2 or not call.attrs.get("spatial", 1):
        raise NotEvaluated("BatchNormalization with statistics per element")
    scale, shift, mean, variance = (call.reshape(call.data(i), channel_shape(call.data(i), x)) for i in range(1, 5))
    root = call.inverse_root(call.add(variance, evaluate_epsilon(call)))
    return call.add(call.multiply(call.subtract(x, mean), call.multiply(scale, root)), shift)


def evaluate_lp_norm(call: Call) -> Value:
    x = call.data(0)
    if call.attrs.get("p", 2) != 2 or call.opset >= 22:
        raise NotEvaluated("LpNormalization")
    axis = call.attrs.get("axis", -1) % x.rank
    return call.divide(x, root_of_squares(call, x, [axis]))
