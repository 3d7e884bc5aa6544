"""Shapes that onnx's inference does not find: those behind a Reshape, Expand or Slice whose operand is computed, and
what follows.

Operands are worked out for all sizes at once, as polynomials of the dims that the file leaves open (`whole_numbers`),
and so is the shape that the node makes of them. What is stated holds at every size: a dim that Min, Max, Mod or a rest
of a division decides stays unknown, and so does one that a Slice may cut short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import numpy_helper

from ..domains import is_standard
from . import whole_numbers
from .dims import Dims, dim_size, invented
from .graph import Graph
from .sizes import ONE, UNKNOWN, NoPolynomial, Size

_OPERAND = 64  # elements of whole numbers that may say something of a shape
_END = 2**31 - 1  # exporters write this, or the largest of int64, for "to the end"
_FAILURES = (NoPolynomial, ValueError, TypeError, IndexError, KeyError, AttributeError, ArithmeticError)

Shape = list["Size | None"]


class ShapedGraph(Graph):
    """A graph that also knows the shapes worked out here, from the first time that the file does not state one."""

    _worked_out = False

    def _work_out_shapes(self) -> None:
        if not self._worked_out:
            self._worked_out = True
            sizes_in(self)


def sizes_in(graph: Graph) -> Mapping[int, np.ndarray]:
    """Work out sizes and let ``graph`` know the shapes that can be found, in its own order, so that one leads to the
    next.

    Returns:
        what the graph computes of sizes, by the ids of the tensors: arrays of integers and `Size`.
    """
    known: dict[int, np.ndarray] = {}
    for node in graph.nodes:
        if not is_standard(node):
            continue
        _whole_numbers(graph, node, known)
        unknown = [o for o in node.outputs if not o.is_empty() and _open(graph.shape(o))]
        if not unknown:
            continue
        for output, (kind, dims) in _inferred(graph, node).items():
            if dims is not None and any(o.name == output for o in unknown):
                told = next(o for o in unknown if o.name == output)
                graph.learn(told, kind, _better(graph, node, graph.shape(told), dims))
        for output in unknown:
            if _open(graph.shape(output)) and node.op in _SHAPES:
                shape = _worked_out(graph, node, output, known)
                if shape is not None:
                    graph.learn(output, None, _better(graph, node, graph.shape(output), shape))
    return known


def _open(dims: Dims | None) -> bool:
    return dims is None or any(d is None or invented(d) for d in dims)


def _better(graph: Graph, node: gs.Node, old: Dims | None, new: Dims) -> Dims:
    """Each dim as ``new`` says it; where that says nothing, the name that inference made up: equal ones are equal
    sizes.

    A name that was made up before, for an input, says something: this dim is that one.
    """
    if old is None or len(old) != len(new):
        return new
    passed = {d for t in node.inputs if not t.is_empty() for d in graph.shape(t) or ()}
    return tuple(b if b is not None and (b in passed or not invented(b)) else a for a, b in zip(old, new, strict=True))


def _inferred(graph: Graph, node: gs.Node) -> dict[str, tuple[int, Dims | None]]:
    """What onnx says of one node, given what is known of its inputs by now."""
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for t in node.inputs:
        if t.is_empty():
            continue
        dims, dtype = graph.shape(t), graph.dtype(t)
        if dims is None or dtype is None:
            return {}
        types[t.name] = onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(dtype), dims)
        value = graph.known(t) if dtype.kind == "i" and _small(dims) else None
        if value is not None:
            data[t.name] = numpy_helper.from_array(np.asarray(value, dtype=dtype), t.name)
    try:
        schema = onnx.defs.get_schema(node.op, graph.opset)
        results = onnx.shape_inference.infer_node_outputs(
            schema, graph.node_proto(node), types, data, opset_imports=list(graph.proto.opset_import)
        )
    except Exception:  # it refuses what it can't follow
        return {}
    return {name: (t.tensor_type.elem_type, _dims(t)) for name, t in results.items() if t.HasField("tensor_type")}


def _small(dims: Dims) -> bool:
    sizes = [d for d in dims if isinstance(d, int)]
    return len(sizes) == len(dims) and math.prod(sizes) <= _OPERAND


def _dims(kind: onnx.TypeProto) -> Dims | None:
    if not kind.tensor_type.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in kind.tensor_type.shape.dim)


# ------------------------------------------------------------------ whole numbers


def _whole_numbers(graph: Graph, node: gs.Node, known: dict[int, np.ndarray]) -> None:
    """Let ``known`` hold what a node makes of sizes, by the ids of its outputs; nothing where that changes from size to
    size."""
    if node.op in ("Shape", "Size"):
        shape = shape_of(graph, node.inputs[0])
        if shape is None:
            return
        attrs = graph.attrs(node)
        try:
            sizes = shape[attrs.get("start", 0) : attrs.get("end")] if node.op == "Shape" else [_product(shape)]
        except OverflowError:
            return
        made = np.empty(len(sizes), dtype=object)
        made[:] = sizes
        known[id(node.outputs[0])] = made if node.op == "Shape" else made.reshape(())
        return
    if not any(id(t) in known for t in node.inputs):
        return
    inputs = [None if t.is_empty() else _operand(graph, t, known) for t in node.inputs]
    if any(a is None and not t.is_empty() for a, t in zip(inputs, node.inputs, strict=True)):
        return
    if node.op == "Cast":
        kind = graph.dtype(node.outputs[0])
        if kind is not None and kind.name in ("int64", "int32"):
            known[id(node.outputs[0])] = inputs[0]  # type: ignore[assignment]
        return
    try:
        numbers = whole_numbers.apply(node.op, inputs, graph.attrs(node), graph.opset, len(node.outputs))
    except _FAILURES:
        return
    for output, value in zip(node.outputs, numbers, strict=False):
        if whole_numbers.is_whole(value) and value is not None and value.size <= _OPERAND:
            known[id(output)] = value


def _operand(graph: Graph, t: gs.Tensor, known: Mapping[int, np.ndarray]) -> np.ndarray | None:
    if id(t) in known:
        return known[id(t)]
    dtype, dims = graph.dtype(t), graph.shape(t)
    if dtype is None or dtype.kind not in "iub" or dims is None or not _small(dims):
        return None
    value = graph.known(t)
    return None if value is None else np.asarray(value).astype(dtype)


def _numbers(operand: np.ndarray | None) -> list[int] | None:
    """The operand where it does not depend on a size."""
    if operand is None:
        return None
    numbers = [n.number if isinstance(n, Size) else int(n) for n in operand.reshape(-1).tolist()]
    return None if any(n is None for n in numbers) else numbers  # type: ignore[return-value]


# ------------------------------------------------------------------ shapes


def shape_of(graph: Graph, t: gs.Tensor) -> list[Size] | None:
    """Each dim as a polynomial; one of which nothing is known is a symbol of its own."""
    dims = graph.shape(t)
    return None if dims is None else [dim_size(d, f"{t.name}:{i}") for i, d in enumerate(dims)]


def _product(sizes: Sequence[Size]) -> Size:
    total = ONE
    for n in sizes:
        total = total * n
    return total


def _worked_out(graph: Graph, node: gs.Node, output: gs.Tensor, known: Mapping[int, np.ndarray]) -> Dims | None:
    data = [t for t in node.inputs if not t.is_empty()] if node.op == "Concat" else node.inputs[:1]
    shapes = [shape_of(graph, t) for t in data]
    if any(s is None for s in shapes):
        return None
    operands = [None if t.is_empty() else _operand(graph, t, known) for t in node.inputs]
    missing = any(a is None and not t.is_empty() for a, t in zip(operands[1:], node.inputs[1:], strict=True))
    if missing and node.op not in ("Concat", "Gather"):
        return None
    try:
        if node.op == "Gather":
            indices = shape_of(graph, node.inputs[1])
            shape = None if indices is None else _gathered(shapes[0], indices, graph.attrs(node))  # type: ignore[arg-type]
        else:
            shape = _SHAPES[node.op](shapes, operands, graph.attrs(node), node.outputs.index(output))
    except _FAILURES:
        return None
    return None if shape is None else tuple(_dim_of(n) for n in shape)


def _dim_of(size: Size | None) -> int | str | None:
    """A dim as a number or an expression of the file's symbols; None where it depends on others."""
    if size is None or size.number is not None:
        return None if size is None else size.number
    symbols = size.symbols()
    if any(s.startswith(UNKNOWN) for s in symbols):
        return None
    if size.terms == (((s := next(iter(symbols)),), 1),):
        return s
    if not all(s.isidentifier() for s in symbols) or any(c < 0 for _, c in size.terms):
        return None
    return " + ".join("*".join([str(c)] * (c != 1 or not m) + list(m)) for m, c in reversed(size.terms))


