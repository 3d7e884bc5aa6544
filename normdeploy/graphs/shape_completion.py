"""Complete shapes that onnx's inference does not find, such as after a Reshape with a computed operand.

Operands and shapes are computed for all sizes at once, as polynomials of the open dims (`integer_ops`). The shapes of
later nodes follow from these shapes. Every result holds at every size. A dim stays unknown if it depends on Min, Max,
Mod or the remainder of a division, or if a Slice may truncate it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import numpy_helper

from ..storage.onnx_domains import is_standard
from . import integer_ops
from .dims import Dims, dim_size, is_invented_name
from .graph import Graph
from .symbolic_sizes import ONE, UNKNOWN, NoPolynomial, Size, product_of_sizes

# Maximum number of elements of an integer tensor that is tracked.
_OPERAND = 64
# End of a Slice that means "to the end of the axis". Exporters write this number or the largest int64.
_END = 2**31 - 1
_FAILURES = (NoPolynomial, ValueError, TypeError, IndexError, KeyError, AttributeError, ArithmeticError)

Shape = list["Size | None"]


class ShapedGraph(Graph):
    """Graph that computes all missing shapes when the first missing shape is needed."""

    _worked_out = False

    def _work_out_shapes(self) -> None:
        if not self._worked_out:
            self._worked_out = True
            integer_values(self)


def integer_values(graph: Graph) -> Mapping[int, np.ndarray]:
    """Compute integer tensors from sizes, and record in ``graph`` the shapes that follow from these tensors.

    Nodes are visited in topological order, so that one shape leads to the next.

    Returns: Id of a tensor → its value, for tensors computed from sizes. A value is an array of integers and `Size`.
    """
    known: dict[int, np.ndarray] = {}
    for node in graph.nodes:
        if not is_standard(node):
            continue
        _compute_integers(graph, node, known)
        unknown = [o for o in node.outputs if not o.is_empty() and _has_unknown_dims(graph.shape(o))]
        if not unknown:
            continue
        for output, (kind, dims) in _infer_node(graph, node).items():
            if dims is not None and any(o.name == output for o in unknown):
                told = next(o for o in unknown if o.name == output)
                graph.record_type(told, kind, refine_dims(graph, node, graph.shape(told), dims))
        for output in unknown:
            if _has_unknown_dims(graph.shape(output)) and node.op in _SHAPES:
                shape = _output_dims(graph, node, output, known)
                if shape is not None:
                    graph.record_type(output, None, refine_dims(graph, node, graph.shape(output), shape))
    return known


def _has_unknown_dims(dims: Dims | None) -> bool:
    return dims is None or any(d is None or is_invented_name(d) for d in dims)


def refine_dims(graph: Graph, node: gs.Node, old: Dims | None, new: Dims) -> Dims:
    """Combine two shapes of a node's output.

    Each dim comes from ``new`` if it is a size or an informative name there, else from ``old``. A name that inference
    invented is not informative, unless an input of the node has the same name: then the two dims are equal.

    Returns: dims; ``new`` if ``old`` is unknown or has another rank.
    """
    if old is None or len(old) != len(new):
        return new
    passed = {d for t in node.inputs if not t.is_empty() for d in graph.shape(t) or ()}
    return tuple(
        b if b is not None and (b in passed or not is_invented_name(b)) else a for a, b in zip(old, new, strict=True)
    )


def _infer_node(graph: Graph, node: gs.Node) -> dict[str, tuple[int, Dims | None]]:
    """Run onnx's inference on one node, with everything that is known about its inputs so far."""
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for t in node.inputs:
        if t.is_empty():
            continue
        dims = graph.shape(t)
        dtype = graph.dtype(t)
        if dims is None or dtype is None:
            return {}
        types[t.name] = onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(dtype), dims)
        if dtype.kind == "i" and _is_small(dims):
            value = graph.known_value(t)
        else:
            value = None
        if value is not None:
            data[t.name] = numpy_helper.from_array(np.asarray(value, dtype=dtype), t.name)
    try:
        schema = onnx.defs.get_schema(node.op, graph.opset)
        results = onnx.shape_inference.infer_node_outputs(
            schema, graph.node_proto(node), types, data, opset_imports=list(graph.proto.opset_import)
        )
    except Exception:
        # onnx's inference refuses nodes that it can't follow.
        return {}
    return {name: (t.tensor_type.elem_type, _type_dims(t)) for name, t in results.items() if t.HasField("tensor_type")}


