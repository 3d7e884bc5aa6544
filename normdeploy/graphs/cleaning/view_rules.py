"""Rules for views: Reshape, Flatten, Transpose, Slice and the Reshapes around a MatMul. No number is computed.

A view is a bijection of positions, so two views with the same sizes in row-major order are equal bit by bit, for every
type. Each rule therefore only has to show that the shape is unchanged, for dims of size 0 too.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from .node_matching import (
    bypass_node,
    constant_array,
    constant_integers,
    input_at,
    is_same_size,
    is_understood,
    replace_node,
    static_dims,
    understood_producer,
    write_reshape,
    write_transpose,
)

# A Slice whose end is at least this reaches the end of every axis.
_UNBOUNDED = 2**62


def write_static_reshape(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace a computed shape by the inferred one.

    Premise: at most one dim of the inferred shape is unknown, and no other dim is 0. The unknown dim is written as -1,
    because it is the number of elements divided by the nonzero product of the other dims.

    Returns: whether the graph changed.
    """
    computed = is_understood(node, "Reshape") and constant_array(node.inputs[1]) is None
    return computed and _write_inferred_shape(graph, node)


def _write_inferred_shape(graph: ir.Graph, node: ir.Node) -> bool:
    made = node.outputs[0].shape
    if made is None:
        return False
    dims = [dim if isinstance(dim, int) else -1 for dim in made]
    return dims.count(-1) < 2 and 0 not in dims and write_reshape(graph, node, dims)


def merge_reshapes(graph: ir.Graph, node: ir.Node) -> bool:
    """Let a Reshape with a single 0 in its shape read the input of the Reshape before it.

    Premise: the shape is constant and has no -1. Its one 0 copies a dim that the inferred output leaves unknown. The
    other dims are positive, so a -1 in place of the 0 gives the same size: the number of elements divided by the
    product of the other dims. `movement_rules` merges Reshapes whose shape contains no 0.

    Returns: whether the graph changed.
    """
    if not is_understood(node, "Reshape") or understood_producer(node.inputs[0], "Reshape") is None:
        return False
    wanted = constant_integers(node.inputs[1])
    made = node.outputs[0].shape
    if wanted is None or made is None or len(made) != len(wanted) or (node.attributes.get_int("allowzero") or 0) != 0:
        return False
    if 0 not in wanted:
        return False
    sizes = [dim if n == 0 and isinstance(dim, int) else n for n, dim in zip(wanted, made, strict=True)]
    # A dim of size 0 keeps its 0 here. The shape is refused unless this is its only 0 and it has no -1.
    if sizes.count(0) > 1 or (0 in sizes and -1 in sizes):
        return False
    return write_reshape(graph, node, [n or -1 for n in sizes])


