"""Compute with values of a field: sums, products, unknown functions and moves, which the definitions of ops share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from ...graphs.symbolic_sizes import Size
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
)
from .float_errors import Approx, concatenate
from .residues import Array, matmul_modulo
from .root_ratios import reconstruct_fraction, root_of_square
from .value_helpers import (
    REAL_FUNCTIONS,
    along_axis,
    broadcast_like,
    is_at_most_zero,
    joined_axes,
    joint_fit,
    joint_kind,
    matmul_axes,
    may_wrap,
    plain_size,
    refuse_special,
    require_floats,
    take_factors,
    where_stored,
)

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
            kind=joint_kind(x, y),
            approx=self.approx_of(Approx.plus, x, y),
            sign=sign,
            special=x.special or y.special,
            axes=joint_axes([x, y]),
        )
        return may_wrap(total, x, y)

    def subtract(self, x: Value, y: Value) -> Value:
        """Subtract."""
        refuse_special(x, y)
        field = self.field
        a, b = field.align([x, y])
        made = field.arithmetic.subtract(field.residues(a), field.residues(b))
        approx = self.approx_of(Approx.minus, x, y)
        difference = field.made(
            made, x.degree.plus(y.degree), kind=joint_kind(x, y), approx=approx, axes=joint_axes([x, y])
        )
        if x.moment is not None and approx is None and self._is_variance(difference, *x.moment):
            difference.sign = Sign.NOT_NEGATIVE
        return may_wrap(difference, x, y)

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
        refuse_special(x, y)
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
            kind=joint_kind(x, y),
            approx=self.approx_of(Approx.times, x, y),
            sign=sign,
            axes=joint_axes([x, y]),
        )
        if square:
            product.square_of = x
        elif x.moment is not None and math.prod(y.points) == 1:
            product.moment = x.moment
        return may_wrap(product, x, y)

    def inverse(self, x: Value) -> Value:
        """Compute 1/x, and record where it is not defined."""
        if not x.is_constant:
            self.field.require_nonzero(x)
        return self._inverse_of_nonzero(x)

    def _inverse_of_nonzero(self, x: Value) -> Value:
        refuse_special(x)
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
        refuse_special(x, y)
        made = self.multiply(x, self.inverse(y))
        if made.is_constant or math.prod(made.points) != 1 or made.is_open:
            return made
        # A quotient of open sizes may be a number.
        number = reconstruct_fraction(self.field.residues(made).reshape(-1).tolist(), self.field.arithmetic.primes)
        if number is None or Fraction(float(number)) != number:
            return made
        self.field.note_compared(made)
        return self.field.constant(np.full(made.points, float(number)))

    def negate(self, x: Value) -> Value:
        """Compute -x."""
        return self.subtract(self.number(0.0), x)

    def root(self, x: Value) -> Value:
        """Compute √x as the inverse of an unknown function of x."""
        require_floats(x)
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
        refuse_special(x)
        approx = self.approx_of(Approx.inverse_root, x)
        if approx is None:
            related = self._inverse_root_of_multiple(x)
            if related is not None:
                return related
            self.field.require_nonzero(x, "root")
        made = self.field.unknown_function("1/sqrt", [x], approx=approx)
        made.sign = Sign.POSITIVE if x.sign is Sign.POSITIVE else Sign.NOT_NEGATIVE
        if approx is not None:
            self._use_rational_roots(x, made)
        return made

    def _inverse_root_of_multiple(self, x: Value) -> Value | None:
        """Compute 1/√x as 1/√c · 1/√s if x is a multiple c·s of the argument s of an earlier root.

        Returns:
            None if there is no such root.
        """
        field = self.field
        found = field.root_arguments.ratio_to_known(field.residues(x))
        if found is None:
            return None
        ratio, residues = found
        base = replace(x, residues=residues, digest=b"", square_of=None, root_of=None, moment=None)
        field.require_nonzero(base, "root")
        of_base = field.unknown_function("1/sqrt", [base])
        of_base.sign = Sign.POSITIVE if x.sign is Sign.POSITIVE else Sign.NOT_NEGATIVE
        made = self.multiply(of_base, self._inverse_root_of_ratio(ratio))
        made.sign = of_base.sign
        # The multiple is zero where the base is zero.
        field.bases[field.digest(made)] = of_base
        field.bases[field.digest(self._inverse_of_nonzero(made))] = self._inverse_of_nonzero(of_base)
        return made

    def _inverse_root_of_ratio(self, ratio: Fraction) -> Value:
        field = self.field
        if ratio not in field.root_ratios:
            root = root_of_square(ratio)
            made = self._unknown_inverse_root(field.fraction(ratio)) if root is None else field.fraction(1 / root)
            field.root_ratios[ratio] = made
        return field.root_ratios[ratio]

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
        refuse_special(x)
        field = self.field
        places = tuple(axes)
        terms = math.prod(x.points[i] for i in places)
        if not terms:
            raise NotEvaluated("a sum of no elements")
        if not any(is_open_axis(x.factors[i]) for i in places):
            field.counts.add(terms)
        residues = field.residues(x)
        degree = x.degree
        for i in places:
            if is_open_axis(x.factors[i]):
                residues = field.arithmetic.multiply(residues, along_axis(field.weights(x.factors[i]), i, x.rank))
                degree = degree.summed(size for size in x.factors[i] if size.constant_value is None)
        made = field.arithmetic.sum(residues, places, keepdims=keepdims)
        approx = self.approx_of(lambda v: v.sum(places, keepdims=keepdims), x)
        left: list[Axis] = [() if i in places else axis for i, axis in enumerate(x.factors)]
        if not keepdims:
            left = [axis for i, axis in enumerate(x.factors) if i not in places]
        total = field.made(
            made,
            degree.plus(degree, terms),
            kind=joint_kind(x),
            approx=approx,
            sign=x.sign,
            axes=closed_if_static(left) if x.is_open else None,
        )
        if x.square_of is not None:
            total.moment = (x.square_of, places)
        return may_wrap(total, x)

    def mean(self, x: Value, axes: Sequence[int], *, keepdims: bool = True) -> Value:
        """Compute the mean along axes."""
        require_floats(x)
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
        refuse_special(x)
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
        real = REAL_FUNCTIONS.get(name)
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
            return where_stored(self, order > 0, x, y)
        for one, other in ((x, y), (y, x)):
            # A lower bound of zero or less does not change a value that is not negative.
            if one.sign >= Sign.NOT_NEGATIVE and is_at_most_zero(other):
                return broadcast_like(self, one, [other])
        made = self.field.unknown_function(
            "max",
            [x, y],
            symmetric=True,
            approx=self.approx_of(lambda a, b: a.choose(b, np.maximum), x, y),
            kind=joint_kind(x, y),
        )
        made.sign = max(made.sign, x.sign, y.sign)
        return made

    def smallest(self, x: Value, y: Value) -> Value:
        """Compute the smaller of two numbers as an unknown symmetric function."""
        order = self.order_of(x, y)
        if order is not None:
            return where_stored(self, order < 0, x, y)
        made = self.field.unknown_function(
            "min",
            [x, y],
            symmetric=True,
            approx=self.approx_of(lambda a, b: a.choose(b, np.minimum), x, y),
            kind=joint_kind(x, y),
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
        axes = [take_factors(left, size) for size in sizes]
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
            return replace(made, kind=joint_kind(*values), elem=values[0].elem, fits=joint_fit(values))
        rank = values[0].rank
        axis %= rank
        axes = None
        if any(x.is_open for x in values):
            axes = joined_axes(values, axis)
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
        made = Value(joined.shape[1:], joint_kind(*values), None, joined, b"", approx, degree, sign, special, axes)
        wraps = any(x.wraps for x in values)
        return replace(made, elem=values[0].elem, wraps=wraps, fits=joint_fit(values))

    def matmul(self, x: Value, y: Value) -> Value:
        """Multiply matrices as numpy's matmul does."""
        refuse_special(x, y)
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
                field.residues(left), along_axis(field.weights(inner), left.rank - 1, left.rank)
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
            axes = matmul_axes(left, right)
        terms = left.points[-1]
        approx = self.approx_of(Approx.matmul, left, right)
        product = field.made(made, degree.plus(degree, terms), kind=joint_kind(x, y), approx=approx, axes=axes)
        product = may_wrap(product, x, y)
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
        return self.reshape(x, [plain_size(n) for i, n in enumerate(x.sizes) if i != axis])