def _is_small(dims: Dims) -> bool:
    sizes = [d for d in dims if isinstance(d, int)]
    return len(sizes) == len(dims) and math.prod(sizes) <= _OPERAND


def _type_dims(kind: onnx.TypeProto) -> Dims | None:
    if not kind.tensor_type.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in kind.tensor_type.shape.dim)


# ------------------------------------------------------------------ whole numbers


def _compute_integers(graph: Graph, node: gs.Node, known: dict[int, np.ndarray]) -> None:
    """Add to ``known`` the values that a node computes from sizes, by the ids of the outputs.

    Nothing is added if a value is not a polynomial of the sizes.
    """
    if node.op in ("Shape", "Size"):
        shape = symbolic_shape(graph, node.inputs[0])
        if shape is None:
            return
        attrs = graph.attrs(node)
        try:
            if node.op == "Shape":
                sizes = shape[attrs.get("start", 0) : attrs.get("end")]
            else:
                sizes = [product_of_sizes(shape)]
        except OverflowError:
            return
        made = np.empty(len(sizes), dtype=object)
        made[:] = sizes
        known[id(node.outputs[0])] = made if node.op == "Shape" else made.reshape(())
        return
    if not any(id(t) in known for t in node.inputs):
        return
    inputs = [None if t.is_empty() else _integer_operand(graph, t, known) for t in node.inputs]
    if any(a is None and not t.is_empty() for a, t in zip(inputs, node.inputs, strict=True)):
        return
    if node.op == "Cast":
        kind = graph.dtype(node.outputs[0])
        if kind is not None and kind.name in ("int64", "int32"):
            known[id(node.outputs[0])] = inputs[0]  # type: ignore[assignment]
        return
    try:
        numbers = integer_ops.apply_integer_op(node.op, inputs, graph.attrs(node), graph.opset, len(node.outputs))
    except _FAILURES:
        return
    for output, value in zip(node.outputs, numbers, strict=False):
        if integer_ops.is_integer_value(value) and value is not None and value.size <= _OPERAND:
            known[id(output)] = value


def _integer_operand(graph: Graph, t: gs.Tensor, known: Mapping[int, np.ndarray]) -> np.ndarray | None:
    if id(t) in known:
        return known[id(t)]
    dtype = graph.dtype(t)
    dims = graph.shape(t)
    if dtype is None or dtype.kind not in "iub" or dims is None or not _is_small(dims):
        return None
    value = graph.known_value(t)
    if value is None:
        return None
    return np.asarray(value).astype(dtype)


def _constant_integers(operand: np.ndarray | None) -> list[int] | None:
    """Return the operand as integers; None if it depends on a size."""
    if operand is None:
        return None
    numbers = [n.constant_value if isinstance(n, Size) else int(n) for n in operand.reshape(-1).tolist()]
    return None if any(n is None for n in numbers) else numbers  # type: ignore[return-value]


# ------------------------------------------------------------------ shapes


def symbolic_shape(graph: Graph, t: gs.Tensor) -> list[Size] | None:
    """Convert the shape of ``t`` to polynomials.

    Returns: one size per dim, with a unique symbol for an unknown dim; None if the rank is unknown.
    """
    dims = graph.shape(t)
    if dims is None:
        return None
    return [dim_size(d, f"{t.name}:{i}") for i, d in enumerate(dims)]


