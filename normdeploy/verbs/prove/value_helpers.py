"""Combine facts about values: kinds, axes, number types and constant conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from ...graphs.symbolic_sizes import Size, product_of_sizes
from .field_values import Axis, NotEvaluated, Sign, Value, axis_of_length, closed_if_static, is_open_axis, joint_axes
from .residues import Array


def may_wrap(made: Value, *arguments: Value) -> Value:
    """Mark sums and products of integers: each integer type computes modulo two to its bits."""
    if made.kind != "i":
        return made
    elem = next((x.elem for x in arguments if x.elem), 0)
    return replace(made, elem=elem, wraps=True, sign=Sign.UNKNOWN, square_of=None, moment=None)


def require_floats(*values: Value) -> None:
    """Refuse integers, whose quotients and roots lose their fractions.

    Raises:
        NotEvaluated: a value is not of a floating type.
    """
    if any(x.kind != "f" for x in values):
        raise NotEvaluated("a quotient or root of integers")


def joint_fit(values: Sequence[Value]) -> int:
    found = {x.fits for x in values}
    return found.pop() if len(found) == 1 else 0


def is_at_most_zero(x: Value) -> bool:
    return x.stored is not None and x.stored.dtype != object and bool((x.stored <= 0).all())


def plain_size(size: Size) -> int | Size:
    """Convert a fixed size to an integer."""
    return size if size.constant_value is None else size.constant_value


def along_axis(weights: Array, axis: int, rank: int) -> Array:
    """Shape weights so that they broadcast along one axis."""
    shape = [weights.shape[0]] + [1] * rank
    shape[axis + 1] = weights.shape[1]
    return weights.reshape(shape)


def take_factors(left: list[Size], size: Size) -> Axis:
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


def joined_axes(values: Sequence[Value], axis: int) -> tuple[Axis, ...] | None:
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


def matmul_axes(left: Value, right: Value) -> tuple[Axis, ...] | None:
    rows, columns = left.factors[-2], right.factors[-1]
    stacks = [Value(v.points[:-2], v.kind, axes=closed_if_static(v.factors[:-2])) for v in (left, right)]
    rank = max(len(left.points), len(right.points)) - 2
    joined = joint_axes(stacks)
    if joined is None:
        joined = tuple(map(axis_of_length, np.broadcast_shapes(left.points[:-2], right.points[:-2])))
    assert len(joined) == rank
    return closed_if_static((*joined, rows, columns))


def joint_kind(*values: Value) -> str:
    return "f" if any(x.kind == "f" for x in values) else values[0].kind


def refuse_special(*values: Value) -> None:
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


def as_boolean(x: Value) -> Value:
    return replace(x, kind="b", wraps=False, elem=onnx.TensorProto.BOOL)


def broadcast_like(call: Any, x: Value, others: list[Value]) -> Value:
    """Broadcast ``x`` to the shape that it has together with other values."""
    axes = joint_axes([x, *others])
    points = np.broadcast_shapes(x.points, *(v.points for v in others))
    if points == x.points:
        return x
    if axes is None:
        return call.expand(x, points)
    return call.expand(x, [plain_size(product_of_sizes(axis)) for axis in axes])


def where_stored(call: Any, condition: Array, x: Value, y: Value) -> Value:
    shape = np.broadcast_shapes(condition.shape, x.dims, y.dims)
    first = np.broadcast_to(np.arange(x.size).reshape(x.dims), shape)
    second = np.broadcast_to(np.arange(y.size).reshape(y.dims) + x.size, shape)
    both = call.concat([call.reshape(x, (x.size,)), call.reshape(y, (y.size,))], 0)
    return call.gather_places(both, np.where(condition, first, second) + 1)


REAL_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Exp": np.exp,
    "Log": np.log,
    "Abs": np.abs,
    "Tanh": np.tanh,
    "Sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "Sin": np.sin,
    "Cos": np.cos,
}
