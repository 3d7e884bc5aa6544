"""Evaluate ONNX ops at a random point of prime fields.

Sums, products and moves of elements are evaluated exactly. Every other function of one element, such as Exp, is an
unknown function: equal arguments have equal results. An op of `TABLE` may raise `NotEvaluated`; then the whole node is
an unknown function of its inputs (`normdeploy.verbs.prove.field_run`).

All definitions follow https://onnx.ai/onnx/operators, in real arithmetic: numbers of infinite precision and range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...evaluate import evaluator
from ...evaluate.evaluator_core import UnsupportedOp, decode_text, integers_from, optional_input
from .field_values import Approx, Degree, Field, NotEvaluated, Sign, Value
from .residues import Array, matmul_modulo

Attrs = Mapping[str, Any]
Inputs = Sequence[Value | None]
Op = Callable[["Call"], Any]


class Call:
    """One node under evaluation.

    Attributes:
        field: the random point.
        inputs: values; None for an omitted input.
        attrs: attributes as plain values.
        opset: version of the op's domain.
        outputs: number of outputs.
    """

    def __init__(self, field: Field, op: str, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> None:
        self.field = field
        self.op = op
        self.inputs = inputs
        self.attrs = attrs
        self.opset = opset
        self.outputs = outputs

    def data(self, index: int) -> Value:
        """Return the input at ``index``, which must be present."""
        x = self.optional(index)
        if x is None:
            raise NotEvaluated("an input is missing")
        return x

    def optional(self, index: int) -> Value | None:
        """Return the input at ``index``; None if it is omitted."""
        return self.inputs[index] if index < len(self.inputs) else None

    def numbers(self, index: int) -> Array | None:
        """Return the numbers of the input at ``index``; None if it is omitted.

        Raises:
            NotEvaluated: they depend on the inputs of the graph.
        """
        x = self.optional(index)
        if x is None:
            return None
        if x.stored is None:
            raise NotEvaluated("sizes or positions depend on an input")
        return x.stored

    def integers(self, index: int, name: str) -> list[int] | None:
        """Return a list of integers from the input at ``index``, or from the attribute ``name``."""
        given = self.numbers(index)
        if given is not None:
            return [int(n) for n in given.reshape(-1)]
        attribute = self.attrs.get(name)
        return None if attribute is None else [int(n) for n in attribute]

    def number(self, value: float) -> Value:
        """Make the constant ``value`` as attributes store it."""
        return self.field.constant(np.asarray(value, np.float64).reshape(()))

    # ------------------------------------------------------------ arithmetic

    def approx_of(
        self, function: Callable[..., Any], *values: Value, linear: bool = False, terms: int = 1
    ) -> Approx | None:
        """Compute constants in float64; None if a value is no constant.

        Args:
            linear: the function adds products, so it is applied to the magnitudes too.
            terms: number of roundings of the function itself.
        """
        known = [x for x in map(self.field.approx, values) if x is not None]
        if len(known) < len(values):
            return None
        with np.errstate(all="ignore"):
            numbers = np.asarray(function(*(x.numbers for x in known)), np.float64)
            if linear:
                magnitude = np.asarray(function(*(x.magnitude for x in known)), np.float64)
            else:
                # A function of one number changes relative errors by a small factor at most if it does not cancel.
                worst = max(
                    (float((x.magnitude / np.maximum(np.abs(x.numbers), 1e-300)).max(initial=1.0)) for x in known),
                    default=1.0,
                )
                magnitude = np.abs(numbers) * worst
        return Approx(numbers, magnitude, sum(x.roundings for x in known) + terms)

    def add(self, x: Value, y: Value) -> Value:
        """Add."""
        field = self.field
        a, b = field.align([x, y])
        sign = Sign.UNKNOWN
        if min(x.sign, y.sign) >= Sign.NOT_NEGATIVE:
            sign = max(x.sign, y.sign)
        made = field.arithmetic.add(field.residues(a), field.residues(b))
        return field.made(
            made,
            x.degree.plus(y.degree),
            kind=_joint_kind(x, y),
            approx=self.approx_of(np.add, x, y, linear=True),
            sign=sign,
            special=x.special or y.special,
        )

    def subtract(self, x: Value, y: Value) -> Value:
        """Subtract."""
        _refuse_special(x, y)
        field = self.field
        a, b = field.align([x, y])
        made = field.arithmetic.subtract(field.residues(a), field.residues(b))
        approx = self.approx_of(np.subtract, x, y)
        if approx is not None:
            total = self.approx_of(np.add, x, y, linear=True)
            assert total is not None
            approx = Approx(approx.numbers, total.magnitude, total.roundings)
        return field.made(made, x.degree.plus(y.degree), kind=_joint_kind(x, y), approx=approx)

    def multiply(self, x: Value, y: Value) -> Value:
        """Multiply."""
        _refuse_special(x, y)
        field = self.field
        a, b = field.align([x, y])
        sign = min(x.sign, y.sign)
        if x is y or (sign is Sign.UNKNOWN and x.shape == y.shape and field.digest(x) == field.digest(y)):
            sign = max(sign, Sign.NOT_NEGATIVE)
        made = field.arithmetic.multiply(field.residues(a), field.residues(b))
        return field.made(
            made,
            x.degree.times(y.degree),
            kind=_joint_kind(x, y),
            approx=self.approx_of(np.multiply, x, y, linear=True),
            sign=sign,
        )

    def inverse(self, x: Value) -> Value:
        """Compute 1/x, and record where it is not defined."""
        if not x.is_constant:
            self.field.require_nonzero(x)
        return self._inverse_of_nonzero(x)

    def _inverse_of_nonzero(self, x: Value) -> Value:
        _refuse_special(x)
        field = self.field
        approx = self.approx_of(lambda v: 1.0 / v, x)
        try:
            made = field.arithmetic.inverse(field.residues(x))
        except ZeroDivisionError:
            raise NotEvaluated("it divides by zero") from None
        degree = x.degree
        if approx is None:
            degree = self._degree_of_inverse(x)
        return field.made(made, degree, approx=approx, sign=Sign.POSITIVE if x.sign is Sign.POSITIVE else Sign.UNKNOWN)

    def _degree_of_inverse(self, x: Value) -> Degree:
        """Make all elements of ``x`` a new common divisor."""
        field = self.field
        inner = x.degree.excess
        height = x.degree.height
        own = 0
        for key, exponent in x.degree.poles.items():
            inner += exponent * field.poles[key][0]
            own += exponent * field.poles[key][0]
            height += exponent * field.poles[key][1]
        key = field.digest(x)
        field.poles[key] = (x.size * inner, x.size * height)
        return Degree(own, height, {key: 1})

    def divide(self, x: Value, y: Value) -> Value:
        """Divide."""
        _refuse_special(x, y)
        return self.multiply(x, self.inverse(y))

    def negate(self, x: Value) -> Value:
        """Compute -x."""
        return self.subtract(self.number(0.0), x)

    def root(self, x: Value) -> Value:
        """Compute √x as the inverse of an unknown function of x."""
        made = self._inverse_of_nonzero(self._unknown_inverse_root(x))
        made.sign = Sign.POSITIVE if x.sign is Sign.POSITIVE else Sign.NOT_NEGATIVE
        return made

    def inverse_root(self, x: Value) -> Value:
        """Compute 1/√x, and record where it is not defined."""
        made = self._unknown_inverse_root(x)
        if not x.is_constant and x.sign is not Sign.POSITIVE:
            self.field.require_nonzero(self._inverse_of_nonzero(made))
        return made

    def _unknown_inverse_root(self, x: Value) -> Value:
        _refuse_special(x)
        approx = self.approx_of(lambda v: 1.0 / np.sqrt(v), x)
        if approx is None:
            self.field.require_nonzero(x, "root")
        made = self.field.unknown_function("1/sqrt", [x], approx=approx)
        made.sign = Sign.POSITIVE if x.sign is Sign.POSITIVE else Sign.NOT_NEGATIVE
        return made

    def sum(self, x: Value, axes: Sequence[int], *, keepdims: bool = True) -> Value:
        """Add along axes."""
        _refuse_special(x)
        field = self.field
        places = tuple(axes)
        terms = math.prod(x.dims[i] for i in places)
        if not terms:
            raise NotEvaluated("a sum of no elements")
        made = field.arithmetic.sum(field.residues(x), places, keepdims=keepdims)
        approx = self.approx_of(
            lambda v: np.add.reduce(v, axis=places, keepdims=keepdims), x, linear=True, terms=terms
        )
        return field.made(made, x.degree.plus(x.degree, terms), kind=_joint_kind(x), approx=approx, sign=x.sign)

    def mean(self, x: Value, axes: Sequence[int], *, keepdims: bool = True) -> Value:
        """Compute the mean along axes."""
        total = self.sum(x, axes, keepdims=keepdims)
        return self.divide(total, self.number(float(math.prod(x.dims[i] for i in axes))))

    def power(self, x: Value, exponent: float) -> Value:
        """Compute x to the power of a constant."""
        _refuse_special(x)
        whole = round(2 * exponent)
        if 2 * exponent != whole or abs(whole) > 64:
            raise NotEvaluated("a power with an exponent that is not a multiple of one half")
        if whole % 2:
            base = self.root(x) if whole > 0 else self.inverse_root(x)
            count = abs(whole)
        else:
            base = x if whole >= 0 else self.inverse(x)
            count = abs(whole) // 2
        if count == 1:
            return base
        field = self.field
        degree = Degree()
        for _ in range(count):
            degree = degree.times(base.degree)
        sign = base.sign
        if count % 2 == 0:
            sign = max(sign, Sign.NOT_NEGATIVE)
        made = field.arithmetic.power(field.residues(base), count)
        approx = self.approx_of(lambda v: np.power(v, exponent), x)
        return field.made(made, degree, kind=x.kind, approx=approx, sign=sign)

    def unary(self, name: str, x: Value, sign: Sign = Sign.UNKNOWN) -> Value:
        """Apply an unknown function of one number."""
        real = _REAL.get(name)
        approx = None if real is None else self.approx_of(real, x)
        made = self.field.unknown_function(name, [x], approx=approx, kind=x.kind)
        made.sign = max(made.sign, sign)
        return made

    def largest(self, x: Value, y: Value) -> Value:
        """Compute the larger of two numbers as an unknown symmetric function."""
        made = self.field.unknown_function(
            "max", [x, y], symmetric=True, approx=self.approx_of(np.maximum, x, y), kind=_joint_kind(x, y)
        )
        made.sign = max(made.sign, x.sign, y.sign)
        return made

    def smallest(self, x: Value, y: Value) -> Value:
        """Compute the smaller of two numbers as an unknown symmetric function."""
        made = self.field.unknown_function(
            "min", [x, y], symmetric=True, approx=self.approx_of(np.minimum, x, y), kind=_joint_kind(x, y)
        )
        made.sign = max(made.sign, min(x.sign, y.sign))
        return made

    # ------------------------------------------------------------ moves

    def gather_places(self, x: Value, places: Array) -> Value:
        """Move elements.

        Args:
            places: for each element of the result, 1 + its index in the flattened ``x``, or 0 for the number 0.
        """
        filled = not places.all()
        sign = x.sign
        if filled:
            sign = min(sign, Sign.NOT_NEGATIVE)
        if x.stored is not None:
            flat = np.concatenate([np.zeros(1, x.stored.dtype), x.stored.reshape(-1)])
            made = self.field.constant(flat[places])
            return replace(made, kind=x.kind)
        a = self.field.residues(x).reshape(len(self.field.arithmetic.primes), -1)
        moved = a[:, np.maximum(places - 1, 0)] if x.size else np.zeros((a.shape[0], *places.shape), np.int64)
        if filled:
            moved[:, places == 0] = 0
        approx = None
        if x.approx is not None:
            approx = x.approx.moved(lambda v: np.concatenate([np.zeros(1), v.reshape(-1)])[places])
        return Value(places.shape, x.kind, None, moved, b"", approx, x.degree, sign, x.special)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """Reshape without a move."""
        if x.stored is not None:
            return replace(x, stored=x.stored.reshape(shape), shape=tuple(shape), residues=None, digest=b"")
        a = self.field.residues(x)
        approx = None if x.approx is None else x.approx.moved(lambda v: v.reshape(shape))
        return replace(x, residues=a.reshape(a.shape[0], *shape), shape=tuple(shape), approx=approx, digest=b"")

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        """Permute axes."""
        shape = tuple(x.dims[i] for i in perm)
        if x.stored is not None:
            return replace(x, stored=x.stored.transpose(perm), shape=shape, residues=None, digest=b"")
        a = self.field.residues(x).transpose(0, *(i + 1 for i in perm))
        approx = None if x.approx is None else x.approx.moved(lambda v: v.transpose(perm))
        return replace(x, residues=a, shape=shape, approx=approx, digest=b"")

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        """Broadcast to ``shape``."""
        places = np.arange(1, x.size + 1).reshape(x.dims)
        return self.gather_places(x, np.broadcast_to(places, np.broadcast_shapes(x.dims, tuple(shape))))

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Concatenate along an axis."""
        if all(x.stored is not None for x in values):
            made = self.field.constant(np.concatenate([x.stored for x in values if x.stored is not None], axis))
            return replace(made, kind=_joint_kind(*values))
        rank = values[0].rank
        axis %= rank
        joined = np.concatenate([self.field.residues(x) for x in values], axis + 1)
        known = [x for x in map(self.field.approx, values) if x is not None]
        approx = None
        if len(known) == len(values):
            approx = Approx(
                np.concatenate([x.numbers for x in known], axis),
                np.concatenate([x.magnitude for x in known], axis),
                max(x.roundings for x in known),
            )
        degree = values[0].degree
        for x in values[1:]:
            degree = degree.plus(x.degree)
        sign = min(x.sign for x in values)
        special = any(x.special for x in values)
        return Value(joined.shape[1:], _joint_kind(*values), None, joined, b"", approx, degree, sign, special)

    def matmul(self, x: Value, y: Value) -> Value:
        """Multiply matrices as numpy's matmul does."""
        _refuse_special(x, y)
        field = self.field
        if x.rank < 1 or y.rank < 1:
            raise NotEvaluated("MatMul of a scalar")
        left = x if x.rank > 1 else self.reshape(x, (1, *x.dims))
        right = y if y.rank > 1 else self.reshape(y, (*y.dims, 1))
        made = np.stack(
            [
                matmul_modulo(field.residues_modulo(left, j), field.residues_modulo(right, j), p)
                for j, p in enumerate(field.arithmetic.primes)
            ]
        )
        if x.rank == 1:
            made = made[..., 0, :]
        if y.rank == 1:
            made = made[..., 0]
        product = x.degree.times(y.degree)
        return field.made(made, product.plus(product, x.dims[-1]), approx=self.approx_of(np.matmul, x, y, linear=True, terms=x.dims[-1]))


