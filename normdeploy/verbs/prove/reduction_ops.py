"""Evaluate reductions and softmax at a random point."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .field_values import Axis, Extremum, Sign, Value, closed_if_static, is_open_axis, read_name
from .op_call import Call, Op
from .value_helpers import normalize_axes, plain_size, require_floats


def _reduced_axes(call: Call, x: Value) -> list[int] | None:
    axes = call.integers(1, "axes")
    if not axes:
        if call.attrs.get("noop_with_empty_axes"):
            return None
        axes = list(range(x.rank))
    return normalize_axes(axes, x.rank)


def reduction_op(core: Callable[[Call, Value, list[int]], Value], *, of_element: Callable[[Call, Value], Value]) -> Op:
    def run(call: Call) -> Value:
        x = call.data(0)
        axes = _reduced_axes(call, x)
        if axes is None:
            return of_element(call, x)
        y = core(call, x, axes)
        if call.attrs.get("keepdims", 1):
            return y
        return call.reshape(y, [plain_size(n) for i, n in enumerate(y.sizes) if i not in axes])

    return run


def sum_of_squares(call: Call, x: Value, axes: list[int]) -> Value:
    return call.sum(call.multiply(x, x), axes)


def root_of_squares(call: Call, x: Value, axes: list[int]) -> Value:
    return call.root(sum_of_squares(call, x, axes))


def sum_of_magnitudes(call: Call, x: Value, axes: list[int]) -> Value:
    return call.sum(call.unary("Abs", x, Sign.NOT_NEGATIVE), axes)


def log_sum_exp(call: Call, x: Value, axes: list[int]) -> Value:
    require_floats(x)
    return call.unary("Log", call.sum(call.unary("Exp", x, Sign.POSITIVE), axes))


def unordered(name: str) -> Callable[[Call, Value, list[int]], Value]:
    """Reduce by an unknown function that does not depend on the order of the elements."""

    def run(call: Call, x: Value, axes: list[int]) -> Value:
        field = call.field
        told = f"element of {name}"
        if name == "product" and x.kind == "i":
            # Products of integers overflow at the bounds of their type.
            told += f" of type {x.elem}"
        keys = field.unknown.keys(read_name(told, x), field.residues(x))
        if all(x.sizes[i] == 1 for i in axes):
            return x
        total = np.add.reduce(keys, axis=tuple(i + 1 for i in axes), keepdims=True)
        # An open size with few points must not pass for a fixed size.
        opened = sorted(repr(x.sizes[i].terms) for i in axes if is_open_axis(x.factors[i]))
        left: list[Axis] = [() if i in axes else axis for i, axis in enumerate(x.factors)]
        total = total + np.uint64(field.unknown.seeds(repr(opened))[0]) if opened else total
        made = field.from_keys(name, total, [x], kind=x.kind, axes=closed_if_static(left) if x.is_open else None)
        field.extrema[field.digest(made)] = Extremum(name, x, tuple(axes))
        return made

    return run


def evaluate_global_average(call: Call) -> Value:
    x = call.data(0)
    return call.mean(x, range(2, x.rank))


def evaluate_global_max(call: Call) -> Value:
    x = call.data(0)
    return unordered("max")(call, x, list(range(2, x.rank)))


def _softmax_axes(call: Call, x: Value) -> list[int]:
    if call.opset >= 13:
        return [call.attrs.get("axis", -1) % x.rank]
    axis = call.attrs.get("axis", 1)
    return list(range(axis % x.rank if axis != x.rank else axis, x.rank))


def evaluate_softmax(call: Call) -> Value:
    x = call.data(0)
    made = call.unary("Exp", x, Sign.POSITIVE)
    return call.divide(made, call.sum(made, _softmax_axes(call, x)))


def evaluate_log_softmax(call: Call) -> Value:
    x = call.data(0)
    return call.subtract(x, log_sum_exp(call, x, _softmax_axes(call, x)))
