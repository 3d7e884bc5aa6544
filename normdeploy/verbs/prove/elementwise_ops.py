"""Evaluate ops on single elements at a random point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .cast_ops import truncate_constants
from .field_values import NotEvaluated, Sign, Value, joint_axes
from .op_call import Call, Op
from .value_helpers import as_boolean, broadcast_like, joint_fit, joint_kind, where_stored


def binary_op(name: str) -> Op:
    def run(call: Call) -> Value:
        _refuse_old_broadcast(call)
        return getattr(call, name)(call.data(0), call.data(1))

    return run


def _refuse_old_broadcast(call: Call) -> None:
    """Refuse the broadcasting of opset 6 and older, which an attribute aligns with another axis than the last."""
    if call.opset < 7 and ("axis" in call.attrs or call.data(0).shape != call.data(1).shape):
        raise NotEvaluated("broadcasting by an attribute (opset 6 or older)")


def evaluate_div(call: Call) -> Value:
    x = call.data(0)
    y = call.data(1)
    if x.kind != "f":
        call.field.require_nonzero(y)
        return call.field.unknown_function(f"integer division of type {x.elem}", [x, y], kind="i")
    return binary_op("divide")(call)


def reduce_pairs_op(name: str) -> Op:
    def run(call: Call) -> Value:
        made = call.data(0)
        for i in range(1, len(call.inputs)):
            made = getattr(call, name)(made, call.data(i))
        return made

    return run


def evaluate_mean_of_inputs(call: Call) -> Value:
    return call.divide(reduce_pairs_op("add")(call), call.number(float(len(call.inputs))))


def evaluate_pow(call: Call) -> Value:
    _refuse_old_broadcast(call)
    x = call.data(0)
    exponent = call.data(1)
    known = exponent.stored
    if known is not None and known.size and (known == known.reshape(-1)[0]).all() and x.kind == "f":
        try:
            return call.expand(call.power(x, float(known.reshape(-1)[0])), exponent.dims)
        except NotEvaluated:
            pass
    if x.kind != "f":
        name = f"integer power of types {x.elem} and {exponent.elem}"
        return call.field.unknown_function(name, [x, exponent], kind="i")
    call.field.require_nonzero(x, "power")
    return call.field.unknown_function("power", [x, exponent])


def evaluate_abs(call: Call) -> Value:
    x = call.data(0)
    if x.sign >= Sign.NOT_NEGATIVE:
        return x
    return call.unary("Abs", x, Sign.NOT_NEGATIVE)


def unary_op(name: str, sign: Sign = Sign.UNKNOWN) -> Op:
    return lambda call: call.unary(name, call.data(0), sign)


def limited_op(name: str) -> Op:
    """Apply an unknown function that is not defined for all numbers."""

    def run(call: Call) -> Value:
        call.field.require_nonzero(call.data(0), name)
        return call.unary(name, call.data(0))

    return run


def unary_with_attributes_op(name: str, **defaults: float) -> Op:
    def run(call: Call) -> Value:
        told = [float(np.float32(call.attrs.get(key, value))) for key, value in defaults.items()]
        return call.field.unknown_function(f"{name} {told}", [call.data(0)])

    return run


def evaluate_relu(call: Call) -> Value:
    x = call.data(0)
    zero = call.field.constant(np.zeros((), np.int64 if x.kind == "i" else np.float32))
    return call.largest(x, zero)


def evaluate_clip(call: Call) -> Value:
    x = call.data(0)
    low, high = call.optional(1), call.optional(2)
    if call.opset < 11:
        low = call.number(call.attrs["min"]) if "min" in call.attrs else None
        high = call.number(call.attrs["max"]) if "max" in call.attrs else None
    if low is not None:
        x = call.largest(x, call.reshape(low, ()))
    if high is not None:
        x = call.smallest(x, call.reshape(high, ()))
    return x


def _hard_sigmoid_of(call: Call, x: Value, alpha: float, beta: float) -> Value:
    line = call.add(call.multiply(call.number(alpha), x), call.number(beta))
    return call.smallest(call.largest(line, call.number(0.0)), call.number(1.0))


def evaluate_hard_sigmoid(call: Call) -> Value:
    alpha = float(np.float32(call.attrs.get("alpha", 0.2)))
    return _hard_sigmoid_of(call, call.data(0), alpha, float(np.float32(call.attrs.get("beta", 0.5))))


def evaluate_swish(call: Call) -> Value:
    x = call.data(0)
    scaled = call.multiply(call.number(float(np.float32(call.attrs.get("alpha", 1.0)))), x)
    return call.multiply(x, call.unary("Sigmoid", scaled, Sign.POSITIVE))


def evaluate_leaky_relu(call: Call) -> Value:
    alpha = float(np.float32(call.attrs.get("alpha", 0.01)))
    return call.field.unknown_function("PRelu", [call.data(0), call.number(alpha)])


def evaluate_prelu(call: Call) -> Value:
    if call.opset < 7:
        raise NotEvaluated("broadcasting of PRelu (opset 6 or older)")
    return call.field.unknown_function("PRelu", [call.data(0), call.data(1)])


def compare_op(name: str, *, swapped: bool = False, negated: bool = False, symmetric: bool = False) -> Op:
    def run(call: Call) -> Value:
        if call.opset < 7:
            raise NotEvaluated("broadcasting by an attribute (opset 6 or older)")
        values = [call.data(0), call.data(1)]
        if swapped:
            values.reverse()
        order = call.order_of(values[0], values[1])
        if order is not None:
            true = order == 0 if symmetric else order < 0
            return call.field.constant(true ^ negated)
        made = call.field.unknown_function(name, values, kind="b", symmetric=symmetric)
        if symmetric:
            _note_constant_rows(call, made, values)
        return not_of(call, made) if negated else made

    return run


def _note_constant_rows(call: Call, equal: Value, values: Sequence[Value]) -> None:
    """Record that a row is constant where its smallest element equals its largest element."""
    field = call.field
    one, other = (field.extrema.get(field.digest(x)) for x in values)
    if one is None or other is None or {one.name, other.name} != {"max", "min"} or one.axes != other.axes:
        return
    if field.digest(one.of) == field.digest(other.of):
        field.constant_rows[field.digest(equal)] = (one,)


def not_of(call: Call, x: Value) -> Value:
    return as_boolean(call.subtract(call.field.constant(np.ones((), np.int64)), x))


def evaluate_and(call: Call) -> Value:
    _refuse_old_broadcast(call)
    x, y = call.data(0), call.data(1)
    made = as_boolean(call.multiply(x, y))
    rows = call.field.constant_rows
    both = (*rows.get(call.field.digest(x), ()), *rows.get(call.field.digest(y), ()))
    if both:
        rows[call.field.digest(made)] = both
    return made


def evaluate_or(call: Call) -> Value:
    _refuse_old_broadcast(call)
    x, y = call.data(0), call.data(1)
    return as_boolean(call.subtract(call.add(x, y), call.multiply(x, y)))


def evaluate_where(call: Call) -> Value:
    """Compute c·x + (1 − c)·y. An equality that holds for every number c also holds for 0 and 1."""
    condition, x, y = call.data(0), call.data(1), call.data(2)
    field = call.field
    if condition.stored is not None and condition.stored.dtype.kind == "b":
        chosen = condition.stored
        if chosen.size and (chosen == chosen.reshape(-1)[0]).all():
            kept, other = (x, y) if chosen.reshape(-1)[0] else (y, x)
            return broadcast_like(call, kept, [condition, other])
        if not (x.is_open or y.is_open):
            return where_stored(call, chosen, x, y)
    if _is_centered_row(call, condition, x, y):
        return broadcast_like(call, y, [condition, x])
    c, a, b = (field.residues(v) for v in field.align([condition, x, y]))
    arithmetic = field.arithmetic
    made = arithmetic.add(arithmetic.multiply(c, arithmetic.subtract(a, b)), b)
    degree = condition.degree.times(x.degree.plus(y.degree)).plus(y.degree)
    chosen_values = field.made(
        made,
        degree,
        kind=joint_kind(x, y),
        sign=min(x.sign, y.sign),
        special=x.special or y.special,
        axes=joint_axes([condition, x, y]),
    )
    return replace(chosen_values, elem=x.elem, wraps=x.wraps or y.wraps, fits=joint_fit([x, y]))


def _is_centered_row(call: Call, condition: Value, x: Value, y: Value) -> bool:
    """Return True if ``x`` is 0, and ``y`` is 0 too wherever the condition is true.

    This is so if the condition implies that a row is constant, and ``y`` is the row minus its mean.
    """
    field = call.field
    if x.stored is None or x.stored.dtype == object or x.stored.any():
        return False
    for row in field.constant_rows.get(field.digest(condition), ()):
        factors = tuple(() if i in row.axes else axis for i, axis in enumerate(row.of.factors))
        centered = call.subtract(row.of, call.mean(row.of, row.axes))
        field.note_compared(centered, y)
        if condition.factors == factors and field.digest(centered) == field.digest(y):
            return True
    return False


def evaluate_identity(call: Call) -> Value:
    return call.data(0)


def evaluate_dropout(call: Call) -> Any:
    training = call.numbers(2)
    ratio = call.numbers(1)
    if call.opset < 7 and not call.attrs.get("is_test"):
        raise NotEvaluated("Dropout in training mode")
    if training is not None and training.all() and (ratio is None or ratio.any()):
        raise NotEvaluated("Dropout in training mode")
    x = call.data(0)
    if call.outputs < 2:
        return x
    return x, call.field.constant(np.ones(x.dims, np.bool_))


def floor_op(name: str, real: Callable[[Any], Any]) -> Op:
    def run(call: Call) -> Value:
        x = call.data(0)
        known = call.field.approx(x)
        if known is None:
            return call.unary(name, x)
        # Fail if the rounding of a computed constant decides.
        if x.stored is None:
            truncate_constants(known.numbers)
        return call.field.constant(np.asarray(real(known.numbers), np.float64))

    return run