def _joint_kind(*values: Value) -> str:
    return "f" if any(x.kind == "f" for x in values) else values[0].kind


def _refuse_special(*values: Value) -> None:
    if any(x.special for x in values):
        raise NotEvaluated("arithmetic on infinite numbers or NaN")


def normalize_axes(axes: Sequence[int], rank: int) -> list[int]:
    """Make axes non-negative.

    Raises:
        NotEvaluated: an axis does not exist.
    """
    if any(not -rank <= i < rank for i in axes):
        raise NotEvaluated("an axis does not exist")
    return sorted({i % rank for i in axes})


# ------------------------------------------------------------------ elementwise


def _binary(name: str) -> Op:
    def run(call: Call) -> Value:
        if call.opset < 7 and ("axis" in call.attrs or call.data(0).shape != call.data(1).shape):
            raise NotEvaluated("broadcasting by an attribute (opset 6 or older)")
        return getattr(call, name)(call.data(0), call.data(1))

    return run


def _div(call: Call) -> Value:
    x = call.data(0)
    y = call.data(1)
    if x.kind != "f":
        call.field.require_nonzero(y)
        return call.field.unknown_function("integer division", [x, y], kind="i")
    return _binary("divide")(call)


def _reduce_pairs(name: str) -> Op:
    def run(call: Call) -> Value:
        made = call.data(0)
        for i in range(1, len(call.inputs)):
            made = getattr(call, name)(made, call.data(i))
        return made

    return run