Inputs = list["np.ndarray | None"]
Shapes = list[Any]


def _reshaped(shapes: Shapes, operands: Inputs, attrs: Mapping[str, Any], at: int) -> Shape | None:
    (old, *_), target = shapes, operands[1]
    if target is None:
        return None
    asked = [Size.of(n) for n in target.reshape(-1).tolist()]
    copied = [old[i] if n == 0 and not attrs.get("allowzero", 0) else n for i, n in enumerate(asked)]
    if -1 not in [n.number for n in copied]:
        return copied if all(n.positive for n in copied) else None
    gap = next(i for i, n in enumerate(copied) if n.number == -1)
    rest, over = [n for i, n in enumerate(copied) if i != gap], list(old)
    if not all(n.positive for n in rest):
        return None
    for n in list(rest):  # what is on both sides, first: a sum divides nothing but itself
        if n in over:
            over.remove(n)
            rest.remove(n)
    return [*copied[:gap], _product(over).over(_product(rest)), *copied[gap + 1 :]]


def _expanded(shapes: Shapes, operands: Inputs, attrs: Mapping[str, Any], at: int) -> Shape | None:
    (old, *_), target = shapes, operands[1]
    if target is None:
        return None
    asked = [Size.of(n) for n in target.reshape(-1).tolist()]
    rank = max(len(old), len(asked))
    pairs = zip([ONE] * (rank - len(old)) + old, [ONE] * (rank - len(asked)) + asked, strict=True)
    return [_broadcast(a, b) for a, b in pairs]