def _output_dims(graph: Graph, node: gs.Node, output: gs.Tensor, known: Mapping[int, np.ndarray]) -> Dims | None:
    if node.op == "Concat":
        data = [t for t in node.inputs if not t.is_empty()]
    else:
        data = node.inputs[:1]
    shapes = [symbolic_shape(graph, t) for t in data]
    if any(s is None for s in shapes):
        return None
    operands = [None if t.is_empty() else _integer_operand(graph, t, known) for t in node.inputs]
    missing = any(a is None and not t.is_empty() for a, t in zip(operands[1:], node.inputs[1:], strict=True))
    if missing and node.op not in ("Concat", "Gather"):
        return None
    try:
        if node.op == "Gather":
            indices = symbolic_shape(graph, node.inputs[1])
            shape = None if indices is None else _gather_shape(shapes[0], indices, graph.attrs(node))  # type: ignore[arg-type]
        else:
            shape = _SHAPES[node.op](shapes, operands, graph.attrs(node), node.outputs.index(output))
    except _FAILURES:
        return None
    if shape is None:
        return None
    return tuple(_dim_from_size(n) for n in shape)


def _dim_from_size(size: Size | None) -> int | str | None:
    """Convert a size to a number or an expression of the file's symbols; None if it depends on other symbols."""
    if size is None or size.constant_value is not None:
        if size is None:
            return None
        return size.constant_value
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


def _reshape_shape(shapes: Shapes, operands: Inputs, attrs: Mapping[str, Any], at: int) -> Shape | None:
    (old, *_), target = shapes, operands[1]
    if target is None:
        return None
    asked = [Size.from_int(n) for n in target.reshape(-1).tolist()]
    copied = [old[i] if n == 0 and not attrs.get("allowzero", 0) else n for i, n in enumerate(asked)]
    if -1 not in [n.constant_value for n in copied]:
        if all(n.is_positive for n in copied):
            return copied
        return None
    gap = next(i for i, n in enumerate(copied) if n.constant_value == -1)
    rest = [n for i, n in enumerate(copied) if i != gap]
    over = list(old)
    if not all(n.is_positive for n in rest):
        return None
    # Cancel common factors first, because a sum of terms can only be divided by an equal sum.
    for n in list(rest):
        if n in over:
            over.remove(n)
            rest.remove(n)
    return [*copied[:gap], product_of_sizes(over).divide_exactly(product_of_sizes(rest)), *copied[gap + 1 :]]


def _expand_shape(shapes: Shapes, operands: Inputs, attrs: Mapping[str, Any], at: int) -> Shape | None:
    (old, *_), target = shapes, operands[1]
    if target is None:
        return None
    asked = [Size.from_int(n) for n in target.reshape(-1).tolist()]
    rank = max(len(old), len(asked))
    pairs = zip([ONE] * (rank - len(old)) + old, [ONE] * (rank - len(asked)) + asked, strict=True)
    return [_broadcast_size(a, b) for a, b in pairs]


def _broadcast_size(a: Size, b: Size) -> Size | None:
    if a == b or b == ONE:
        return a
    if a == ONE:
        return b
    # If one size is a number above 1, the other size must be 1 or the same number, so the number is the result.
    return next((n for n in (a, b) if n.constant_value is not None and n.constant_value > 1), None)


def _tile_shape(shapes: Shapes, operands: Inputs, attrs: Mapping[str, Any], at: int) -> Shape | None:
    assert operands[1] is not None
    return [n * r for n, r in zip(shapes[0], operands[1].reshape(-1).tolist(), strict=True)]


def _pad_shape(shapes: Shapes, operands: Inputs, attrs: Mapping[str, Any], at: int) -> Shape | None:
    if len(operands) < 2 or operands[1] is None:
        return None
    pads = operands[1].reshape(-1).tolist()
    rank = len(shapes[0])
    if len(operands) > 3 and operands[3] is not None:
        axes = _constant_integers(operands[3])
    else:
        axes = list(range(rank))
    if axes is None or len(pads) != 2 * len(axes):
        return None
    shape = list(shapes[0])
    for i, axis in enumerate(axes):
        shape[axis] = Size.from_int(shape[axis] + pads[i] + pads[i + len(axes)])
    return [n if n.is_nonnegative else None for n in shape]