def _mean_of_inputs(call: Call) -> Value:
    return call.divide(_reduce_pairs("add")(call), call.number(float(len(call.inputs))))


def _pow(call: Call) -> Value:
    x = call.data(0)
    exponent = call.data(1)
    known = exponent.stored
    if known is not None and known.size and (known == known.reshape(-1)[0]).all() and x.kind == "f":
        shape = np.broadcast_shapes(x.dims, exponent.dims)
        try:
            return call.expand(call.power(x, float(known.reshape(-1)[0])), shape)
        except NotEvaluated:
            pass
    if x.kind != "f":
        return call.field.unknown_function("integer power", [x, exponent], kind="i")
    call.field.require_nonzero(x, "power")
    return call.field.unknown_function("power", [x, exponent])


def _abs(call: Call) -> Value:
    x = call.data(0)
    if x.sign >= Sign.NOT_NEGATIVE:
        return x
    return call.unary("Abs", x, Sign.NOT_NEGATIVE)


def _unary(name: str, sign: Sign = Sign.UNKNOWN) -> Op:
    return lambda call: call.unary(name, call.data(0), sign)


def _limited(name: str) -> Op:
    """Apply an unknown function that is not defined for all numbers."""

    def run(call: Call) -> Value:
        call.field.require_nonzero(call.data(0), name)
        return call.unary(name, call.data(0))

    return run


def _with_attributes(name: str, **defaults: float) -> Op:
    def run(call: Call) -> Value:
        told = [float(np.float32(call.attrs.get(key, value))) for key, value in defaults.items()]
        return call.field.unknown_function(f"{name} {told}", [call.data(0)])

    return run


def _relu(call: Call) -> Value:
    x = call.data(0)
    zero = call.field.constant(np.zeros((), np.int64 if x.kind == "i" else np.float32))
    return call.largest(x, zero)


def _clip(call: Call) -> Value:
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


def _hard_sigmoid(call: Call) -> Value:
    alpha = float(np.float32(call.attrs.get("alpha", 0.2)))
    return _hard_sigmoid_of(call, call.data(0), alpha, float(np.float32(call.attrs.get("beta", 0.5))))


def _swish(call: Call) -> Value:
    x = call.data(0)
    scaled = call.multiply(call.number(float(np.float32(call.attrs.get("alpha", 1.0)))), x)
    return call.multiply(x, call.unary("Sigmoid", scaled, Sign.POSITIVE))


def _leaky_relu(call: Call) -> Value:
    alpha = float(np.float32(call.attrs.get("alpha", 0.01)))
    return call.field.unknown_function("PRelu", [call.data(0), call.number(alpha)])


def _prelu(call: Call) -> Value:
    if call.opset < 7:
        raise NotEvaluated("broadcasting of PRelu (opset 6 or older)")
    return call.field.unknown_function("PRelu", [call.data(0), call.data(1)])


def _compare(name: str, *, swapped: bool = False, negated: bool = False, symmetric: bool = False) -> Op:
    def run(call: Call) -> Value:
        if call.opset < 7:
            raise NotEvaluated("broadcasting by an attribute (opset 6 or older)")
        values = [call.data(0), call.data(1)]
        if swapped:
            values.reverse()
        made = call.field.unknown_function(name, values, kind="b", symmetric=symmetric)
        return _not_of(call, made) if negated else made

    return run


def _not_of(call: Call, x: Value) -> Value:
    return replace(call.subtract(call.field.constant(np.ones((), np.int64)), x), kind="b")


def _and(call: Call) -> Value:
    return replace(call.multiply(call.data(0), call.data(1)), kind="b")


def _or(call: Call) -> Value:
    x, y = call.data(0), call.data(1)
    return replace(call.subtract(call.add(x, y), call.multiply(x, y)), kind="b")


def _where(call: Call) -> Value:
    """Compute c·x + (1 − c)·y. An equality that holds for every number c also holds for 0 and 1."""
    condition, x, y = call.data(0), call.data(1), call.data(2)
    field = call.field
    if condition.stored is not None:
        return _where_stored(call, condition.stored, x, y)
    c, a, b = (field.residues(v) for v in field.align([condition, x, y]))
    arithmetic = field.arithmetic
    made = arithmetic.add(arithmetic.multiply(c, arithmetic.subtract(a, b)), b)
    degree = condition.degree.times(x.degree.plus(y.degree)).plus(y.degree)
    return field.made(made, degree, kind=_joint_kind(x, y), sign=min(x.sign, y.sign), special=x.special or y.special)


