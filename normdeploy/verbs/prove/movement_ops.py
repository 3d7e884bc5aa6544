"""Evaluate ops that move elements or compute shapes at a random point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx.helper
import onnx.reference

from ...evaluate import evaluator
from ...evaluate.evaluator_core import UnsupportedOp, decode_text
from ...graphs.symbolic_sizes import Size, product_of_sizes
from .field_values import (
    Axis,
    Degree,
    NotEvaluated,
    Sign,
    Value,
    axis_of_length,
    closed_if_static,
    is_open_axis,
    read_name,
)
from .op_call import Call
from .residues import Array
from .value_helpers import may_wrap, normalize_axes, plain_size, refuse_special


def evaluate_move(call: Call) -> Any:
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


def evaluate_reference_move(call: Call) -> Any:
    """Move elements as onnx's reference implementation moves their indices; zeros stay zeros."""
    x = call.data(0)
    if x.kind == "o":
        raise NotEvaluated("its input is not a number")
    others = [call.numbers(i) for i in range(1, len(call.inputs))]
    index = np.arange(1, x.size + 1).reshape(x.dims)
    made = _run_reference(call, [index, *others])
    return tuple(call.gather_places(x, r) for r in made)


def _run_reference(call: Call, arrays: Sequence[Any]) -> list[Array]:
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
    return [plain_size(n) if isinstance(n, Size) else int(n) for n in given.reshape(-1).tolist()]


def evaluate_reshape(call: Call) -> Value:
    x = call.data(0)
    shape = _sizes_from(call, 1, "shape")
    if shape is None:
        raise NotEvaluated("Reshape without a shape")
    sizes = [plain_size(n) for n in x.sizes]
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
    return plain_size(found)


def evaluate_flatten(call: Call) -> Value:
    x = call.data(0)
    axis = call.attrs.get("axis", 1)
    axis = axis + x.rank if axis < 0 else axis
    return call.reshape(x, [plain_size(product_of_sizes(x.sizes[:axis])), plain_size(product_of_sizes(x.sizes[axis:]))])


def evaluate_squeeze(call: Call) -> Value:
    x = call.data(0)
    axes = call.integers(1, "axes")
    if axes is None:
        axes = [i for i, n in enumerate(x.dims) if n == 1]
    axes = normalize_axes(axes, x.rank)
    if any(x.sizes[i] != 1 for i in axes):
        raise NotEvaluated("Squeeze of an axis that is not 1")
    return call.reshape(x, [plain_size(n) for i, n in enumerate(x.sizes) if i not in axes])


def evaluate_unsqueeze(call: Call) -> Value:
    x = call.data(0)
    axes = call.integers(1, "axes") or []
    rank = x.rank + len(axes)
    ones = normalize_axes(axes, rank)
    if len(ones) != len(axes):
        raise NotEvaluated("Unsqueeze of one axis twice")
    kept = iter(x.sizes)
    return call.reshape(x, [1 if i in ones else plain_size(next(kept)) for i in range(rank)])


def evaluate_transpose(call: Call) -> Value:
    x = call.data(0)
    return call.transpose(x, call.attrs.get("perm") or range(x.rank)[::-1])


def evaluate_expand(call: Call) -> Value:
    return call.expand(call.data(0), _sizes_from(call, 1, "shape") or [])


def evaluate_concat(call: Call) -> Value:
    return call.concat([call.data(i) for i in range(len(call.inputs))], call.attrs.get("axis", 1))


def evaluate_gather(call: Call) -> Value:
    """Pick rows. Rows that an input picks are Σ_r e_r(index)·row_r with an unknown function e_r for each row.

    An equality that holds for all functions e also holds for the functions that are 1 at r and 0 elsewhere.
    """
    x, index = call.data(0), call.data(1)
    if index.stored is not None:
        return evaluate_move(call)[0]
    refuse_special(x)
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


def evaluate_gather_elements(call: Call) -> Value:
    x = call.data(0)
    index = call.numbers(1)
    assert index is not None
    axis = call.attrs.get("axis", 0) % x.rank
    grid = list(np.indices(index.shape))
    grid[axis] = index
    places = np.arange(1, x.size + 1).reshape(x.dims)
    return call.gather_places(x, places[tuple(grid)])


def evaluate_pad(call: Call) -> Any:
    mode = decode_text(call.attrs.get("mode", "constant"))
    if mode != "constant":
        return evaluate_reference_move(call)
    x = call.data(0)
    filler = call.numbers(2)
    if filler is None:
        filler = np.asarray(call.attrs.get("value", 0.0) if call.opset < 11 else 0.0, np.float64)
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
    if not filler.any():
        return call.gather_places(x, places)
    both = call.concat([call.reshape(x, (x.size,)), call.field.constant(filler.reshape(1))], 0)
    return replace(call.gather_places(both, np.where(places == 0, x.size + 1, places)), kind=x.kind)


def evaluate_scatter(call: Call) -> Any:
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


def evaluate_shape(call: Call) -> Value:
    sizes = call.data(0).sizes[call.attrs.get("start", 0) : call.attrs.get("end")]
    return call.field.constant(_as_integers(sizes).reshape(-1))


def _as_integers(sizes: Sequence[Size]) -> Array:
    plain = [plain_size(n) for n in sizes]
    if all(isinstance(n, int) for n in plain):
        return np.array(plain, np.int64)
    made = np.empty(len(plain), dtype=object)
    made[:] = plain
    return made


def evaluate_size(call: Call) -> Value:
    return call.field.constant(_as_integers([product_of_sizes(call.data(0).sizes)]).reshape(()))


def evaluate_constant_of_shape(call: Call) -> Value:
    shape = _sizes_from(call, 0, "") or []
    value = np.asarray(call.attrs.get("value", np.zeros(1, np.float32)))
    whole = [n for n in shape if isinstance(n, int)]
    if len(whole) == len(shape):
        return call.field.constant(np.full(whole, value.reshape(())))
    return call.expand(call.field.constant(value.reshape(())), shape)


def evaluate_range(call: Call) -> Value:
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


def evaluate_cumsum(call: Call) -> Value:
    x = call.data(0)
    refuse_special(x)
    if call.attrs.get("exclusive") or call.attrs.get("reverse"):
        raise NotEvaluated("CumSum with exclusive or reverse")
    axis = call.numbers(1)
    assert axis is not None
    place = int(axis.reshape(())) % x.rank
    if x.stored is not None and x.kind != "f":
        return call.field.constant(np.cumsum(x.stored, axis=place, dtype=x.stored.dtype))
    field = call.field
    made = field.arithmetic.reduce(np.cumsum(field.residues(x), axis=place + 1))
    return may_wrap(field.made(made, x.degree.plus(x.degree, max(x.dims[place], 1)), kind=x.kind), x)