def _concat_shape(shapes: Shapes, operands: Inputs, attrs: Mapping[str, Any], at: int) -> Shape | None:
    axis = attrs["axis"]
    ranks = {len(s) for s in shapes}
    if len(ranks) != 1:
        return None
    axis %= ranks.pop()
    shape: Shape = [
        next((s[i] for s in shapes if s[i].constant_value is not None), shapes[0][i]) for i in range(len(shapes[0]))
    ]
    total = Size.from_int(0)
    for s in shapes:
        total = total + s[axis]
    shape[axis] = total
    return shape


def _gather_shape(data: list[Size], indices: list[Size], attrs: Mapping[str, Any]) -> Shape:
    axis = attrs.get("axis", 0) % len(data)
    return [*data[:axis], *indices, *data[axis + 1 :]]


def _slice_shape(shapes: Shapes, operands: Inputs, attrs: Mapping[str, Any], at: int) -> Shape | None:
    if len(operands) < 3 or operands[1] is None or operands[2] is None:
        return None
    starts, ends = (o.reshape(-1).tolist() for o in (operands[1], operands[2]))
    given = [_constant_integers(operands[i]) if len(operands) > i and operands[i] is not None else None for i in (3, 4)]
    if given[0] is not None:
        axes = given[0]
    else:
        axes = list(range(len(starts)))
    if given[1] is not None:
        steps = given[1]
    else:
        steps = [1] * len(starts)
    if any(len(operands) > i and operands[i] is not None and given[i - 3] is None for i in (3, 4)):
        return None
    shape: Shape = list(shapes[0])
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        shape[axis] = _sliced_size(shapes[0][axis], Size.from_int(start), Size.from_int(end), step)
    return shape


def _sliced_size(size: Size, start: Size, end: Size, step: int) -> Size | None:
    """Compute the size of an axis after a Slice; None if no single polynomial gives it for all sizes."""
    numbers = [n.constant_value for n in (size, start, end)]
    if all(n is not None for n in numbers):
        n, first, last = (int(v) for v in numbers if v is not None)
        return Size.from_int(len(range(n)[first:last:step]))
    if step != 1:
        if step == -1 and _is_last_place(size, start) and (numbers[2] is not None and numbers[2] <= -_END):
            return size
        return None
    bounds = []
    for bound, number in ((start, numbers[1]), (end, numbers[2])):
        if number is not None and number >= _END:
            at = size
        elif number is not None and number < 0:
            at = size + bound
        else:
            at = bound
        if not at.is_nonnegative or not (size - at).is_nonnegative:
            return None
        bounds.append(at)
    left = bounds[1] - bounds[0]
    if left.is_nonnegative:
        return left
    return None


def _is_last_place(size: Size, start: Size) -> bool:
    number = start.constant_value
    return number == -1 or (number is not None and number >= _END) or start in (size, size - 1)


def _flatten_shape(shapes: Shapes, operands: Inputs, attrs: Mapping[str, Any], at: int) -> Shape | None:
    axis = attrs.get("axis", 1)
    if axis < 0:
        axis = axis + len(shapes[0])
    return [product_of_sizes(shapes[0][:axis]), product_of_sizes(shapes[0][axis:])]


def _split_shape(shapes: Shapes, operands: Inputs, attrs: Mapping[str, Any], at: int) -> Shape | None:
    if len(operands) < 2 or operands[1] is None:
        return None
    axis = attrs.get("axis", 0) % len(shapes[0])
    return [*shapes[0][:axis], Size.from_int(operands[1].reshape(-1).tolist()[at]), *shapes[0][axis + 1 :]]


_SHAPES: dict[str, Callable[..., Shape | None]] = {
    "Reshape": _reshape_shape,
    "Expand": _expand_shape,
    "Tile": _tile_shape,
    "Pad": _pad_shape,
    "Concat": _concat_shape,
    "Gather": _gather_shape,
    "Slice": _slice_shape,
    "Flatten": _flatten_shape,
    "Split": _split_shape,
}