def _where_stored(call: Call, condition: Array, x: Value, y: Value) -> Value:
    shape = np.broadcast_shapes(condition.shape, x.dims, y.dims)
    first = np.broadcast_to(np.arange(x.size).reshape(x.dims), shape)
    second = np.broadcast_to(np.arange(y.size).reshape(y.dims) + x.size, shape)
    both = call.concat([call.reshape(x, (x.size,)), call.reshape(y, (y.size,))], 0)
    return call.gather_places(both, np.where(condition, first, second) + 1)


def _identity(call: Call) -> Value:
    return call.data(0)


def _dropout(call: Call) -> Any:
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


_FLOATS = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}
_INTEGERS = {2: np.uint8, 3: np.int8, 4: np.uint16, 5: np.int16, 6: np.int32, 7: np.int64, 12: np.uint32, 13: np.uint64}
# Integer types that hold every size and position, so that a Cast to them loses nothing
_WIDE = (6, 7, 13)


def _cast(call: Call) -> Value:
    return _cast_to(call, call.data(0), call.attrs["to"])


def _cast_to(call: Call, x: Value, to: Any) -> Value:
    if not isinstance(to, int):
        raise NotEvaluated("Cast to a type by its name (opset 5 or older)")
    if to in _FLOATS:
        return _cast_to_float(call, x, to)
    if to == 9:
        if x.kind == "b":
            return x
        if x.stored is not None:
            return call.field.constant(x.stored.astype(bool))
        return call.field.unknown_function("not zero", [x], kind="b")
    if to not in _INTEGERS:
        raise NotEvaluated(f"Cast to type {to}")
    return _cast_to_integer(call, x, to)


def _cast_to_float(call: Call, x: Value, to: int) -> Value:
    if x.stored is None:
        return replace(x, kind="f")
    if x.stored.dtype.kind in "iub":
        wide = x.stored.astype(np.float64)
        if not np.array_equal(wide.astype(x.stored.dtype), x.stored):
            raise NotEvaluated("integers that float64 does not represent")
        return replace(call.field.constant(wide), kind="f")
    if _FLOATS[to] in ("float16", "bfloat16") and not x.special:
        # A constant beyond the range of the type becomes infinite.
        limit = 65504.0 if to == 10 else 3.3895313892515355e38
        if (np.abs(x.stored) > limit).any():
            raise NotEvaluated("a constant beyond the range of its type")
    return x


def _cast_to_integer(call: Call, x: Value, to: int) -> Value:
    if x.stored is not None:
        if x.special or not np.isfinite(x.stored.astype(np.float64)).all():
            raise NotEvaluated("Cast of infinite numbers to integers")
        return call.field.constant(x.stored.astype(_INTEGERS[to]))
    if x.approx is not None:
        return call.field.constant(_truncate(x.approx.numbers).astype(_INTEGERS[to]))
    if x.kind in "ib" and (to in _WIDE or x.kind == "b"):
        return replace(x, kind="i")
    return call.field.unknown_function(f"Cast from {x.kind} to {to}", [x], kind="i")


def _truncate(approx: Array) -> Array:
    """Drop the fraction of constants that were computed in float64.

    Raises:
        NotEvaluated: a number is so near to an integer that rounding decides.
    """
    nearest = np.rint(approx)
    distance = np.abs(approx - nearest)
    if ((distance > 0) & (distance < 1e-6 * np.maximum(1, np.abs(approx)))).any():
        raise NotEvaluated("Cast of a computed constant near an integer")
    return np.trunc(approx)


def _cast_like(call: Call) -> Value:
    x, like = call.data(0), call.data(1)
    if like.kind == "f":
        return _cast_to_float(call, x, 1)
    if like.kind == x.kind == "i":
        return x
    raise NotEvaluated("CastLike to integers")


def _floor(name: str, real: Callable[[Any], Any]) -> Op:
    def run(call: Call) -> Value:
        x = call.data(0)
        known = call.field.approx(x)
        if known is None:
            return call.unary(name, x)
        # Fail if the rounding of a computed constant decides.
        if x.stored is None:
            _truncate(known.numbers)
        return call.field.constant(np.asarray(real(known.numbers), np.float64))

    return run


# ------------------------------------------------------------------ moves


def _evaluator_move(call: Call) -> Any:
    """Move elements as the float64 evaluator moves their indices."""
    x = call.data(0)
    others = [call.numbers(i) for i in range(1, len(call.inputs))]
    index = np.arange(1, x.size + 1).reshape(x.dims)
    try:
        results = evaluator.evaluate_node(
            call.op, [index, *others], call.attrs, opset=call.opset, outputs=call.outputs
        )
    except (UnsupportedOp, ValueError, IndexError, TypeError, AssertionError) as error:
        raise NotEvaluated(f"{call.op}: {error}") from error
    return tuple(call.gather_places(x, r) for r in results if r is not None)


def _reference_move(call: Call) -> Any:
    """Move elements as onnx's reference implementation moves their indices; zeros stay zeros."""
    x = call.data(0)
    if x.kind == "o":
        raise NotEvaluated("its input is no number")
    others = [call.numbers(i) for i in range(1, len(call.inputs))]
    index = np.arange(1, x.size + 1).reshape(x.dims)
    made = _run_reference(call, [index, *others])
    return tuple(call.gather_places(x, r) for r in made)