def drop_reshape_of_squeeze(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace Reshape(Squeeze(x), [-1]) by x if x has one axis, because the elements are already in one row.

    Returns: whether the graph changed.
    """
    if not is_understood(node, "Reshape") or constant_integers(node.inputs[1]) != [-1]:
        return False
    squeeze = understood_producer(node.inputs[0], "Squeeze")
    if squeeze is None:
        return False
    x = squeeze.inputs[0]
    return x is not None and x.shape is not None and len(x.shape) == 1 and bypass_node(graph, node, x)


def write_flatten_as_reshape(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace a Flatten by a Reshape, which other rules can merge with neighboring Reshapes.

    Premise: at least one of the output's two dims is known and positive. An unknown dim is written as -1, which is
    correct even if the tensor has no elements.

    Returns: whether the graph changed.
    """
    return is_understood(node, "Flatten") and _write_inferred_shape(graph, node)


def drop_reshapes_of_matmul(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace Reshape(MatMul(Reshape(a), [Reshape](b))) by MatMul(a, b) if the Reshapes only merge leading axes.

    Premise: all shapes are static and positive, in one of two forms:

    - Linear: a is [*L, K] and becomes [prod L, K], b is [K, N], the result is [*L, N]. Each row of the result is one
      row of a times b.
    - Batched: a is [*L, M, K] and becomes [prod L, M, K], b is [*L, K, N] and becomes [prod L, K, N], the result is
      [*L, M, N]. Product i of the merged axis is product i of the leading axes.

    Either way the same numbers form the same dot products.

    Returns: whether the graph changed.
    """
    if not is_understood(node, "Reshape"):
        return False
    matmul = understood_producer(node.inputs[0], "MatMul")
    if matmul is None or matmul.inputs[1] is None:
        return False
    first = understood_producer(matmul.inputs[0], "Reshape")
    result = static_dims(node.outputs[0])
    if first is None or result is None or first.inputs[0] is None:
        return False
    second = understood_producer(matmul.inputs[1], "Reshape")
    a = static_dims(first.inputs[0])
    rows = static_dims(matmul.inputs[0])
    columns = static_dims(matmul.inputs[1])
    if a is None or rows is None or columns is None or 0 in a or 0 in result:
        return False
    lead = math.prod(a[:-1])
    if len(a) > 1 and rows == [lead, a[-1]] and len(columns) == 2 and result == [*a[:-1], columns[1]]:
        return replace_node(graph, node, ir.node("MatMul", [first.inputs[0], matmul.inputs[1]]))
    if second is None:
        b = None
    else:
        b = static_dims(second.inputs[0])
    if second is None or b is None or len(a) < 3 or len(a) != len(b) or a[:-2] != b[:-2]:
        return False
    lead = math.prod(a[:-2])
    if rows == [lead, *a[-2:]] and columns == [lead, *b[-2:]] and result == [*a[:-1], b[-1]]:
        return replace_node(graph, node, ir.node("MatMul", [first.inputs[0], second.inputs[0]]))
    return False


def merge_transposes(graph: ir.Graph, node: ir.Node) -> bool:
    """Compose two Transposes, or drop a Transpose that keeps the order. Premise: the attribute ``perm`` is present.

    Returns: whether the graph changed.
    """
    if not is_understood(node, "Transpose"):
        return False
    order = list(node.attributes.get_ints("perm", ()))
    x = node.inputs[0]
    inner = understood_producer(x, "Transpose")
    if inner is None:
        before = []
    else:
        before = list(inner.attributes.get_ints("perm", ()))
    if not order or x is None:
        return False
    if inner is not None and len(before) == len(order):
        order = [before[axis] for axis in order]
        x = inner.inputs[0]
    elif order != sorted(order):
        return False
    return write_transpose(graph, node, x, order)


def _have_same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Return whether both tensors are known to have the same shape."""
    if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        return False
    return all(is_same_size(p, q) for p, q in zip(a.shape, b.shape, strict=True))


def drop_full_slice(graph: ir.Graph, node: ir.Node) -> bool:
    """Drop a Slice that takes all elements of its input.

    Premise: the steps are constant and 1, so a Slice takes a range of each axis. A range is the whole axis if it starts
    at 0 and ends at the size or beyond. If starts or ends are computed, the output must have the input's shape.

    Returns: whether the graph changed.
    """
    if not is_understood(node, "Slice"):
        return False
    starts, ends, axes, steps = (constant_integers(input_at(node, index)) for index in (1, 2, 3, 4))
    if input_at(node, 4) is not None and (steps is None or any(step != 1 for step in steps)):
        return False
    data = node.inputs[0]
    made = node.outputs[0]
    assert data is not None
    computed = starts is None and ends is None
    if computed and _have_same_shape(data, made):
        return bypass_node(graph, node, data)
    if starts is None or ends is None or (input_at(node, 3) is not None and axes is None):
        return False
    if axes is None:
        axes = list(range(len(starts)))
    if any(starts) or not len(starts) == len(ends) == len(axes):
        return False
    for axis, end in zip(axes, ends, strict=True):
        if data.shape is None:
            size = None
        else:
            size = data.shape[axis]
        if end < _UNBOUNDED and not (isinstance(size, int) and end >= size):
            return False
    return bypass_node(graph, node, data)