def _broadcast(a: Size, b: Size) -> Size | None:
    if a == b or b == ONE:
        return a
    if a == ONE:
        return b
    return next((n for n in (a, b) if n.number is not None and n.number > 1), None)  # the other one is 1 or the same


def _tiled(shapes: Shapes, operands: Inputs, attrs: Mapping[str, Any], at: int) -> Shape | None:
    assert operands[1] is not None
    return [n * r for n, r in zip(shapes[0], operands[1].reshape(-1).tolist(), strict=True)]


def _padded(shapes: Shapes, operands: Inputs, attrs: Mapping[str, Any], at: int) -> Shape | None:
    if len(operands) < 2 or operands[1] is None:
        return None
    pads, rank = operands[1].reshape(-1).tolist(), len(shapes[0])
    axes = _numbers(operands[3]) if len(operands) > 3 and operands[3] is not None else list(range(rank))
    if axes is None or len(pads) != 2 * len(axes):
        return None
    shape = list(shapes[0])
    for i, axis in enumerate(axes):
        shape[axis] = Size.of(shape[axis] + pads[i] + pads[i + len(axes)])
    return [n if n.not_negative else None for n in shape]


def _joined(shapes: Shapes, operands: Inputs, attrs: Mapping[str, Any], at: int) -> Shape | None:
    axis, ranks = attrs["axis"], {len(s) for s in shapes}
    if len(ranks) != 1:
        return None
    axis %= ranks.pop()
    shape: Shape = [
        next((s[i] for s in shapes if s[i].number is not None), shapes[0][i]) for i in range(len(shapes[0]))
    ]
    total = Size.of(0)
    for s in shapes:
        total = total + s[axis]
    shape[axis] = total
    return shape


def _gathered(data: list[Size], indices: list[Size], attrs: Mapping[str, Any]) -> Shape:
    axis = attrs.get("axis", 0) % len(data)
    return [*data[:axis], *indices, *data[axis + 1 :]]


def _sliced(shapes: Shapes, operands: Inputs, attrs: Mapping[str, Any], at: int) -> Shape | None:
    if len(operands) < 3 or operands[1] is None or operands[2] is None:
        return None
    starts, ends = (o.reshape(-1).tolist() for o in (operands[1], operands[2]))
    given = [_numbers(operands[i]) if len(operands) > i and operands[i] is not None else None for i in (3, 4)]
    axes = given[0] if given[0] is not None else list(range(len(starts)))
    steps = given[1] if given[1] is not None else [1] * len(starts)
    if any(len(operands) > i and operands[i] is not None and given[i - 3] is None for i in (3, 4)):
        return None
    shape: Shape = list(shapes[0])
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        shape[axis] = _cut(shapes[0][axis], Size.of(start), Size.of(end), step)
    return shape


def _cut(size: Size, start: Size, end: Size, step: int) -> Size | None:
    """How many places a Slice leaves of an axis, where that is one polynomial at every size."""
    numbers = [n.number for n in (size, start, end)]
    if all(n is not None for n in numbers):
        n, first, last = (int(v) for v in numbers if v is not None)
        return Size.of(len(range(n)[first:last:step]))
    if step != 1:
        return (
            size if step == -1 and _is_last(size, start) and (numbers[2] is not None and numbers[2] <= -_END) else None
        )
    bounds = []
    for bound, number in ((start, numbers[1]), (end, numbers[2])):
        at = (
            size
            if number is not None and number >= _END
            else size + bound
            if number is not None and number < 0
            else bound
        )
        if not at.not_negative or not (size - at).not_negative:
            return None
        bounds.append(at)
    left = bounds[1] - bounds[0]
    return left if left.not_negative else None


def _is_last(size: Size, start: Size) -> bool:
    number = start.number
    return number == -1 or (number is not None and number >= _END) or start in (size, size - 1)


def _flattened(shapes: Shapes, operands: Inputs, attrs: Mapping[str, Any], at: int) -> Shape | None:
    axis = attrs.get("axis", 1)
    axis = axis + len(shapes[0]) if axis < 0 else axis
    return [_product(shapes[0][:axis]), _product(shapes[0][axis:])]


def _split(shapes: Shapes, operands: Inputs, attrs: Mapping[str, Any], at: int) -> Shape | None:
    if len(operands) < 2 or operands[1] is None:
        return None
    axis = attrs.get("axis", 0) % len(shapes[0])
    return [*shapes[0][:axis], Size.of(operands[1].reshape(-1).tolist()[at]), *shapes[0][axis + 1 :]]


_SHAPES: dict[str, Callable[..., Shape | None]] = {
    "Reshape": _reshaped,
    "Expand": _expanded,
    "Tile": _tiled,
    "Pad": _padded,
    "Concat": _joined,
    "Gather": _gathered,
    "Slice": _sliced,
    "Flatten": _flattened,
    "Split": _split,
}
