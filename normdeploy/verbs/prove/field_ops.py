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

import ml_dtypes
import numpy as np
import onnx

from ...evaluate import evaluator
from ...evaluate.evaluator_core import UnsupportedOp, decode_text
from ...graphs.symbolic_sizes import Size, product_of_sizes
from .field_values import (
    Axis,
    Degree,
    Field,
    NotEvaluated,
    Sign,
    Value,
    axis_of_length,
    closed_if_static,
    is_open_axis,
    joint_axes,
    read_name,
)
from .float_errors import UNITS, Approx, concatenate
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
        return replace(self.field.constant(np.asarray(value, np.float64).reshape(())), elem=0)

    # ------------------------------------------------------------ arithmetic

    def approx_of(self, function: Callable[..., Approx], *values: Value) -> Approx | None:
        """Compute constants in float64; None if a value is not a constant."""
        known = [x for x in map(self.field.approx, values) if x is not None]
        if len(known) < len(values):
            return None
        with np.errstate(all="ignore"):
            return function(*known)

    def add(self, x: Value, y: Value) -> Value:
        """Add."""
        field = self.field
        a, b = field.align([x, y])
        sign = Sign.UNKNOWN
        if min(x.sign, y.sign) >= Sign.NOT_NEGATIVE:
            sign = max(x.sign, y.sign)
        made = field.arithmetic.add(field.residues(a), field.residues(b))
        total = field.made(
            made,
            x.degree.plus(y.degree),
            kind=_joint_kind(x, y),
            approx=self.approx_of(Approx.plus, x, y),
            sign=sign,
            special=x.special or y.special,
            axes=joint_axes([x, y]),
        )
        return _may_wrap(total, x, y)

    def subtract(self, x: Value, y: Value) -> Value:
        """Subtract."""
        _refuse_special(x, y)
        field = self.field
        a, b = field.align([x, y])
        made = field.arithmetic.subtract(field.residues(a), field.residues(b))
        approx = self.approx_of(Approx.minus, x, y)
        difference = field.made(
            made, x.degree.plus(y.degree), kind=_joint_kind(x, y), approx=approx, axes=joint_axes([x, y])
        )
        if x.moment is not None and approx is None and self._is_variance(difference, *x.moment):
            difference.sign = Sign.NOT_NEGATIVE
        return _may_wrap(difference, x, y)

    def _is_variance(self, x: Value, of: Value, axes: tuple[int, ...]) -> bool:
        """Return True if ``x`` is the mean of (of - mean of ``of``)² over the axes, and so not negative."""
        centered = self.subtract(of, self.mean(of, axes))
        variance = self.mean(self.multiply(centered, centered), axes)
        self.field.note_compared(x, variance)
        a, b = self.field.residues(x), self.field.residues(variance)
        if a.size != b.size or [f for f in x.factors if f] != [f for f in variance.factors if f]:
            return False
        return bool(np.array_equal(a.reshape(len(a), -1), b.reshape(len(b), -1)))

    def multiply(self, x: Value, y: Value) -> Value:
        """Multiply."""
        _refuse_special(x, y)
        field = self.field
        a, b = field.align([x, y])
        sign = min(x.sign, y.sign)
        square = x is y or (x.shape == y.shape and x.axes == y.axes and field.digest(x) == field.digest(y))
        if square:
            field.note_compared(x, y)
            sign = max(sign, Sign.NOT_NEGATIVE)
            if x.root_of is not None:
                # The root records that its argument is not negative.
                return replace(x.root_of, sign=max(x.root_of.sign, Sign.NOT_NEGATIVE))
        made = field.arithmetic.multiply(field.residues(a), field.residues(b))
        product = field.made(
            made,
            x.degree.times(y.degree),
            kind=_joint_kind(x, y),
            approx=self.approx_of(Approx.times, x, y),
            sign=sign,
            axes=joint_axes([x, y]),
        )
        if square:
            product.square_of = x
        elif x.moment is not None and math.prod(y.points) == 1:
            product.moment = x.moment
        return _may_wrap(product, x, y)

    def inverse(self, x: Value) -> Value:
        """Compute 1/x, and record where it is not defined."""
        if not x.is_constant:
            self.field.require_nonzero(x)
        return self._inverse_of_nonzero(x)

    def _inverse_of_nonzero(self, x: Value) -> Value:
        _refuse_special(x)
        field = self.field
        approx = self.approx_of(Approx.inverse, x)
        if any(x.degree.sums.values()):
            # A quotient of sums over an open size is not a polynomial in the weights, so 1/x is an unknown function.
            unknown = field.unknown_function("1/x", [x])
            unknown.sign = Sign.POSITIVE if x.sign is Sign.POSITIVE else Sign.UNKNOWN
            return unknown
        try:
            made = field.arithmetic.inverse(field.residues(x))
        except ZeroDivisionError:
            raise NotEvaluated("it divides by zero") from None
        degree = x.degree
        if approx is None:
            degree = self._degree_of_inverse(x)
        sign = Sign.POSITIVE if x.sign is Sign.POSITIVE else Sign.UNKNOWN
        return field.made(made, degree, approx=approx, sign=sign, axes=x.axes)

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
        count = math.prod(x.points)
        field.poles[key] = (count * inner, count * height)
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
        _require_floats(x)
        made = self._inverse_of_nonzero(self._unknown_inverse_root(x))
        made.root_of = x
        made.sign = Sign.POSITIVE if x.sign is Sign.POSITIVE else Sign.NOT_NEGATIVE
        return made

    def inverse_root(self, x: Value) -> Value:
        """Compute 1/√x, and record where it is not defined."""
        made = self._unknown_inverse_root(x)
        if not x.is_constant:
            self.field.require_nonzero(self._inverse_of_nonzero(made))
        return made

    def _unknown_inverse_root(self, x: Value) -> Value:
        _refuse_special(x)
        approx = self.approx_of(Approx.inverse_root, x)
        if approx is None:
            self.field.require_nonzero(x, "root")
        made = self.field.unknown_function("1/sqrt", [x], approx=approx)
        made.sign = Sign.POSITIVE if x.sign is Sign.POSITIVE else Sign.NOT_NEGATIVE
        if approx is not None:
            self._use_rational_roots(x, made)
        return made

    def _use_rational_roots(self, x: Value, made: Value) -> None:
        """Replace the unknown 1/√x by the number where x is the square of a float."""
        field = self.field
        known = field.approx(x)
        if known is None or made.residues is None or not known.numbers.all():
            return
        root = np.sqrt(known.numbers)
        residues = field.arithmetic.from_floats(root)
        square = (field.arithmetic.multiply(residues, residues) == field.residues(x)).all(axis=0)
        if square.any():
            made.residues = np.where(square, field.arithmetic.inverse(residues), made.residues)

    def sum(self, x: Value, axes: Sequence[int], *, keepdims: bool = True) -> Value:
        """Add along axes. The points of an open size have weights that add up to the size."""
        _refuse_special(x)
        field = self.field
        places = tuple(axes)
        terms = math.prod(x.points[i] for i in places)
        if not terms:
            raise NotEvaluated("a sum of no elements")
        residues = field.residues(x)
        degree = x.degree
        for i in places:
            if is_open_axis(x.factors[i]):
                residues = field.arithmetic.multiply(residues, _along_axis(field.weights(x.factors[i]), i, x.rank))
                degree = degree.summed(size for size in x.factors[i] if size.constant_value is None)
        made = field.arithmetic.sum(residues, places, keepdims=keepdims)
        approx = self.approx_of(lambda v: v.sum(places, keepdims=keepdims), x)
        left: list[Axis] = [() if i in places else axis for i, axis in enumerate(x.factors)]
        if not keepdims:
            left = [axis for i, axis in enumerate(x.factors) if i not in places]
        total = field.made(
            made,
            degree.plus(degree, terms),
            kind=_joint_kind(x),
            approx=approx,
            sign=x.sign,
            axes=closed_if_static(left) if x.is_open else None,
        )
        if x.square_of is not None:
            total.moment = (x.square_of, places)
        return _may_wrap(total, x)

    def mean(self, x: Value, axes: Sequence[int], *, keepdims: bool = True) -> Value:
        """Compute the mean along axes."""
        _require_floats(x)
        total = self.sum(x, axes, keepdims=keepdims)
        for i in axes:
            for size in x.factors[i]:
                if size.constant_value is None:
                    total = self.divide(total, self.field.size_value(size))
                else:
                    total = self.divide(total, self.number(float(size.constant_value)))
        return total

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
        if count == 2 and base.root_of is not None:
            return self.multiply(base, base)
        field = self.field
        degree = Degree()
        for _ in range(count):
            degree = degree.times(base.degree)
        sign = base.sign
        if count % 2 == 0:
            sign = max(sign, Sign.NOT_NEGATIVE)
        made = field.arithmetic.power(field.residues(base), count)
        approx = self.approx_of(lambda v: v.mapped(lambda n: np.power(n, exponent), 2.0 * count + 8.0), x)
        result = field.made(made, degree, kind=x.kind, approx=approx, sign=sign, axes=x.axes)
        if count == 2:
            result.square_of = base
        return result

    def unary(self, name: str, x: Value, sign: Sign = Sign.UNKNOWN) -> Value:
        """Apply an unknown function of one number."""
        real = _REAL.get(name)
        approx = None if real is None else self.approx_of(lambda v: v.mapped(real), x)
        if x.kind == "i":
            # Integer types differ at their bounds: the magnitude of the smallest int8 is -128.
            made = self.field.unknown_function(f"{name} of type {x.elem}", [x], kind=x.kind)
            return replace(made, elem=x.elem)
        made = self.field.unknown_function(name, [x], approx=approx, kind=x.kind)
        made.sign = max(made.sign, sign)
        return made

    def order_of(self, x: Value, y: Value) -> Array | None:
        """Compare constants.

        Returns:
            -1, 0 or 1 for each pair of numbers; None if a value is not a constant, or if rounding decides.
        """
        a, b = self.field.approx(x), self.field.approx(y)
        if a is None or b is None or not np.isfinite(a.numbers).all() or not np.isfinite(b.numbers).all():
            return None
        difference = a.numbers - b.numbers
        exact = x.stored is not None and y.stored is not None
        near = np.abs(difference) <= 1e-9 * (np.abs(a.numbers) + np.abs(b.numbers)) + a.error + b.error
        if not exact and near.any():
            return None
        return np.sign(difference).astype(np.int64)

    def largest(self, x: Value, y: Value) -> Value:
        """Compute the larger of two numbers as an unknown symmetric function."""
        order = self.order_of(x, y)
        if order is not None:
            return _where_stored(self, order > 0, x, y)
        for one, other in ((x, y), (y, x)):
            # A lower bound of zero or less does not change a value that is not negative.
            if one.sign >= Sign.NOT_NEGATIVE and _is_at_most_zero(other):
                return _broadcast_like(self, one, [other])
        made = self.field.unknown_function(
            "max",
            [x, y],
            symmetric=True,
            approx=self.approx_of(lambda a, b: a.choose(b, np.maximum), x, y),
            kind=_joint_kind(x, y),
        )
        made.sign = max(made.sign, x.sign, y.sign)
        return made

    def smallest(self, x: Value, y: Value) -> Value:
        """Compute the smaller of two numbers as an unknown symmetric function."""
        order = self.order_of(x, y)
        if order is not None:
            return _where_stored(self, order < 0, x, y)
        made = self.field.unknown_function(
            "min",
            [x, y],
            symmetric=True,
            approx=self.approx_of(lambda a, b: a.choose(b, np.minimum), x, y),
            kind=_joint_kind(x, y),
        )
        made.sign = max(made.sign, min(x.sign, y.sign))
        return made

    # ------------------------------------------------------------ moves

    def gather_places(self, x: Value, places: Array, axes: tuple[Axis, ...] | None = None) -> Value:
        """Move elements.

        Args:
            places: for each element of the result, 1 + its index in the flattened ``x``, or 0 for the number 0.
            axes: axes of the result if ``x`` has open axes. The move must be the same for every element of these axes.
        """
        if x.is_open and axes is None:
            raise NotEvaluated("the op is not supported for open sizes")
        filled = not places.all()
        sign = x.sign
        if filled:
            sign = min(sign, Sign.NOT_NEGATIVE)
        if x.stored is not None:
            flat = np.concatenate([np.zeros(1, x.stored.dtype), x.stored.reshape(-1)])
            made = self.field.constant(flat[places])
            return replace(made, kind=x.kind, elem=x.elem, fits=x.fits)
        a = self.field.residues(x).reshape(len(self.field.arithmetic.primes), -1)
        moved = a[:, np.maximum(places - 1, 0)] if a.shape[1] else np.zeros((a.shape[0], *places.shape), np.int64)
        if filled:
            moved[:, places == 0] = 0
        approx = None
        if x.approx is not None:
            approx = x.approx.moved(lambda v: np.concatenate([np.zeros(1), v.reshape(-1)])[places])
        made = Value(places.shape, x.kind, None, moved, b"", approx, x.degree, sign, x.special, axes)
        return replace(made, elem=x.elem, wraps=x.wraps, fits=x.fits)

    def reshape(self, x: Value, shape: Sequence[int | Size]) -> Value:
        """Reshape without a move."""
        if x.is_open or any(not isinstance(n, int) for n in shape):
            return self._regroup(x, [Size.from_int(n) for n in shape])
        whole = tuple(n for n in shape if isinstance(n, int))
        if x.stored is not None:
            return replace(
                x, stored=x.stored.reshape(whole), shape=whole, residues=None, digest=b"", square_of=None, root_of=None
            )
        a = self.field.residues(x)
        approx = None if x.approx is None else x.approx.moved(lambda v: v.reshape(whole))
        residues = a.reshape(a.shape[0], *whole)
        return replace(x, residues=residues, shape=whole, approx=approx, digest=b"", square_of=None, root_of=None)

    def _regroup(self, x: Value, sizes: Sequence[Size]) -> Value:
        """Reshape a value with open axes: consecutive factors become new axes."""
        left = [size for axis in x.factors for size in axis]
        axes = [_take_factors(left, size) for size in sizes]
        if left:
            raise NotEvaluated("Reshape to a shape that does not fit")
        a = self.field.residues(x)
        points = tuple(map(self.field.axis_points, axes))
        return replace(
            x,
            stored=None,
            residues=a.reshape(a.shape[0], *points),
            shape=points,
            approx=None,
            digest=b"",
            axes=closed_if_static(axes),
            square_of=None,
            root_of=None,
        )

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        """Permute axes."""
        shape = tuple(x.points[i] for i in perm)
        if x.stored is not None:
            moved = x.stored.transpose(perm)
            return replace(
                x, stored=moved, shape=shape, residues=None, digest=b"", square_of=None, root_of=None, moment=None
            )
        a = self.field.residues(x).transpose(0, *(i + 1 for i in perm))
        approx = None if x.approx is None else x.approx.moved(lambda v: v.transpose(perm))
        axes = None if x.axes is None else tuple(x.axes[i] for i in perm)
        made = replace(x, residues=a, shape=shape, approx=approx, digest=b"", axes=axes)
        return replace(made, square_of=None, root_of=None, moment=None)

    def expand(self, x: Value, shape: Sequence[int | Size]) -> Value:
        """Broadcast to ``shape``."""
        if not x.is_open and all(isinstance(n, int) for n in shape):
            whole = tuple(n for n in shape if isinstance(n, int))
            if np.broadcast_shapes(x.dims, whole) == x.dims:
                return x
            places = np.arange(1, x.size + 1).reshape(x.dims)
            return self.gather_places(x, np.broadcast_to(places, np.broadcast_shapes(x.dims, whole)))
        target = [self.field.axis_of_size(Size.from_int(n)) for n in shape]
        rank = max(len(target), x.rank)
        like = Value(
            tuple(map(self.field.axis_points, target)), x.kind, axes=closed_if_static(target) if target else None
        )
        axes = joint_axes([x, like])
        assert axes is None or len(axes) == rank
        points = np.broadcast_shapes(x.points, like.points)
        a = self.field.residues(self.field.align([x, replace(like, residues=np.zeros((1, *like.points), np.int64))])[0])
        wide = np.broadcast_to(a, (a.shape[0], *points))
        made = replace(x, stored=None, residues=wide, shape=points, approx=None, digest=b"", axes=axes)
        return replace(made, square_of=None, root_of=None, moment=x.moment if points == x.points else None)

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Concatenate along an axis."""
        if all(x.stored is not None for x in values):
            made = self.field.constant(np.concatenate([x.stored for x in values if x.stored is not None], axis))
            return replace(made, kind=_joint_kind(*values), elem=values[0].elem, fits=_joint_fit(values))
        rank = values[0].rank
        axis %= rank
        axes = None
        if any(x.is_open for x in values):
            axes = _joined_axes(values, axis)
        joined = np.concatenate([self.field.residues(x) for x in values], axis + 1)
        known = [x for x in map(self.field.approx, values) if x is not None]
        approx = None
        if len(known) == len(values):
            approx = concatenate(known, axis)
        degree = values[0].degree
        for x in values[1:]:
            degree = degree.plus(x.degree)
        sign = min(x.sign for x in values)
        special = any(x.special for x in values)
        made = Value(joined.shape[1:], _joint_kind(*values), None, joined, b"", approx, degree, sign, special, axes)
        wraps = any(x.wraps for x in values)
        return replace(made, elem=values[0].elem, wraps=wraps, fits=_joint_fit(values))

    def matmul(self, x: Value, y: Value) -> Value:
        """Multiply matrices as numpy's matmul does."""
        _refuse_special(x, y)
        field = self.field
        if x.rank < 1 or y.rank < 1:
            raise NotEvaluated("MatMul of a scalar")
        shared = field.shared_hash(y)
        if shared is not None:
            return self._apply_shared_matrix(x, y, shared)
        left = x if x.rank > 1 else self.reshape(x, (1, *x.sizes))
        right = y if y.rank > 1 else self.reshape(y, (*y.sizes, 1))
        inner = left.factors[-1]
        if inner != right.factors[-2]:
            raise NotEvaluated("sizes that may differ")
        degree = x.degree.times(y.degree)
        if is_open_axis(inner):
            weighted = field.arithmetic.multiply(
                field.residues(left), _along_axis(field.weights(inner), left.rank - 1, left.rank)
            )
            left = replace(left, stored=None, residues=weighted, digest=b"", square_of=None, root_of=None, moment=None)
            degree = degree.summed(size for size in inner if size.constant_value is None)
        made = np.stack(
            [
                matmul_modulo(field.residues_modulo(left, j), field.residues_modulo(right, j), p)
                for j, p in enumerate(field.arithmetic.primes)
            ]
        )
        axes = None
        if x.is_open or y.is_open:
            axes = _matmul_axes(left, right)
        terms = left.points[-1]
        approx = self.approx_of(Approx.matmul, left, right)
        product = field.made(made, degree.plus(degree, terms), kind=_joint_kind(x, y), approx=approx, axes=axes)
        product = _may_wrap(product, x, y)
        if x.rank == 1:
            product = self._drop_axis(product, product.rank - 2)
        if y.rank == 1:
            product = self._drop_axis(product, product.rank - 1)
        return product

    def _apply_shared_matrix(self, x: Value, y: Value, shared: bytes) -> Value:
        """Multiply by a large matrix that both files store, as an unknown function of each row."""
        field = self.field
        if is_open_axis(x.factors[-1]) or x.points[-1] != y.points[0]:
            raise NotEvaluated("sizes that may differ")
        keys = field.unknown.row_keys(f"matrix {shared.hex()}", field.residues(x))
        wide = field.unknown.extend_keys(keys.reshape(2, -1), y.points[1])
        axes = closed_if_static((*x.factors[:-1], axis_of_length(y.points[1]))) if x.is_open else None
        return field.from_keys("", wide.reshape(2, *x.points[:-1], y.points[1]), [x], axes=axes)

    def _drop_axis(self, x: Value, axis: int) -> Value:
        return self.reshape(x, [_plain(n) for i, n in enumerate(x.sizes) if i != axis])


