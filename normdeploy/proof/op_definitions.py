"""Define the standard ops that the prover can evaluate, on `Value`s.

The definitions are ONNX's (https://onnx.ai/onnx/operators).

Floating-point tensors are `Value`s. Integers (shapes, axes) are numpy arrays, with dtype object if they hold `Size`s.
The ops of this module and of `normdeploy.proof.lemmas`, which need a lemma, are called the language of proofs. A proof
fails if a region holds any other op, or an op with attributes that make it non-algebraic. The failure names the op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from ..evaluate.evaluator_core import integers_from, optional_input
from ..graphs.symbolic_sizes import ONE, Size
from .arithmetic import fixed_axes
from .degree import Degree
from .interpreter import ProofInterpreter
from .proof_errors import NotProved, ProofFailure
from .value import Logarithm, Magnitude, Value, axis_identity

# Maximum number of inputs of a Sum; the Sum of a norm has two or three
_MANY = 64
Inputs = Sequence[Any]
Attrs = Mapping[str, Any]
Op = Callable[[ProofInterpreter, Inputs, Attrs, int, int], Any]


def lift_input(m: ProofInterpreter, x: Any) -> Value:
    """Convert an input to a value; integers become numbers.

    Returns:
        the value.

    Raises:
        NotProved: the input is omitted or is not numeric.
    """
    if isinstance(x, Value):
        return x
    if not isinstance(x, np.ndarray):
        raise NotProved(
            ProofFailure.OP,
            ("an input is omitted" if x is None else f"a {type(x).__name__} is used in a way that is not algebraic"),
        )
    array = np.asarray(x)
    if array.dtype == object:
        return _sizes_as_value(m, array)
    return m.constant(array.astype(np.float64))


def _sizes_as_value(m: ProofInterpreter, array: np.ndarray) -> Value:
    if array.size != 1:
        raise NotProved(ProofFailure.SIZE, "several sizes are used as numbers")
    one = m.size_value(Size.from_int(array.reshape(-1)[0]))
    return one.with_axes(tuple(() for _ in array.shape))


def axes_of(x: Value, given: Sequence[int] | None) -> list[int]:
    """Normalize the axes of a reduction.

    Args:
        given: axes, possibly negative; None for all axes.

    Returns:
        sorted axes, non-negative.
    """
    rank = len(x.axes)
    if given is None:
        return list(range(rank))
    if rank:
        return sorted({int(a) % rank for a in given})
    return []


# ------------------------------------------------------------------ arithmetic


def _binary_op(name: str) -> Op:
    def run(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value | Logarithm:
        if opset < 7 and "axis" in attrs:
            raise NotProved(ProofFailure.OP, "broadcasting by an attribute (opset 6 or older)")
        if name == "mul" and isinstance(inputs[0], Magnitude) and inputs[0] is inputs[1]:
            return inputs[0].square
        if name in ("mul", "div") and any(isinstance(x, Logarithm) for x in inputs):
            return _scaled_log(m, name, *inputs)
        function: Callable[[Value, Value], Value] = getattr(m, name)
        return function(lift_input(m, inputs[0]), lift_input(m, inputs[1]))

    return run


def _scaled_log(m: ProofInterpreter, name: str, x: Any, y: Any) -> Logarithm:
    """Multiply or divide a logarithm by one number."""
    log, factor = (x, y) if isinstance(x, Logarithm) else (y, x)
    if (
        not isinstance(factor, Value)
        or factor.data
        or factor.sized
        or factor.f.size != 1
        or any(factor.axes)
        or (name == "div" and log is y)
    ):
        raise NotProved(ProofFailure.OP, "a logarithm is multiplied by more than one number")
    number = float(factor.f.reshape(-1)[0])
    if len(factor.axes) > len(log.t.axes) or not number:
        raise NotProved(ProofFailure.OP, "a logarithm is multiplied by zero or by a number of higher rank")
    if name == "mul":
        by = Fraction(number)
    else:
        by = 1 / Fraction(number)
    floats = Value(
        log.floats.axes, None, log.floats.f * number if name == "mul" else log.floats.f / number, log.floats.data
    )
    return Logarithm(log.t, log.q * by, floats)


def _negate(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value | Logarithm:
    (x,) = inputs
    if isinstance(x, Logarithm):
        return Logarithm(x.t, -x.q, Value(x.floats.axes, None, -x.floats.f, x.floats.data))
    return m.neg(lift_input(m, x))


def _variadic_sum(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    if len(inputs) > _MANY:
        raise NotProved(ProofFailure.LIMIT, f"a sum of {len(inputs)} tensors; at most {_MANY} are supported")
    return functools.reduce(m.add, [lift_input(m, x) for x in inputs])


def _variadic_mean(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    return m.div(functools.reduce(m.add, [lift_input(m, x) for x in inputs]), m.number(len(inputs)))


def _power(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    q = lift_input(m, inputs[1])
    if isinstance(inputs[0], Magnitude):
        return _power_of_magnitude(m, inputs[0], q)
    if not isinstance(inputs[0], Value):
        raise NotProved(ProofFailure.OP, "Pow of an integer, which truncates its result", "Pow")
    x = inputs[0]
    if q.data or q.sized or q.f.size != 1 or len(q.axes) > len(x.axes) or any(q.axes):
        raise NotProved(ProofFailure.OP, "Pow with several exponents")
    return m.power(x, Fraction(float(q.f.reshape(-1)[0])))


def _power_of_magnitude(m: ProofInterpreter, x: Magnitude, q: Value) -> Value:
    exponent = float(q.f.reshape(-1)[0])
    if (
        q.data
        or q.sized
        or q.f.size != 1
        or any(q.axes)
        or len(q.axes) > len(x.square.axes)
        or exponent not in (2.0, 4.0)
    ):
        raise NotProved(ProofFailure.OP, "a power of an absolute value with an exponent other than 2 or 4")
    if exponent == 2.0:
        return x.square
    return m.mul(x.square, x.square)


# ------------------------------------------------------------------ views


def _reshape(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    x = lift_input(m, inputs[0])
    if len(inputs) > 1:
        wanted = inputs[1]
    else:
        wanted = np.array(attrs["shape"])
    shape = x.shape
    sizes: list[Size | None] = []
    for i, n in enumerate(np.asarray(wanted).reshape(-1).tolist()):
        size = Size.from_int(n)
        if size == -1:
            sizes.append(None)
        elif size == 0 and not attrs.get("allowzero"):
            sizes.append(shape[i])
        elif size.is_positive or size in x.atoms:
            # A size such as h − 2 is at least 1 here, because the tensor already has an axis of this size.
            sizes.append(size)
        else:
            raise NotProved(ProofFailure.SIZE, f"a Reshape to size {size}, which may not be positive")
    if sizes.count(None) > 1:
        raise NotProved(ProofFailure.SIZE, "a Reshape with more than one inferred size")
    return x.with_axes(m.plan.regroup_atoms(x.atoms, sizes))


def _flatten(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    x = lift_input(m, inputs[0])
    axis = int(attrs.get("axis", 1))
    if axis < 0:
        axis = axis % len(x.axes)
    head = x.axes[:axis]
    tail = x.axes[axis:]
    return x.with_axes((tuple(a for axis_ in head for a in axis_), tuple(a for axis_ in tail for a in axis_)))


def _squeeze(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    x = lift_input(m, inputs[0])
    given = integers_from(inputs, 1, attrs, "axes")
    if given is None and any(s.symbols() for s in x.shape):
        raise NotProved(ProofFailure.SIZE, "a Squeeze without axes on a dynamic shape")
    if given is not None:
        axes = axes_of(x, given)
    else:
        axes = [i for i, axis in enumerate(x.axes) if not axis]
    if any(x.axes[i] for i in axes):
        raise NotProved(ProofFailure.SIZE, "a Squeeze of an axis whose size may differ from 1")
    return x.with_axes(tuple(axis for i, axis in enumerate(x.axes) if i not in axes))


def _unsqueeze(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    x = lift_input(m, inputs[0])
    given = integers_from(inputs, 1, attrs, "axes") or []
    rank = len(x.axes) + len(given)
    ones = {int(a) % rank for a in given}
    rest = iter(x.axes)
    return x.with_axes(tuple(() if i in ones else next(rest) for i in range(rank)))


def _transpose(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    x = lift_input(m, inputs[0])
    perm = [int(i) for i in attrs.get("perm") or range(len(x.axes) - 1, -1, -1)]
    order = [0] + [s for i in perm for s in x.array_axes(i)]
    return x.with_axes(tuple(x.axes[i] for i in perm), order)


def _expand(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    x = lift_input(m, inputs[0])
    return broadcast_to_sizes(m, x, [Size.from_int(n) for n in np.asarray(inputs[1]).reshape(-1).tolist()])


def broadcast_to_sizes(m: ProofInterpreter, x: Value, sizes: Sequence[Size]) -> Value:
    """Broadcast ``x`` with a tensor of the given shape.

    Returns:
        ``x`` along the common axes.

    Raises:
        NotProved: a size may be zero.
    """
    rank = max(len(sizes), len(x.axes))
    wanted = [ONE] * (rank - len(sizes)) + list(sizes)
    if not all(s.is_positive for s in wanted):
        raise NotProved(ProofFailure.SIZE, f"an Expand to {tuple(wanted)}, which may be empty")
    empty = Value(
        tuple(m.plan.atoms_of(s) for s in wanted),
        None,
        np.zeros((1,) * (1 + sum(len(m.plan.atoms_of(s)) for s in wanted))),
    )
    common, ((a, f), _) = m.broadcast_values(x, empty)
    return replace(x, axes=common, a=a, f=f)


def _tile(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    """Repeat a value along its axes: an axis becomes (repeats, axis), and nothing varies along the repeats."""
    x = lift_input(m, inputs[0])
    repeats = [Size.from_int(n) for n in np.asarray(inputs[1]).reshape(-1).tolist()]
    if not all(n.is_positive for n in repeats):
        raise NotProved(ProofFailure.SIZE, f"a Tile of {tuple(repeats)} copies, which may be empty")
    added = [m.plan.atoms_of(n) for n in repeats]
    axes = tuple(own + axis for own, axis in zip(added, x.axes, strict=True))
    m.plan.separate_axes(axes)
    shape: list[int] = []
    for axis, own in enumerate(added):
        shape += [1] * len(own) + [x.f.shape[slot] for slot in x.array_axes(axis)]

    def lay_out(array: Any) -> Any:
        return array.reshape(array.shape[0], *shape)

    return replace(x, axes=axes, a=None if x.a is None else lay_out(x.a), f=lay_out(x.f))


def _concat(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    """Concatenate values. The points of the joined axis are the points of its parts."""
    values = [lift_input(m, x) for x in inputs]
    if len(values) == 1:
        return values[0]
    axis = int(attrs.get("axis", 1)) % len(values[0].axes)
    parts = tuple(v.shape[axis] for v in values)
    size = functools.reduce(lambda s, t: s + t, parts)
    m.plan.join_axes(size, parts)
    common: list[Any] = [()] * len(values[0].axes)
    for v in values:
        common = [
            m.plan.unify_atoms(c, () if i == axis else a) for i, (c, a) in enumerate(zip(common, v.axes, strict=True))
        ]
    arrays: list[tuple[Any, Any]] = []
    for v in values:
        draws = max(w.f.shape[0] for w in values)
        full = [draws] + [
            m.plan.point_count(a) for i, c in enumerate(common) for a in (v.axes[axis] if i == axis else c)
        ]
        if any(a != c for i, (a, c) in enumerate(zip(v.axes, common, strict=True)) if i != axis):
            raise NotProved(ProofFailure.SIZE, "the inputs of a Concat differ in other axes")
        start = 1 + sum(len(c) for i, c in enumerate(common) if i < axis)
        flat = [*full[:start], -1, *full[start + len(v.axes[axis]) :]]
        arrays.append(
            (
                None if v.a is None else np.broadcast_to(v.a, full).reshape(flat),
                np.broadcast_to(v.f, full).reshape(flat),
            )
        )
    start = 1 + sum(len(c) for i, c in enumerate(common) if i < axis)
    a = None if any(x is None for x, _ in arrays) else np.concatenate([x for x, _ in arrays], axis=start)
    f = np.concatenate([y for _, y in arrays], axis=start)
    degree = functools.reduce(Degree.union, (v.degree for v in values))
    axes = tuple(m.plan.atoms_of(size) if i == axis else c for i, c in enumerate(common))
    sign = min(v.sign for v in values)
    made = Value(axes, a, f, any(v.data for v in values), sign, degree, sized=any(v.sized for v in values))
    made.sums, made.fixed = frozenset().union(*(v.sums for v in values)), fixed_axes(axes, *values)
    # Each part may be divided by its own statistics.
    if any(v.sums and v.degree.has_denominator for v in values):
        made.fixed |= {axis_identity(atom) for atom in axes[axis]}
    return made


def _split(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> tuple[Value, ...]:
    """Split an axis, the inverse of `_concat`: each part has its own points."""
    x = lift_input(m, inputs[0])
    axis = int(attrs.get("axis", 0)) % len(x.axes)
    size = x.shape[axis]
    given = integers_from(inputs, 1, attrs, "split")
    if given is None:
        given = _equal_parts(size, int(attrs.get("num_outputs", outputs)))
    parts = tuple(Size.from_int(n) for n in given)
    if not all(n.is_positive for n in parts) or functools.reduce(lambda s, t: s + t, parts) != size:
        raise NotProved(ProofFailure.SIZE, f"a Split of an axis of size {size} into {parts}")
    if len(parts) == 1:
        return (x,)
    if x.axes[axis] != (size,):
        raise NotProved(ProofFailure.LAYOUT, f"a Split of an axis of size {size}, which is split in another way")
    m.plan.join_axes(size, parts)
    return tuple(m.split_joined_axis(x, axis))


def _equal_parts(size: Size, count: int) -> list[int]:
    """Divide a size by the number of parts; the last part may be smaller."""
    n = size.constant_value
    if n is None:
        raise NotProved(ProofFailure.SIZE, f"a Split of an axis of size {size} into {count} parts")
    part = -(-n // count)
    return [part] * (count - 1) + [n - part * (count - 1)]


def _identity(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    return inputs[0]


def _dropout(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    training = optional_input(inputs, 2)
    if (training is not None and np.asarray(training).any()) or (opset < 7 and not attrs.get("is_test")):
        raise NotProved(ProofFailure.OP, "Dropout in training mode")
    return inputs[0]


def _constant_of_shape(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    value = np.asarray(attrs.get("value", np.zeros(1, np.float32)))
    sizes = [Size.from_int(n) for n in np.asarray(inputs[0]).reshape(-1).tolist()]
    if value.dtype.kind in "iub":
        if any(s.constant_value is None for s in sizes):
            raise NotProved(ProofFailure.SIZE, "an integer tensor of dynamic size")
        return np.full([int(s.constant_value or 0) for s in sizes], value.reshape(()))
    return broadcast_to_sizes(m, m.constant(value.astype(np.float64).reshape(())), sizes)


# ------------------------------------------------------------------ sums


def _reduction_op(core: Callable[[ProofInterpreter, Any, list[int]], Value], squares: bool = False) -> Op:
    def run(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
        x: Any
        if isinstance(inputs[0], Magnitude):
            x = inputs[0]
        else:
            x = lift_input(m, inputs[0])
        given = integers_from(inputs, 1, attrs, "axes")
        if not given and attrs.get("noop_with_empty_axes"):
            raise NotProved(ProofFailure.OP, "a reduction over no axes")
        axes = axes_of(x.square if isinstance(x, Magnitude) else x, given or None)
        if isinstance(x, Magnitude) and not squares:
            raise NotProved(ProofFailure.OP, "a sum of absolute values is not algebraic")
        y = core(m, x, axes)
        if attrs.get("keepdims", 1):
            return y
        return y.with_axes(tuple(axis for i, axis in enumerate(y.axes) if i not in axes))

    return run


def _sum_of_squares(m: ProofInterpreter, x: Value | Magnitude, axes: list[int]) -> Value:
    return m.sum_over(x.square if isinstance(x, Magnitude) else m.mul(x, x), axes)


def _global_average(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    x = lift_input(m, inputs[0])
    return m.mean(x, range(2, len(x.axes)))


def _matmul(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    a = lift_input(m, inputs[0])
    b = lift_input(m, inputs[1])
    if not a.axes or not b.axes:
        raise NotProved(ProofFailure.OP, "MatMul of a scalar")
    rows = len(a.axes) > 1
    columns = len(b.axes) > 1
    left = a.with_axes((*a.axes[:-1], *(() if rows else ((),)), a.axes[-1], ()))
    right = b.with_axes((*b.axes[:-2], (), *(b.axes[-2:] if columns else (b.axes[-1], ()))))
    y = m.inner_product(left, right, [max(len(left.axes), len(right.axes)) - 2])
    kept = list(y.axes[:-3]) + ([y.axes[-3]] if rows else []) + ([y.axes[-1]] if columns else [])
    return y.with_axes(tuple(kept))


def _gemm(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    a = lift_input(m, inputs[0])
    b = lift_input(m, inputs[1])
    if attrs.get("transA"):
        a = _transpose(m, [a], {}, opset, 1)
    if attrs.get("transB"):
        b = _transpose(m, [b], {}, opset, 1)
    y = m.mul(m.number(Fraction(float(attrs.get("alpha", 1.0)))), _matmul(m, [a, b], {}, opset, 1))
    c = optional_input(inputs, 2)
    if c is None:
        return y
    return m.add(y, m.mul(m.number(Fraction(float(attrs.get("beta", 1.0)))), lift_input(m, c)))


def _einsum(m: ProofInterpreter, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    if isinstance(attrs["equation"], bytes):
        equation = attrs["equation"].decode()
    else:
        equation = attrs["equation"]
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or any(len(set(t)) < len(t) for t in (*terms, right)) or len(terms) != len(inputs):
        raise NotProved(ProofFailure.OP, f"Einsum {equation!r}")
    letters = list(right) + sorted({c for t in terms for c in t} - set(right))
    values = []
    for term, x in zip(terms, inputs, strict=True):
        v = _transpose(m, [lift_input(m, x)], {"perm": [term.index(c) for c in letters if c in term]}, opset, 1)
        own = iter(v.axes)
        values.append(v.with_axes(tuple(next(own) if c in term else () for c in letters)))
    y = values[0]
    for i, v in enumerate(values[1:]):
        if inputs[i + 1] is inputs[0] and terms[i + 1] == terms[0] and len(values) == 2:
            y = m.mul(y, y)
        else:
            y = m.mul(y, v)
    y = m.sum_over(y, list(range(len(right), len(letters))))
    return y.with_axes(y.axes[: len(right)])


def broadcast_over_channels(m: ProofInterpreter, p: Any, x: Value) -> Value:
    """Align a vector over the channels with x, (N, C, …).

    Returns:
        the vector with trailing axes of size 1.
    """
    v = lift_input(m, p)
    return v.with_axes((*v.axes, *(((),) * (len(x.axes) - 2))))


TABLE: dict[str, Op] = {
    "Add": _binary_op("add"),
    "Sub": _binary_op("sub"),
    "Mul": _binary_op("mul"),
    "Div": _binary_op("div"),
    "Sum": _variadic_sum,
    "Mean": _variadic_mean,
    "Neg": _negate,
    "Sqrt": lambda m, i, a, o, n: m.root(lift_input(m, i[0])),
    "Reciprocal": lambda m, i, a, o, n: m.inverse(lift_input(m, i[0])),
    "Pow": _power,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Expand": _expand,
    "Tile": _tile,
    "Concat": _concat,
    "Split": _split,
    "Identity": _identity,
    "Dropout": _dropout,
    "ConstantOfShape": _constant_of_shape,
    "ReduceSum": _reduction_op(lambda m, x, axes: m.sum_over(x, axes)),
    "ReduceMean": _reduction_op(lambda m, x, axes: m.mean(x, axes)),
    "ReduceSumSquare": _reduction_op(_sum_of_squares, squares=True),
    "ReduceL2": _reduction_op(lambda m, x, axes: m.root(_sum_of_squares(m, x, axes)), squares=True),
    "GlobalAveragePool": _global_average,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
}