def _run_reference(call: Call, arrays: Sequence[Any]) -> list[Array]:
    import onnx.helper
    import onnx.reference

    names = [f"x{i}" if x is not None else "" for i, x in enumerate(arrays)]
    node = onnx.helper.make_node(call.op, names, [f"y{i}" for i in range(call.outputs)], **call.attrs)
    inputs = [onnx.helper.make_tensor_value_info(n, 7, None) for n in names if n]
    outputs = [onnx.helper.make_tensor_value_info(n, 7, None) for n in node.output]
    graph = onnx.helper.make_graph([node], "node", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", call.opset)], ir_version=10)
    try:
        runner = onnx.reference.ReferenceEvaluator(model)
        return list(runner.run(None, {n: a for n, a in zip(names, arrays, strict=True) if n}))
    # The reference implementation raises errors of any type.
    except Exception as error:
        raise NotEvaluated(f"{call.op}: {error}") from error


def _reshape(call: Call) -> Value:
    x = call.data(0)
    shape = call.integers(1, "shape")
    if shape is None:
        raise NotEvaluated("Reshape without a shape")
    if not call.attrs.get("allowzero"):
        shape = [x.dims[i] if n == 0 else n for i, n in enumerate(shape)]
    if -1 in shape:
        rest = math.prod(n for n in shape if n != -1)
        if not rest or x.size % rest:
            raise NotEvaluated("Reshape to a shape that does not fit")
        shape = [x.size // rest if n == -1 else n for n in shape]
    if math.prod(shape) != x.size or min(shape, default=0) < 0:
        raise NotEvaluated("Reshape to a shape that does not fit")
    return call.reshape(x, shape)


def _flatten(call: Call) -> Value:
    x = call.data(0)
    axis = call.attrs.get("axis", 1)
    axis = axis + x.rank if axis < 0 else axis
    return call.reshape(x, (math.prod(x.dims[:axis]), math.prod(x.dims[axis:])))


def _squeeze(call: Call) -> Value:
    x = call.data(0)
    axes = call.integers(1, "axes")
    if axes is None:
        axes = [i for i, n in enumerate(x.dims) if n == 1]
    axes = normalize_axes(axes, x.rank)
    if any(x.dims[i] != 1 for i in axes):
        raise NotEvaluated("Squeeze of an axis that is not 1")
    return call.reshape(x, [n for i, n in enumerate(x.dims) if i not in axes])


def _unsqueeze(call: Call) -> Value:
    x = call.data(0)
    axes = call.integers(1, "axes") or []
    rank = x.rank + len(axes)
    ones = normalize_axes(axes, rank)
    if len(ones) != len(axes):
        raise NotEvaluated("Unsqueeze of one axis twice")
    kept = iter(x.dims)
    return call.reshape(x, [1 if i in ones else next(kept) for i in range(rank)])


def _transpose(call: Call) -> Value:
    x = call.data(0)
    return call.transpose(x, call.attrs.get("perm") or range(x.rank)[::-1])


def _expand(call: Call) -> Value:
    shape = call.integers(1, "shape")
    return call.expand(call.data(0), shape or [])


def _concat(call: Call) -> Value:
    return call.concat([call.data(i) for i in range(len(call.inputs))], call.attrs.get("axis", 1))


def _gather(call: Call) -> Value:
    """Pick rows. Rows that an input picks are Σ_r e_r(index)·row_r with an unknown function e_r for each row.

    An equality that holds for all functions e also holds for the functions that are 1 at r and 0 elsewhere.
    """
    x, index = call.data(0), call.data(1)
    if index.stored is not None:
        return _evaluator_move(call)[0]
    _refuse_special(x)
    field = call.field
    axis = call.attrs.get("axis", 0) % x.rank
    rows = x.dims[axis]
    keys = field.unknown.keys(f"row of {rows}", field.residues(index))
    picks = _extend_keys(field, keys.reshape(2, -1), rows)
    field.note_degree(index.degree)
    weights = field.made(field.unknown.from_keys(picks), Degree(1))
    field.note_applied(weights.size)
    moved = call.transpose(x, [axis, *(i for i in range(x.rank) if i != axis)])
    rest = moved.dims[1:]
    picked = call.matmul(weights, call.reshape(moved, (rows, math.prod(rest))))
    picked = call.reshape(picked, (*index.dims, *rest))
    # The axes of the index move to the place of the axis that it replaces.
    lead = index.rank
    before = range(lead, lead + axis)
    after = range(lead + axis, lead + len(rest))
    return replace(call.transpose(picked, [*before, *range(lead), *after]), kind=x.kind, sign=Sign.UNKNOWN)


def _extend_keys(field: Field, keys: Array, count: int) -> Array:
    """Derive ``count`` keys from each key.

    Returns:
        uint64 with shape (2, keys, count).
    """
    base = field.unknown.fill("rows", (count,))[:2].astype(np.uint64)
    return (keys[:, :, None] + (base << np.uint64(31))[:, None, :]) ^ base[::-1][:, None, :]


def _gather_elements(call: Call) -> Any:
    return _reference_move(call)


def _pad(call: Call) -> Any:
    mode = decode_text(call.attrs.get("mode", "constant"))
    if mode != "constant":
        return _reference_move(call)
    given = call.optional(2)
    value = call.attrs.get("value", 0.0) if call.opset < 11 else 0.0
    if given is not None:
        numbers = call.numbers(2)
        value = 0.0 if numbers is None else float(numbers.reshape(()))
    x = call.data(0)
    index = np.arange(1, x.size + 1).reshape(x.dims)
    pads = call.integers(1, "pads" if call.opset >= 2 else "paddings")
    axes = call.integers(3, "axes")
    if pads is None:
        raise NotEvaluated("Pad without pads")
    inner = [index, np.array(pads), None, None if axes is None else np.array([i % x.rank for i in axes])]
    try:
        (places,) = evaluator.evaluate_node("Pad", inner, {}, opset=18)
    except (UnsupportedOp, ValueError, IndexError) as error:
        raise NotEvaluated(f"Pad: {error}") from error
    assert places is not None
    if value == 0.0:
        return call.gather_places(x, places)
    filler = call.field.constant(np.asarray([value], np.float64))
    both = call.concat([call.reshape(x, (x.size,)), filler], 0)
    return replace(call.gather_places(both, np.where(places == 0, x.size + 1, places)), kind=x.kind)


def _scatter(call: Call) -> Any:
    """Replace elements at constant places."""
    if decode_text(call.attrs.get("reduction", "none")) != "none":
        raise NotEvaluated(f"{call.op} with a reduction")
    x, updates = call.data(0), call.data(2)
    index = call.numbers(1)
    first = np.arange(1, x.size + 1).reshape(x.dims)
    second = np.arange(x.size + 1, x.size + updates.size + 1).reshape(updates.dims)
    (places,) = _run_reference(call, [first, index, second])
    both = call.concat([call.reshape(x, (x.size,)), call.reshape(updates, (updates.size,))], 0)
    return call.gather_places(both, places)


def _shape(call: Call) -> Value:
    dims = call.data(0).dims[call.attrs.get("start", 0) : call.attrs.get("end")]
    return call.field.constant(np.array(dims, np.int64))


def _size(call: Call) -> Value:
    return call.field.constant(np.array(call.data(0).size, np.int64))


def _constant_of_shape(call: Call) -> Value:
    shape = call.integers(0, "")
    value = np.asarray(call.attrs.get("value", np.zeros(1, np.float32)))
    return call.field.constant(np.full(shape or (), value.reshape(())))


def _range(call: Call) -> Value:
    numbers = [call.numbers(i) for i in range(3)]
    (made,) = evaluator.evaluate_node("Range", numbers, {}, opset=call.opset)
    assert made is not None
    if made.dtype.kind == "f" and not (made == np.rint(made)).all():
        raise NotEvaluated("Range of fractions")
    return call.field.constant(made)


def _cumsum(call: Call) -> Value:
    x = call.data(0)
    _refuse_special(x)
    if call.attrs.get("exclusive") or call.attrs.get("reverse"):
        raise NotEvaluated("CumSum with exclusive or reverse")
    axis = call.numbers(1)
    assert axis is not None
    place = int(axis.reshape(())) % x.rank
    if x.stored is not None and x.kind != "f":
        return call.field.constant(np.cumsum(x.stored, axis=place, dtype=np.int64))
    field = call.field
    made = field.arithmetic.reduce(np.cumsum(field.residues(x), axis=place + 1))
    return field.made(made, x.degree.plus(x.degree, max(x.dims[place], 1)), kind=x.kind)


# ------------------------------------------------------------------ reductions


def _reduced_axes(call: Call, x: Value) -> list[int] | None:
    axes = call.integers(1, "axes")
    if not axes:
        if call.attrs.get("noop_with_empty_axes"):
            return None
        axes = list(range(x.rank))
    return normalize_axes(axes, x.rank)


def _reduction(core: Callable[[Call, Value, list[int]], Value], *, of_element: Callable[[Call, Value], Value]) -> Op:
    def run(call: Call) -> Value:
        x = call.data(0)
        axes = _reduced_axes(call, x)
        if axes is None:
            return of_element(call, x)
        y = core(call, x, axes)
        if call.attrs.get("keepdims", 1):
            return y
        return call.reshape(y, [n for i, n in enumerate(y.dims) if i not in axes])

    return run


def _sum_of_squares(call: Call, x: Value, axes: list[int]) -> Value:
    return call.sum(call.multiply(x, x), axes)


def _root_of_squares(call: Call, x: Value, axes: list[int]) -> Value:
    return call.root(_sum_of_squares(call, x, axes))


def _sum_of_magnitudes(call: Call, x: Value, axes: list[int]) -> Value:
    return call.sum(call.unary("Abs", x, Sign.NOT_NEGATIVE), axes)


def _log_sum_exp(call: Call, x: Value, axes: list[int]) -> Value:
    return call.unary("Log", call.sum(call.unary("Exp", x, Sign.POSITIVE), axes))


def _unordered(name: str) -> Callable[[Call, Value, list[int]], Value]:
    """Reduce by an unknown function that does not depend on the order of the elements."""

    def run(call: Call, x: Value, axes: list[int]) -> Value:
        field = call.field
        keys = field.unknown.keys(f"element of {name}", field.residues(x))
        count = math.prod(x.dims[i] for i in axes)
        if count == 1:
            return x
        total = np.add.reduce(keys, axis=tuple(i + 1 for i in axes), keepdims=True)
        return field.from_keys(name, total, [x], kind=x.kind)

    return run


def _global_average(call: Call) -> Value:
    x = call.data(0)
    return call.mean(x, range(2, x.rank))


def _global_max(call: Call) -> Value:
    x = call.data(0)
    return _unordered("max")(call, x, list(range(2, x.rank)))


def _softmax_axes(call: Call, x: Value) -> list[int]:
    if call.opset >= 13:
        return [call.attrs.get("axis", -1) % x.rank]
    axis = call.attrs.get("axis", 1)
    return list(range(axis % x.rank if axis != x.rank else axis, x.rank))


def _softmax(call: Call) -> Value:
    x = call.data(0)
    made = call.unary("Exp", x, Sign.POSITIVE)
    return call.divide(made, call.sum(made, _softmax_axes(call, x)))


def _log_softmax(call: Call) -> Value:
    x = call.data(0)
    return call.subtract(x, _log_sum_exp(call, x, _softmax_axes(call, x)))


# ------------------------------------------------------------------ contractions


def _matmul(call: Call) -> Value:
    return call.matmul(call.data(0), call.data(1))


def _gemm(call: Call) -> Value:
    a, b, c = call.data(0), call.data(1), call.optional(2)
    if call.attrs.get("transA"):
        a = call.transpose(a, (1, 0))
    if call.attrs.get("transB"):
        b = call.transpose(b, (1, 0))
    y = call.matmul(a, b)
    alpha = float(np.float32(call.attrs.get("alpha", 1.0)))
    beta = float(np.float32(call.attrs.get("beta", 1.0)))
    if alpha != 1.0:
        y = call.multiply(call.number(alpha), y)
    if c is None or beta == 0.0:
        return y
    return call.add(y, c if beta == 1.0 else call.multiply(call.number(beta), c))


def _einsum(call: Call) -> Value:
    equation = decode_text(call.attrs["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    values = [call.data(i) for i in range(len(call.inputs))]
    simple = arrow and "." not in equation and all(len(set(t)) == len(t) for t in (*terms, right))
    if not simple or len(terms) != len(values) or len(terms) > 2:
        raise NotEvaluated(f"Einsum {equation!r}")
    if len(terms) == 1:
        terms.append("")
        values.append(call.number(1.0))
    return _contract_pair(call, values, terms, right)


def _contract_pair(call: Call, values: list[Value], terms: list[str], right: str) -> Value:
    """Compute an Einsum of two inputs as a matrix product."""
    first, second = terms
    sizes = {c: n for v, t in zip(values, terms, strict=True) for c, n in zip(t, v.dims, strict=True)}
    alone = [c for t, other in ((first, second), (second, first)) for c in t if c not in other and c not in right]
    for i, term in enumerate(terms):
        dropped = [term.index(c) for c in term if c in alone]
        if dropped:
            values[i] = call.sum(values[i], dropped, keepdims=False)
            terms[i] = "".join(c for c in term if c not in alone)
    first, second = terms
    batch = [c for c in first if c in second and c in right]
    inner = [c for c in first if c in second and c not in right]
    rows = [c for c in first if c not in second]
    columns = [c for c in second if c not in first]

    def arrange(value: Value, term: str, *groups: list[str]) -> Value:
        moved = call.transpose(value, [term.index(c) for group in groups for c in group])
        return call.reshape(moved, [math.prod(sizes[c] for c in group) for group in groups])

    y = call.matmul(arrange(values[0], first, batch, rows, inner), arrange(values[1], second, batch, inner, columns))
    letters = [*batch, *rows, *columns]
    y = call.reshape(y, [sizes[c] for c in letters])
    return call.transpose(y, [letters.index(c) for c in right])


def _window(call: Call, x: Value, kernel: Sequence[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Read strides, dilations and pads.

    Returns:
        strides, dilations, pads at the begin and pads at the end.
    """
    rank = len(kernel)
    strides = list(call.attrs.get("strides") or [1] * rank)
    dilations = list(call.attrs.get("dilations") or [1] * rank)
    auto = decode_text(call.attrs.get("auto_pad", "NOTSET"))
    pads = list(call.attrs.get("pads") or [0] * (2 * rank))
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        begins, ends = [], []
        for n, k, s, d in zip(x.dims[2:], kernel, strides, dilations, strict=True):
            total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
            small, large = total // 2, total - total // 2
            begins.append(small if auto == "SAME_UPPER" else large)
            ends.append(large if auto == "SAME_UPPER" else small)
        return strides, dilations, begins, ends
    if auto == "VALID":
        pads = [0] * (2 * rank)
    return strides, dilations, pads[:rank], pads[rank:]


def _unfold(a: Array, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Array:
    """View windows.

    Returns:
        (N, C, *out, *kernel).
    """
    rank = len(kernel)
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    if any(n < e for n, e in zip(a.shape[2:], extents, strict=True)):
        raise NotEvaluated("a kernel that is larger than its input")
    view = np.lib.stride_tricks.sliding_window_view(a, extents, axis=tuple(range(2, 2 + rank)))
    cut: list[Any] = [slice(None), slice(None)]
    cut += [slice(None, None, s) for s in strides]
    cut += [slice(None, None, d) for d in dilations]
    return view[tuple(cut)]


def _pad_spatial(a: Array, begins: Sequence[int], ends: Sequence[int]) -> Array:
    if min([*begins, *ends], default=0) < 0:
        raise NotEvaluated("negative pads")
    return np.pad(a, [(0, 0), (0, 0), *zip(begins, ends, strict=True)])


def _conv(call: Call) -> Value:
    x, w, bias = call.data(0), call.data(1), call.optional(2)
    strides, dilations, begins, ends = _window(call, x, w.dims[2:])
    y = _convolve(call, x, w, strides, dilations, begins, ends, call.attrs.get("group", 1))
    return _with_bias(call, y, bias)


def _with_bias(call: Call, y: Value, bias: Value | None) -> Value:
    if bias is None:
        return y
    return call.add(y, call.reshape(bias, _channels(bias, y)))


def _channels(x: Value, y: Value) -> tuple[int, ...]:
    """Return the shape in which a vector over channels broadcasts to ``y``."""
    return (x.size, *(1,) * (y.rank - 2))


def _convolve(
    call: Call,
    x: Value,
    w: Value,
    strides: Sequence[int],
    dilations: Sequence[int],
    begins: Sequence[int],
    ends: Sequence[int],
    groups: int,
) -> Value:
    _refuse_special(x, w)
    field = call.field
    filters, depth, *kernel = w.dims
    batch, channels = x.dims[:2]
    if channels != depth * groups or filters % groups:
        raise NotEvaluated("a convolution whose weight does not fit its input")
    rows = []
    out: tuple[int, ...] = ()
    for j, p in enumerate(field.arithmetic.primes):
        a = _pad_spatial(field.residues_modulo(x, j), begins, ends)
        windows = _unfold(a, kernel, strides, dilations)
        out = windows.shape[2 : 2 + len(kernel)]
        rank = len(kernel)
        # (N, G, C/G, *out, *kernel) becomes (N, G, C/G·kernel, out).
        windows = windows.reshape(batch, groups, depth, *out, *kernel)
        order = (0, 1, 2, *range(3 + rank, 3 + 2 * rank), *range(3, 3 + rank))
        columns = windows.transpose(order).reshape(batch, groups, depth * math.prod(kernel), math.prod(out))
        weight = field.residues_modulo(w, j).reshape(groups, filters // groups, depth * math.prod(kernel))
        rows.append(matmul_modulo(weight, columns, p).reshape(batch, filters, *out))
    product = x.degree.times(w.degree)
    return field.made(np.stack(rows), product.plus(product, max(depth * math.prod(kernel), 1)))


def _conv_transpose(call: Call) -> Value:
    """Convolve the input with zeros between its elements, with the flipped kernel."""
    x, w, bias = call.data(0), call.data(1), call.optional(2)
    if call.attrs.get("output_shape") or decode_text(call.attrs.get("auto_pad", "NOTSET")) != "NOTSET":
        raise NotEvaluated("ConvTranspose with output_shape or auto_pad")
    strides, dilations, begins, ends = _window(call, x, w.dims[2:])
    groups = call.attrs.get("group", 1)
    extra = list(call.attrs.get("output_padding") or [0] * len(strides))
    channels, depth, *kernel = w.dims
    sizes = [(n - 1) * s + 1 for n, s in zip(x.dims[2:], strides, strict=True)]
    places = np.zeros((*x.dims[:2], *sizes), np.int64)
    cut: Any = (slice(None), slice(None), *(slice(None, None, s) for s in strides))
    places[cut] = np.arange(1, x.size + 1).reshape(x.dims)
    stuffed = call.gather_places(x, places)
    # (C, M/G, *kernel) becomes (M, C/G, *kernel), flipped.
    index = np.arange(1, w.size + 1).reshape(groups, channels // groups, depth, *kernel).swapaxes(1, 2)
    index = index.reshape(groups * depth, channels // groups, *kernel)
    flipped = index[(slice(None), slice(None), *(slice(None, None, -1) for _ in kernel))]
    weight = call.gather_places(w, flipped)
    before = [(k - 1) * d - b for k, d, b in zip(kernel, dilations, begins, strict=True)]
    after = [(k - 1) * d - e + o for k, d, e, o in zip(kernel, dilations, ends, extra, strict=True)]
    y = _convolve(call, stuffed, weight, [1] * len(kernel), dilations, before, after, groups)
    return _with_bias(call, y, bias)


def _average_pool(call: Call) -> Value:
    x = call.data(0)
    _refuse_special(x)
    if call.attrs.get("ceil_mode"):
        raise NotEvaluated("AveragePool with ceil_mode")
    kernel = list(call.attrs["kernel_shape"])
    strides, dilations, begins, ends = _window(call, x, kernel)
    field = call.field
    axes = tuple(range(-len(kernel), 0))

    def add_windows(a: Array) -> Array:
        return np.add.reduce(_unfold(_pad_spatial(a, begins, ends), kernel, strides, dilations), axis=axes)

    total = np.stack([add_windows(row) for row in field.residues(x)])
    terms = math.prod(kernel)
    made = field.made(field.arithmetic.reduce(total), x.degree.plus(x.degree, terms), sign=x.sign)
    counts = add_windows(np.ones((1, 1, *x.dims[2:]), np.int64)).astype(np.float64)
    if call.attrs.get("count_include_pad"):
        counts = np.full_like(counts, terms)
    return call.divide(made, field.constant(counts))


# ------------------------------------------------------------------ norms


def _epsilon(call: Call) -> Value:
    return call.number(float(np.float32(call.attrs.get("epsilon", 1e-5))))


def _standardize(call: Call, x: Value, axes: Sequence[int]) -> Value:
    centered = call.subtract(x, call.mean(x, axes))
    variance = call.mean(call.multiply(centered, centered), axes)
    return call.multiply(centered, call.inverse_root(call.add(variance, _epsilon(call))))


def _scale_and_shift(call: Call, y: Value, scale: Value | None, shift: Value | None) -> Value:
    if scale is not None:
        y = call.multiply(y, scale)
    return y if shift is None else call.add(y, shift)


def _layer_norm(call: Call) -> Value:
    if call.outputs > 1:
        raise NotEvaluated("LayerNormalization with statistics as outputs")
    x = call.data(0)
    axes = range(call.attrs.get("axis", -1) % x.rank, x.rank)
    return _scale_and_shift(call, _standardize(call, x, axes), call.optional(1), call.optional(2))


def _rms_norm(call: Call) -> Value:
    if call.outputs > 1:
        raise NotEvaluated(f"{call.op} with statistics as outputs")
    x = call.data(0)
    axes = range(call.attrs.get("axis", -1) % x.rank, x.rank)
    square = call.mean(call.multiply(x, x), axes)
    y = call.multiply(x, call.inverse_root(call.add(square, _epsilon(call))))
    return _scale_and_shift(call, y, call.optional(1), None)


def _instance_norm(call: Call) -> Value:
    x = call.data(0)
    scale, shift = (call.reshape(call.data(i), _channels(call.data(i), x)) for i in (1, 2))
    return _scale_and_shift(call, _standardize(call, x, range(2, x.rank)), scale, shift)


def _group_norm(call: Call) -> Value:
    x = call.data(0)
    groups = call.attrs["num_groups"]
    batch, channels, *sizes = x.dims
    if channels % groups:
        raise NotEvaluated("GroupNormalization whose groups do not divide the channels")
    y = call.reshape(x, (batch, groups, channels // groups, *sizes))
    y = _standardize(call, y, range(2, y.rank))
    scale, shift = call.data(1), call.data(2)
    if call.opset < 21:
        # One number per group
        y = _scale_and_shift(call, y, *(call.reshape(v, (groups, *(1,) * (y.rank - 2))) for v in (scale, shift)))
        return call.reshape(y, x.dims)
    y = call.reshape(y, x.dims)
    return _scale_and_shift(call, y, *(call.reshape(v, _channels(v, x)) for v in (scale, shift)))


def _batch_norm(call: Call) -> Value:
    if call.attrs.get("training_mode") or call.outputs > 1 or (call.opset < 7 and not call.attrs.get("is_test")):
        raise NotEvaluated("BatchNormalization in training mode")
    x = call.data(0)
    if x.rank < 2 or not call.attrs.get("spatial", 1):
        raise NotEvaluated("BatchNormalization with statistics per element")
    scale, shift, mean, variance = (call.reshape(call.data(i), _channels(call.data(i), x)) for i in range(1, 5))
    root = call.inverse_root(call.add(variance, _epsilon(call)))
    return call.add(call.multiply(call.subtract(x, mean), call.multiply(scale, root)), shift)


def _lp_norm(call: Call) -> Value:
    x = call.data(0)
    if call.attrs.get("p", 2) != 2 or call.opset >= 22:
        raise NotEvaluated("LpNormalization")
    axis = call.attrs.get("axis", -1) % x.rank
    return call.divide(x, _root_of_squares(call, x, [axis]))


_REAL: dict[str, Callable[..., Any]] = {
    "Exp": np.exp,
    "Log": np.log,
    "Abs": np.abs,
    "Tanh": np.tanh,
    "Sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "Sin": np.sin,
    "Cos": np.cos,
}

TABLE: dict[str, Op] = {
    "Add": _binary("add"),
    "Sub": _binary("subtract"),
    "Mul": _binary("multiply"),
    "Div": _div,
    "Sum": _reduce_pairs("add"),
    "Mean": _mean_of_inputs,
    "Max": _reduce_pairs("largest"),
    "Min": _reduce_pairs("smallest"),
    "Neg": lambda call: call.negate(call.data(0)),
    "Reciprocal": lambda call: call.inverse(call.data(0)),
    "Sqrt": lambda call: call.root(call.data(0)),
    "Pow": _pow,
    "Abs": _abs,
    "Exp": _unary("Exp", Sign.POSITIVE),
    "Sigmoid": _unary("Sigmoid", Sign.POSITIVE),
    "Softplus": _unary("Softplus", Sign.POSITIVE),
    "Log": _limited("Log"),
    "Acos": _limited("Acos"),
    "Asin": _limited("Asin"),
    "Acosh": _limited("Acosh"),
    "Atanh": _limited("Atanh"),
    **{
        op: _unary(op)
        for op in ("Erf", "Tanh", "Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh", "Asinh", "Softsign", "Sign", "Mish")
    },
    "Floor": _floor("Floor", np.floor),
    "Ceil": _floor("Ceil", np.ceil),
    "Round": _floor("Round", np.rint),
    "Elu": _with_attributes("Elu", alpha=1.0),
    "Celu": _with_attributes("Celu", alpha=1.0),
    "Selu": _with_attributes("Selu", alpha=1.67326319217681884765625, gamma=1.05070102214813232421875),
    "ThresholdedRelu": _with_attributes("ThresholdedRelu", alpha=1.0),
    "Relu": _relu,
    "Clip": _clip,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": lambda call: call.multiply(
        call.data(0),
        call.smallest(
            call.largest(
                call.add(call.divide(call.data(0), call.number(6.0)), call.number(0.5)), call.number(0.0)
            ),
            call.number(1.0),
        ),
    ),
    "Swish": _swish,
    "LeakyRelu": _leaky_relu,
    "PRelu": _prelu,
    "Equal": _compare("Equal", symmetric=True),
    "Less": _compare("Less"),
    "Greater": _compare("Less", swapped=True),
    # Not(Greater) differs from LessOrEqual for NaN only, which is no real number.
    "LessOrEqual": _compare("Less", swapped=True, negated=True),
    "GreaterOrEqual": _compare("Less", negated=True),
    "Not": lambda call: _not_of(call, call.data(0)),
    "And": _and,
    "Or": _or,
    "Where": _where,
    "Identity": _identity,
    "Dropout": _dropout,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Expand": _expand,
    "Concat": _concat,
    "Split": _evaluator_move,
    "Slice": _evaluator_move,
    "Tile": _evaluator_move,
    "Gather": _gather,
    "GatherElements": _reference_move,
    "GatherND": _reference_move,
    "Trilu": _reference_move,
    "DepthToSpace": _reference_move,
    "SpaceToDepth": _reference_move,
    "ReverseSequence": _reference_move,
    "Compress": _reference_move,
    "ScatterND": _scatter,
    "ScatterElements": _scatter,
    "Pad": _pad,
    "Shape": _shape,
    "Size": _size,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "CumSum": _cumsum,
    "ReduceSum": _reduction(lambda call, x, axes: call.sum(x, axes), of_element=lambda call, x: x),
    "ReduceMean": _reduction(lambda call, x, axes: call.mean(x, axes), of_element=lambda call, x: x),
    "ReduceSumSquare": _reduction(_sum_of_squares, of_element=lambda call, x: call.multiply(x, x)),
    "ReduceL2": _reduction(_root_of_squares, of_element=lambda call, x: call.root(call.multiply(x, x))),
    "ReduceL1": _reduction(_sum_of_magnitudes, of_element=lambda call, x: call.unary("Abs", x, Sign.NOT_NEGATIVE)),
    "ReduceLogSumExp": _reduction(_log_sum_exp, of_element=lambda call, x: x),
    "ReduceMax": _reduction(_unordered("max"), of_element=lambda call, x: x),
    "ReduceMin": _reduction(_unordered("min"), of_element=lambda call, x: x),
    "ReduceProd": _reduction(_unordered("product"), of_element=lambda call, x: x),
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global_max,
    "Softmax": _softmax,
    "LogSoftmax": _log_softmax,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "AveragePool": _average_pool,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "SimplifiedLayerNormalization": _rms_norm,
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "BatchNormalization": _batch_norm,
    "LpNormalization": _lp_norm,
}