def _may_wrap(made: Value, *arguments: Value) -> Value:
    """Mark sums and products of integers: each integer type computes modulo two to its bits."""
    if made.kind != "i":
        return made
    elem = next((x.elem for x in arguments if x.elem), 0)
    return replace(made, elem=elem, wraps=True, sign=Sign.UNKNOWN, square_of=None, moment=None)


def _require_floats(*values: Value) -> None:
    """Refuse integers, whose quotients and roots lose their fractions.

    Raises:
        NotEvaluated: a value is not of a floating type.
    """
    if any(x.kind != "f" for x in values):
        raise NotEvaluated("a quotient or root of integers")


def _joint_fit(values: Sequence[Value]) -> int:
    found = {x.fits for x in values}
    return found.pop() if len(found) == 1 else 0


def _is_at_most_zero(x: Value) -> bool:
    return x.stored is not None and x.stored.dtype != object and bool((x.stored <= 0).all())


def _plain(size: Size) -> int | Size:
    """Convert a fixed size to an integer."""
    return size if size.constant_value is None else size.constant_value


def _along_axis(weights: Array, axis: int, rank: int) -> Array:
    """Shape weights so that they broadcast along one axis."""
    shape = [weights.shape[0]] + [1] * rank
    shape[axis + 1] = weights.shape[1]
    return weights.reshape(shape)


def _take_factors(left: list[Size], size: Size) -> Axis:
    """Take factors from the front of ``left`` whose product is ``size``.

    Raises:
        NotEvaluated: there are no such factors.
    """
    taken: list[Size] = []
    need = size
    while need != 1:
        if not left:
            raise NotEvaluated("Reshape to a shape that does not fit")
        first = left[0]
        rest = need.divide_exactly(first)
        if rest is not None:
            taken.append(left.pop(0))
            need = rest
            continue
        whole, part = first.constant_value, need.constant_value
        if whole is None or part is None or whole % part:
            raise NotEvaluated("Reshape that cuts an open size")
        # A fixed factor is cut in two.
        taken.append(need)
        left[0] = Size.from_int(whole // part)
        need = Size.from_int(1)
    return tuple(taken)


def _joined_axes(values: Sequence[Value], axis: int) -> tuple[Axis, ...] | None:
    """Return the axes of a Concat along a fixed axis.

    Raises:
        NotEvaluated: the joined axis is open, or other axes differ.
    """
    first = values[0].factors
    total = 0
    for x in values:
        if x.rank != len(first) or is_open_axis(x.factors[axis]):
            raise NotEvaluated("Concat along an open size")
        if any(a != b for i, (a, b) in enumerate(zip(first, x.factors, strict=True)) if i != axis):
            raise NotEvaluated("sizes that may differ")
        total += x.points[axis]
    return closed_if_static(axis_of_length(total) if i == axis else a for i, a in enumerate(first))


def _matmul_axes(left: Value, right: Value) -> tuple[Axis, ...] | None:
    rows, columns = left.factors[-2], right.factors[-1]
    stacks = [Value(v.points[:-2], v.kind, axes=closed_if_static(v.factors[:-2])) for v in (left, right)]
    rank = max(len(left.points), len(right.points)) - 2
    joined = joint_axes(stacks)
    if joined is None:
        joined = tuple(map(axis_of_length, np.broadcast_shapes(left.points[:-2], right.points[:-2])))
    assert len(joined) == rank
    return closed_if_static((*joined, rows, columns))


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
        return call.field.unknown_function(f"integer division of type {x.elem}", [x, y], kind="i")
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
        try:
            return call.expand(call.power(x, float(known.reshape(-1)[0])), exponent.dims)
        except NotEvaluated:
            pass
    if x.kind != "f":
        name = f"integer power of types {x.elem} and {exponent.elem}"
        return call.field.unknown_function(name, [x, exponent], kind="i")
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
        order = call.order_of(values[0], values[1])
        if order is not None:
            true = order == 0 if symmetric else order < 0
            return call.field.constant(true ^ negated)
        made = call.field.unknown_function(name, values, kind="b", symmetric=symmetric)
        return _not_of(call, made) if negated else made

    return run


def _not_of(call: Call, x: Value) -> Value:
    return _truth(call.subtract(call.field.constant(np.ones((), np.int64)), x))


def _truth(x: Value) -> Value:
    return replace(x, kind="b", wraps=False, elem=onnx.TensorProto.BOOL)


def _and(call: Call) -> Value:
    return _truth(call.multiply(call.data(0), call.data(1)))


def _or(call: Call) -> Value:
    x, y = call.data(0), call.data(1)
    return _truth(call.subtract(call.add(x, y), call.multiply(x, y)))


def _where(call: Call) -> Value:
    """Compute c·x + (1 − c)·y. An equality that holds for every number c also holds for 0 and 1."""
    condition, x, y = call.data(0), call.data(1), call.data(2)
    field = call.field
    if condition.stored is not None and condition.stored.dtype.kind == "b":
        chosen = condition.stored
        if chosen.size and (chosen == chosen.reshape(-1)[0]).all():
            kept, other = (x, y) if chosen.reshape(-1)[0] else (y, x)
            return _broadcast_like(call, kept, [condition, other])
        if not (x.is_open or y.is_open):
            return _where_stored(call, chosen, x, y)
    c, a, b = (field.residues(v) for v in field.align([condition, x, y]))
    arithmetic = field.arithmetic
    made = arithmetic.add(arithmetic.multiply(c, arithmetic.subtract(a, b)), b)
    degree = condition.degree.times(x.degree.plus(y.degree)).plus(y.degree)
    chosen_values = field.made(
        made,
        degree,
        kind=_joint_kind(x, y),
        sign=min(x.sign, y.sign),
        special=x.special or y.special,
        axes=joint_axes([condition, x, y]),
    )
    return replace(chosen_values, elem=x.elem, wraps=x.wraps or y.wraps, fits=_joint_fit([x, y]))


def _broadcast_like(call: Call, x: Value, others: list[Value]) -> Value:
    """Broadcast ``x`` to the shape that it has together with other values."""
    axes = joint_axes([x, *others])
    points = np.broadcast_shapes(x.points, *(v.points for v in others))
    if points == x.points:
        return x
    if axes is None:
        return call.expand(x, points)
    return call.expand(x, [_plain(product_of_sizes(axis)) for axis in axes])


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


_FLOATS = {
    onnx.TensorProto.FLOAT: np.dtype(np.float32),
    onnx.TensorProto.FLOAT16: np.dtype(np.float16),
    onnx.TensorProto.DOUBLE: np.dtype(np.float64),
    onnx.TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
# Bits of the fraction of a floating type, with the hidden bit
_PRECISION = {
    onnx.TensorProto.FLOAT: 24,
    onnx.TensorProto.FLOAT16: 11,
    onnx.TensorProto.DOUBLE: 53,
    onnx.TensorProto.BFLOAT16: 8,
}
# Floating type → the types that hold all of its numbers
_WIDER = {
    onnx.TensorProto.FLOAT: {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE},
    onnx.TensorProto.FLOAT16: {onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE},
    onnx.TensorProto.BFLOAT16: {onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE},
    onnx.TensorProto.DOUBLE: {onnx.TensorProto.DOUBLE},
}
_INTEGERS = {
    onnx.TensorProto.UINT8: np.dtype(np.uint8),
    onnx.TensorProto.INT8: np.dtype(np.int8),
    onnx.TensorProto.UINT16: np.dtype(np.uint16),
    onnx.TensorProto.INT16: np.dtype(np.int16),
    onnx.TensorProto.INT32: np.dtype(np.int32),
    onnx.TensorProto.INT64: np.dtype(np.int64),
    onnx.TensorProto.UINT32: np.dtype(np.uint32),
    onnx.TensorProto.UINT64: np.dtype(np.uint64),
}
# Integer types that hold every size and position, so that a Cast to them loses nothing
_WIDE = (onnx.TensorProto.INT32, onnx.TensorProto.INT64, onnx.TensorProto.UINT64)


def _cast(call: Call) -> Value:
    return _cast_to(call, call.data(0), call.attrs["to"])


def _cast_to(call: Call, x: Value, to: Any) -> Value:
    if not isinstance(to, int):
        raise NotEvaluated("Cast to a type by its name (opset 5 or older)")
    if to in _FLOATS:
        return replace(_cast_to_float(call, x, to), elem=to)
    if to == onnx.TensorProto.BOOL:
        if x.kind == "b":
            return x
        if x.stored is not None:
            return call.field.constant(x.stored.astype(bool))
        return _truth(call.field.unknown_function("not zero", [x], kind="b"))
    if to not in _INTEGERS:
        raise NotEvaluated(f"Cast to type {to}")
    return replace(_cast_to_integer(call, x, to), elem=to)


def _cast_to_float(call: Call, x: Value, to: int) -> Value:
    """Convert to a floating type. A conversion that may round is an unknown function."""
    if x.stored is not None and x.stored.dtype == object:
        for size in x.stored.reshape(-1):
            call.field.limits.add((Size.from_int(size), 2 ** _PRECISION[to]))
        return replace(x, stored=None, residues=call.field.residues(x), kind="f", sign=_sign_of_sizes(x.stored))
    if x.stored is not None:
        return _cast_stored_to_float(call, x, x.stored, to)
    if x.kind == "b":
        return replace(x, kind="f")
    if x.kind == "i":
        dtype = _INTEGERS.get(x.elem)
        if dtype is not None and not x.wraps and 8 * dtype.itemsize <= _PRECISION[to]:
            return replace(x, kind="f")
        return call.field.unknown_function(f"Cast to {to}", [x])
    source = x.fits or x.elem
    if to in _WIDER.get(source, ()):
        return replace(x, fits=source)
    return _round_to(call, x, to)


def _round_to(call: Call, x: Value, to: int) -> Value:
    """Round to a narrower floating type."""
    approx = call.field.approx(x)
    if approx is not None:
        approx = approx.rounded(UNITS[to])
    if call.field.rounding_is_exact:
        return replace(x, approx=approx)
    made = call.field.unknown_function(f"Cast to {to}", [x], approx=approx)
    # Rounding keeps zero and the sign, but a small number becomes zero.
    made.sign = min(x.sign, Sign.NOT_NEGATIVE)
    return made


def _cast_stored_to_float(call: Call, x: Value, stored: Array, to: int) -> Value:
    if x.kind == "f" and call.field.rounding_is_exact:
        return x
    with np.errstate(all="ignore"):
        rounded = stored.astype(_FLOATS[to])
    return call.field.constant(rounded)


def _sign_of_sizes(array: Array) -> Sign:
    return Sign.POSITIVE if all(Size.from_int(n).is_positive for n in array.reshape(-1)) else Sign.UNKNOWN


def _cast_to_integer(call: Call, x: Value, to: int) -> Value:
    if x.stored is not None and x.stored.dtype == object:
        if to not in _WIDE:
            raise NotEvaluated("Cast of an open size to a narrow type")
        return x
    if x.stored is not None:
        if x.kind == "f":
            _require_range(x.stored.astype(np.float64), to)
        return call.field.constant(x.stored.astype(_INTEGERS[to]))
    if x.approx is not None and x.kind == "f":
        numbers = _truncate(x.approx.numbers)
        _require_range(numbers, to)
        return call.field.constant(numbers.astype(_INTEGERS[to]))
    if x.kind == "b":
        return replace(x, kind="i")
    if x.kind == "i" and x.elem in _INTEGERS:
        return _cast_integer(call, x, to)
    return call.field.unknown_function(f"Cast from {x.kind} {x.elem if x.kind == 'i' else ''} to {to}", [x], kind="i")


def _cast_integer(call: Call, x: Value, to: int) -> Value:
    """Convert between integer types, which keeps the low bits."""
    source, target = (np.iinfo(_INTEGERS[elem]) for elem in (x.elem, to))
    if not x.wraps:
        holds_all = target.min <= source.min and source.max <= target.max
        return replace(x, wraps=not holds_all, sign=x.sign if holds_all else Sign.UNKNOWN)
    if target.bits <= source.bits:
        return x
    return call.field.unknown_function(f"Cast to {to}", [x], kind="i")


def _require_range(numbers: Array, to: int) -> None:
    """Refuse floats that an integer type does not hold.

    Raises:
        NotEvaluated: a number is out of range, infinite or NaN.
    """
    limits = np.iinfo(_INTEGERS[to])
    if not ((numbers >= float(limits.min)) & (numbers < float(limits.max) + 1.0)).all():
        raise NotEvaluated("Cast of numbers that the integer type does not hold")


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
    if like.elem:
        return _cast_to(call, x, like.elem)
    raise NotEvaluated("CastLike to an unknown type")


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
    """Move elements as the float64 evaluator moves their indices. Open axes have to stay as they are."""
    x = call.data(0)
    others = [call.numbers(i) for i in range(1, len(call.inputs))]
    if x.is_open:
        others = _require_fixed_axes(call, x, others)
    index = np.arange(1, math.prod(x.points) + 1).reshape(x.points)
    try:
        results = evaluator.evaluate_node(call.op, [index, *others], call.attrs, opset=call.opset, outputs=call.outputs)
    except (UnsupportedOp, ValueError, IndexError, TypeError, AssertionError) as error:
        raise NotEvaluated(f"{call.op}: {error}") from error
    return tuple(call.gather_places(x, r, _axes_after_move(call, x, r)) for r in results if r is not None)


def _axes_after_move(call: Call, x: Value, moved: Array) -> tuple[Axis, ...] | None:
    """Return the axes after a move along fixed axes only."""
    if not x.is_open:
        return None
    if call.op == "Gather":
        axis = call.attrs.get("axis", 0) % x.rank
        inserted = moved.ndim - x.rank + 1
        before: list[Axis] = list(x.factors[:axis])
        between = [axis_of_length(n) for n in moved.shape[axis : axis + inserted]]
        return closed_if_static([*before, *between, *x.factors[axis + 1 :]])
    pairs = zip(x.factors, moved.shape, strict=True)
    return closed_if_static(a if is_open_axis(a) else axis_of_length(n) for a, n in pairs)


# End of a Slice that means "to the end of the axis"; exporters write this number or the largest int64
_END = 2**31 - 1


def _require_fixed_axes(call: Call, x: Value, others: list[Any]) -> list[Any]:
    """Require that a move leaves the open axes alone.

    Returns:
        the operands, without those that slice a whole open axis.

    Raises:
        NotEvaluated: the move touches an open axis.
    """
    axes: list[int]
    if call.op in ("Split", "Gather"):
        axes = [call.attrs.get("axis", 0) % x.rank]
    elif call.op == "Slice":
        return _slice_of_fixed_axes(call, x)
    elif call.op == "Tile":
        axes = [i for i, n in enumerate(others[0].tolist()) if n != 1]
    else:
        axes = list(range(x.rank))
    if any(is_open_axis(x.factors[i]) for i in axes):
        raise NotEvaluated(f"{call.op} along an open size")
    return others


def _slice_of_fixed_axes(call: Call, x: Value) -> list[Any]:
    starts = call.integers(1, "starts") or []
    axes = call.integers(3, "axes") or list(range(len(starts)))
    steps = call.integers(4, "steps") or [1] * len(starts)
    ends = call.optional(2)
    given: list[Any] = list(call.attrs.get("ends", ()))
    if ends is not None and ends.stored is not None:
        given = ends.stored.reshape(-1).tolist()
    if len(given) != len(starts):
        raise NotEvaluated("Slice with ends that depend on an input")
    kept = []
    for start, end, axis, step in zip(starts, given, axes, steps, strict=True):
        factors = x.factors[axis % x.rank]
        if not is_open_axis(factors):
            kept.append((start, int(end), axis % x.rank, step))
            continue
        whole = end == x.sizes[axis % x.rank] or (isinstance(end, int) and end >= _END)
        if start != 0 or step != 1 or not whole:
            raise NotEvaluated("Slice along an open size")
    columns = zip(*kept, strict=True) if kept else ((), (), (), ())
    return [np.array(column, np.int64) for column in columns]


def _reference_move(call: Call) -> Any:
    """Move elements as onnx's reference implementation moves their indices; zeros stay zeros."""
    x = call.data(0)
    if x.kind == "o":
        raise NotEvaluated("its input is not a number")
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


def _sizes_from(call: Call, index: int, name: str) -> list[int | Size] | None:
    """Read sizes, which may be open, from an input or an attribute."""
    given = call.numbers(index)
    if given is None:
        attribute = call.attrs.get(name)
        return None if attribute is None else [int(n) for n in attribute]
    return [_plain(n) if isinstance(n, Size) else int(n) for n in given.reshape(-1).tolist()]


def _reshape(call: Call) -> Value:
    x = call.data(0)
    shape = _sizes_from(call, 1, "shape")
    if shape is None:
        raise NotEvaluated("Reshape without a shape")
    sizes = [_plain(n) for n in x.sizes]
    if not call.attrs.get("allowzero"):
        shape = [sizes[i] if n == 0 else n for i, n in enumerate(shape)]
    gaps = [i for i, n in enumerate(shape) if isinstance(n, int) and n < 0]
    if len(gaps) > 1 or any(isinstance(n, int) and n < -1 for n in shape):
        raise NotEvaluated("Reshape to a shape that does not fit")
    if gaps:
        shape[gaps[0]] = _missing_size(sizes, [n for i, n in enumerate(shape) if i != gaps[0]])
    if all(isinstance(n, int) for n in (*shape, *sizes)) and math.prod(map(int, shape)) != x.size:  # type: ignore[arg-type]
        raise NotEvaluated("Reshape to a shape that does not fit")
    return call.reshape(x, shape)


def _missing_size(sizes: Sequence[int | Size], others: Sequence[int | Size]) -> int | Size:
    """Compute the size that a Reshape leaves open."""
    over = [Size.from_int(n) for n in sizes]
    under = [Size.from_int(n) for n in others]
    for n in list(under):
        if n in over:
            over.remove(n)
            under.remove(n)
    divisor = product_of_sizes(under)
    if divisor == 0:
        raise NotEvaluated("Reshape to a shape that does not fit")
    found = product_of_sizes(over).divide_exactly(divisor)
    if found is None:
        raise NotEvaluated("Reshape to a shape that does not fit")
    return _plain(found)


def _flatten(call: Call) -> Value:
    x = call.data(0)
    axis = call.attrs.get("axis", 1)
    axis = axis + x.rank if axis < 0 else axis
    return call.reshape(x, [_plain(product_of_sizes(x.sizes[:axis])), _plain(product_of_sizes(x.sizes[axis:]))])


def _squeeze(call: Call) -> Value:
    x = call.data(0)
    axes = call.integers(1, "axes")
    if axes is None:
        axes = [i for i, n in enumerate(x.dims) if n == 1]
    axes = normalize_axes(axes, x.rank)
    if any(x.sizes[i] != 1 for i in axes):
        raise NotEvaluated("Squeeze of an axis that is not 1")
    return call.reshape(x, [_plain(n) for i, n in enumerate(x.sizes) if i not in axes])


def _unsqueeze(call: Call) -> Value:
    x = call.data(0)
    axes = call.integers(1, "axes") or []
    rank = x.rank + len(axes)
    ones = normalize_axes(axes, rank)
    if len(ones) != len(axes):
        raise NotEvaluated("Unsqueeze of one axis twice")
    kept = iter(x.sizes)
    return call.reshape(x, [1 if i in ones else _plain(next(kept)) for i in range(rank)])


def _transpose(call: Call) -> Value:
    x = call.data(0)
    return call.transpose(x, call.attrs.get("perm") or range(x.rank)[::-1])


def _expand(call: Call) -> Value:
    return call.expand(call.data(0), _sizes_from(call, 1, "shape") or [])


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
    if x.is_open:
        raise NotEvaluated("Gather from an open size")
    rows = x.dims[axis]
    shared = field.shared_hash(x)
    if shared is not None and axis == 0:
        keys = field.unknown.keys(read_name(f"table {shared.hex()}", index), field.residues(index))
        wide = field.unknown.extend_keys(keys.reshape(2, -1), x.dims[1]).reshape(2, *index.points, x.dims[1])
        axes = closed_if_static((*index.factors, axis_of_length(x.dims[1]))) if index.is_open else None
        return field.from_keys("", wide, [index], axes=axes)
    keys = field.unknown.keys(read_name(f"row of {rows}", index), field.residues(index))
    picks = field.unknown.extend_keys(keys.reshape(2, -1), rows)
    field.note_compared(index)
    weights = field.made(field.unknown.from_keys(picks), Degree(1))
    field.note_applied(weights.size)
    moved = call.transpose(x, [axis, *(i for i in range(x.rank) if i != axis)])
    rest = moved.dims[1:]
    picked = call.matmul(weights, call.reshape(moved, (rows, math.prod(rest))))
    if index.is_open:
        axes = closed_if_static((*index.factors, *map(axis_of_length, rest)))
        a = field.residues(picked)
        points = (*index.points, *rest)
        picked = replace(picked, residues=a.reshape(a.shape[0], *points), shape=points, axes=axes, digest=b"")
    else:
        picked = call.reshape(picked, (*index.dims, *rest))
    # The axes of the index move to the place of the axis that it replaces.
    lead = index.rank
    before = range(lead, lead + axis)
    after = range(lead + axis, lead + len(rest))
    made = call.transpose(picked, [*before, *range(lead), *after])
    return replace(made, kind=x.kind, sign=Sign.UNKNOWN, elem=x.elem, wraps=x.wraps)


def _gather_elements(call: Call) -> Value:
    x = call.data(0)
    index = call.numbers(1)
    assert index is not None
    axis = call.attrs.get("axis", 0) % x.rank
    grid = list(np.indices(index.shape))
    grid[axis] = index
    places = np.arange(1, x.size + 1).reshape(x.dims)
    return call.gather_places(x, places[tuple(grid)])


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
    sizes = call.data(0).sizes[call.attrs.get("start", 0) : call.attrs.get("end")]
    return call.field.constant(_as_integers(sizes).reshape(-1))


def _as_integers(sizes: Sequence[Size]) -> Array:
    plain = [_plain(n) for n in sizes]
    if all(isinstance(n, int) for n in plain):
        return np.array(plain, np.int64)
    made = np.empty(len(plain), dtype=object)
    made[:] = plain
    return made


def _size(call: Call) -> Value:
    return call.field.constant(_as_integers([product_of_sizes(call.data(0).sizes)]).reshape(()))


def _constant_of_shape(call: Call) -> Value:
    shape = _sizes_from(call, 0, "") or []
    value = np.asarray(call.attrs.get("value", np.zeros(1, np.float32)))
    whole = [n for n in shape if isinstance(n, int)]
    if len(whole) == len(shape):
        return call.field.constant(np.full(whole, value.reshape(())))
    return call.expand(call.field.constant(value.reshape(())), shape)


def _range(call: Call) -> Value:
    numbers = [call.numbers(i) for i in range(3)]
    if any(n is not None and n.dtype == object for n in numbers):
        return _open_range(call, numbers)
    (made,) = evaluator.evaluate_node("Range", numbers, {}, opset=call.opset)
    assert made is not None
    if made.dtype.kind == "f" and not (made == np.rint(made)).all():
        raise NotEvaluated("Range of fractions")
    return call.field.constant(made)


def _open_range(call: Call, numbers: Sequence[Any]) -> Value:
    """Make the numbers 0, 1, … below an open size, as unknown numbers of the places."""
    start, limit, delta = (n.reshape(-1)[0] for n in numbers)
    if start != 0 or delta != 1:
        raise NotEvaluated("Range to an open size that does not count from 0")
    return call.field.free("place", [Size.from_int(limit)], "i")


def _cumsum(call: Call) -> Value:
    x = call.data(0)
    _refuse_special(x)
    if call.attrs.get("exclusive") or call.attrs.get("reverse"):
        raise NotEvaluated("CumSum with exclusive or reverse")
    axis = call.numbers(1)
    assert axis is not None
    place = int(axis.reshape(())) % x.rank
    if x.stored is not None and x.kind != "f":
        return call.field.constant(np.cumsum(x.stored, axis=place, dtype=x.stored.dtype))
    field = call.field
    made = field.arithmetic.reduce(np.cumsum(field.residues(x), axis=place + 1))
    return _may_wrap(field.made(made, x.degree.plus(x.degree, max(x.dims[place], 1)), kind=x.kind), x)


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
        return call.reshape(y, [_plain(n) for i, n in enumerate(y.sizes) if i not in axes])

    return run


def _sum_of_squares(call: Call, x: Value, axes: list[int]) -> Value:
    return call.sum(call.multiply(x, x), axes)


def _root_of_squares(call: Call, x: Value, axes: list[int]) -> Value:
    return call.root(_sum_of_squares(call, x, axes))


def _sum_of_magnitudes(call: Call, x: Value, axes: list[int]) -> Value:
    return call.sum(call.unary("Abs", x, Sign.NOT_NEGATIVE), axes)


def _log_sum_exp(call: Call, x: Value, axes: list[int]) -> Value:
    _require_floats(x)
    return call.unary("Log", call.sum(call.unary("Exp", x, Sign.POSITIVE), axes))


def _unordered(name: str) -> Callable[[Call, Value, list[int]], Value]:
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
        return field.from_keys(name, total, [x], kind=x.kind, axes=closed_if_static(left) if x.is_open else None)

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
        if any(map(is_open_axis, x.factors[2:])):
            raise NotEvaluated("auto_pad for an open size")
        for n, k, s, d in zip(x.points[2:], kernel, strides, dilations, strict=True):
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
    batch, channels = x.points[:2]
    if is_open_axis(x.factors[1]) or channels != depth * groups or filters % groups:
        raise NotEvaluated("a convolution whose weight does not fit its input")
    opened = any(map(is_open_axis, x.factors[2:]))
    rank = len(kernel)
    gather: Array | None = None
    outer: tuple[Axis, ...] = ()
    if opened:
        outer, gather = _random_gather(call, x, kernel, (strides, dilations, begins, ends))
    rows = []
    out: tuple[int, ...] = ()
    for j, p in enumerate(field.arithmetic.primes):
        a = field.residues_modulo(x, j)
        if gather is not None:
            out = tuple(map(field.axis_points, outer))
            # (N·C, in)·(in, taps·out) becomes (N, G, C/G·taps, out).
            columns = matmul_modulo(a.reshape(batch * channels, -1), gather[j], p)
        else:
            windows = _unfold(_pad_spatial(a, begins, ends), kernel, strides, dilations)
            out = windows.shape[2 : 2 + rank]
            order = (0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))
            columns = windows.transpose(order)
        columns = columns.reshape(batch, groups, depth * math.prod(kernel), math.prod(out))
        weight = field.residues_modulo(w, j).reshape(groups, filters // groups, depth * math.prod(kernel))
        rows.append(matmul_modulo(weight, columns, p).reshape(batch, filters, *out))
    if not opened:
        outer = tuple(map(axis_of_length, out))
    degree = x.degree.times(w.degree)
    if opened:
        degree = degree.times(Degree(1))
    axes = closed_if_static([x.factors[0], axis_of_length(filters), *outer]) if x.is_open else None
    return field.made(np.stack(rows), degree.plus(degree, max(depth * math.prod(kernel), 1)), axes=axes)


def _random_gather(
    call: Call, x: Value, kernel: Sequence[int], window: tuple[Sequence[int], ...]
) -> tuple[tuple[Axis, ...], Array]:
    """Draw the linear map from an input of open sizes to the elements that the taps read.

    Convolutions with equal windows have the same map. An equality that holds for every linear map holds for the map of
    the convolution. Without pads, each tap reads one element, so the weights of each tap and place add up to 1.

    Returns:
        axes of the result, and the map with shape (primes, input points, taps · output points).
    """
    field = call.field
    sizes = x.sizes[2:]
    strides, dilations, begins, ends = map(list, window)
    outer = []
    for i, size in enumerate(sizes):
        told = (kernel[i], strides[i], dilations[i], begins[i], ends[i])
        slack = (kernel[i] - 1) * dilations[i] - begins[i] - ends[i]
        if strides[i] == 1 and (slack <= 0 or size.constant_value is not None):
            outer.append(field.axis_of_size(size - slack))
        elif size.constant_value is not None:
            outer.append(axis_of_length((size.constant_value - slack - 1) // strides[i] + 1))
        else:
            outer.append((Size.opaque("places of a window", told, size),))
    name = repr(([n.terms for n in sizes], list(kernel), strides, dilations, begins, ends))
    inner = math.prod(x.points[2:])
    taps = math.prod(kernel) * math.prod(map(field.axis_points, outer))
    made = field.unknown.fill(f"gather {name}", (inner, taps)).copy()
    if not any((*begins, *ends)):
        rest = field.arithmetic.sum(made[:, 1:], (0,), keepdims=False)
        made[:, 0] = (1 - rest) % field.arithmetic.column(1)
    return tuple(outer), made


def _conv_transpose(call: Call) -> Value:
    """Convolve the input with zeros between its elements, with the flipped kernel."""
    x, w, bias = call.data(0), call.data(1), call.optional(2)
    if call.attrs.get("output_shape") or decode_text(call.attrs.get("auto_pad", "NOTSET")) != "NOTSET":
        raise NotEvaluated("ConvTranspose with output_shape or auto_pad")
    strides, dilations, begins, ends = _window(call, x, w.dims[2:])
    groups = call.attrs.get("group", 1)
    extra = list(call.attrs.get("output_padding") or [0] * len(strides))
    channels, depth, *kernel = w.dims
    if any(map(is_open_axis, x.factors[1:])):
        raise NotEvaluated("ConvTranspose of an open size")
    sizes = [(n - 1) * s + 1 for n, s in zip(x.points[2:], strides, strict=True)]
    places = np.zeros((*x.points[:2], *sizes), np.int64)
    cut: Any = (slice(None), slice(None), *(slice(None, None, s) for s in strides))
    places[cut] = np.arange(1, math.prod(x.points) + 1).reshape(x.points)
    axes = closed_if_static([*x.factors[:2], *map(axis_of_length, sizes)]) if x.is_open else None
    stuffed = call.gather_places(x, places, axes)
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
    spatial = tuple(range(-len(kernel), 0))

    def add_windows(a: Array) -> Array:
        return np.add.reduce(_unfold(_pad_spatial(a, begins, ends), kernel, strides, dilations), axis=spatial)

    if x.is_open and any(map(is_open_axis, x.factors[2:])):
        raise NotEvaluated("AveragePool of an open size")
    total = np.stack([add_windows(row) for row in field.residues(x)])
    terms = math.prod(kernel)
    axes: tuple[Axis, ...] | None = None
    if x.is_open:
        axes = closed_if_static([*x.factors[:2], *map(axis_of_length, total.shape[3:])])
    made = field.made(field.arithmetic.reduce(total), x.degree.plus(x.degree, terms), sign=x.sign, axes=axes)
    counts = add_windows(np.ones((1, 1, *x.points[2:]), np.int64)).astype(np.float64)
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
    shape = [_plain(n) for n in x.sizes]
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
            call.largest(call.add(call.divide(call.data(0), call.number(6.0)), call.number(0.5)), call.number(0.0)),
            call.number(1.0),
        ),
    ),
    "Swish": _swish,
    "LeakyRelu": _leaky_relu,
    "PRelu": _prelu,
    "Equal": _compare("Equal", symmetric=True),
    "Less": _compare("Less"),
    "Greater": _compare("Less", swapped=True),
    # Not(Greater) differs from LessOrEqual for NaN only, which is not a real number.
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
    "GatherElements": _gather_elements,
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
