"""Remove moves of elements. Each element is computed as before, so results are equal bit by bit.

- Packed attention (``torch.nn.MultiheadAttention``) stacks query, key and value on an axis of three. Unsqueeze,
  Transpose and Squeeze bring this axis to the front, and Gather takes it apart.
- A Reshape of a Reshape is one Reshape.
- A linear layer exported as Gemm works on rows: the Reshape before it merges the leading axes to rows, and the Reshape
  after it restores these axes. If all nodes between two such layers are elementwise (a GELU, decomposed or not), the
  two Reshapes between them are dropped.
- A Pad whose counts are all 0 is a copy. Swin pads each image to a multiple of seven even if its size already is a
  multiple.
- Consecutive Unsqueezes are one Unsqueeze.
- A GatherElements of constants is a constant. onnx's evaluator (1.23) can't compute a GatherElements.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from .node_matching import (
    Rule,
    bypass_node,
    constant_array,
    constant_integers,
    input_at,
    int64_constant,
    producer_of_op,
    replace_node,
    write_transpose,
)

# Elementwise functions, which are allowed between two Reshapes that cancel.
_EACH = frozenset(
    {
        *(
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Pow",
            "Neg",
            "Abs",
            "Sqrt",
            "Reciprocal",
            "Exp",
            "Log",
            "Tanh",
            "Erf",
            "Sigmoid",
            "Gelu",
            "Relu",
        ),
        *(
            "LeakyRelu",
            "Elu",
            "Selu",
            "Celu",
            "HardSigmoid",
            "HardSwish",
            "Mish",
            "Softplus",
            "Softsign",
            "ThresholdedRelu",
            "Clip",
            "Max",
            "Min",
        ),
    }
)
# Maximum number of elementwise nodes between two Reshapes that cancel.
_LONGEST = 64
# Maximum number of elements of a folded GatherElements.
_MOST = 2**20


class DataMovementPass(ir.passes.InPlacePass):
    """Pass that removes moves of elements from the main graph, by one step per op.

    The steps cover unit axes, Transposes, Reshapes, Pads, consecutive Unsqueezes, and selections from constant tables.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Apply each op's step to all its nodes in the main graph.

        Returns: the model, changed in place, and whether it changed.
        """
        modified = False
        for op, step in _STEPS.items():
            for node in model.graph:
                if node.domain == "" and node.op_type == op:
                    modified |= step(model.graph, node)
        return ir.passes.PassResult(model, modified)


def _drop_empty_pad(graph: ir.Graph, pad: ir.Node) -> bool:
    """Drop a Pad whose counts are all 0, for every mode, axes and pad value."""
    # Below opset 11, the counts are an attribute, not an input.
    stated = pad.attributes.get_ints("pads", ())
    pads = input_at(pad, 1)
    if pads is not None:
        stated = constant_integers(pads) or ()
    return bool(stated) and not any(stated) and bypass_node(graph, pad, pad.inputs[0])


def _drop_unit_axes(graph: ir.Graph, squeeze: ir.Node) -> bool:
    """Replace Unsqueeze, Transpose and Squeeze of the same unit axes by one Transpose."""
    transpose = producer_of_op(squeeze.inputs[0], "Transpose")
    unsqueeze = producer_of_op((transpose or squeeze).inputs[0], "Unsqueeze")
    if unsqueeze is None or unsqueeze.outputs[0].shape is None:
        return False
    if not all(_is_used_once(n.outputs[0]) for n in (transpose, unsqueeze) if n is not None):
        return False
    rank = len(unsqueeze.outputs[0].shape)
    perm = list(range(rank)) if transpose is None else _permutation_of(transpose)
    put = _constant_axes(unsqueeze, rank)
    taken = _constant_axes(squeeze, rank)
    if perm is None or put is None or taken is None or {perm[axis] for axis in taken} != put:
        return False
    order = _permutation_without(perm, taken)
    return write_transpose(graph, squeeze, unsqueeze.inputs[0], order)


def _select_before_transpose(graph: ir.Graph, transpose: ir.Node) -> bool:
    """Let Gathers read the input of a Transpose.

    Each reader of the Transpose must be a Gather that takes one index of an axis. The remaining axes must have their
    original order.
    """
    perm = _permutation_of(transpose)
    y = transpose.outputs[0]
    uses = list(y.uses())
    if perm is None or not uses or y.is_graph_output() or any(node.graph is not graph for node, _ in uses):
        return False
    axes = [_selected_axis(node, len(perm)) if index == 0 else None for node, index in uses]
    if any(axis is None or _permutation_without(perm, {axis}) != list(range(len(perm) - 1)) for axis in axes):
        return False
    for (node, _), axis in zip(uses, axes, strict=True):
        assert axis is not None
        replace_node(graph, node, ir.node("Gather", [transpose.inputs[0], node.inputs[1]], {"axis": perm[axis]}))
    return True


def _merge_unsqueezes(graph: ir.Graph, second: ir.Node) -> bool:
    """Merge an Unsqueeze with the Unsqueeze before it."""
    first = producer_of_op(second.inputs[0], "Unsqueeze")
    if first is None:
        return False
    then, before = (constant_integers(input_at(node, 1)) for node in (second, first))
    # Negative axes are left alone.
    if not then or not before or min(*then, *before) < 0:
        return False
    # Positions that the first Unsqueeze's output axes take in the result of the second.
    free = (place for place in itertools.count() if place not in then)
    places = list(itertools.islice(free, max(before) + 1))
    axes = int64_constant(sorted({*then, *(places[axis] for axis in before)}))
    return replace_node(graph, second, axes, ir.node("Unsqueeze", [first.inputs[0], axes.outputs[0]]))


def _simplify_reshape(graph: ir.Graph, node: ir.Node) -> bool:
    past = _merge_reshapes(node)
    return _drop_reshape_pair(graph, node) or past


def _merge_reshapes(outer: ir.Node) -> bool:
    """Let a Reshape read the input of the Reshape before it.

    A 0 in the shape copies a dim of the intermediate tensor, so the shape must be a constant without 0 or set
    allowzero.
    """
    sizes = constant_integers(outer.inputs[1])
    if outer.attributes.get_int("allowzero", 0) != 1 and (sizes is None or 0 in sizes):
        return False
    modified = False
    while (inner := producer_of_op(outer.inputs[0], "Reshape")) is not None:
        outer.replace_input_with(0, inner.inputs[0])
        modified = True
    return modified


def _drop_reshape_pair(graph: ir.Graph, back: ir.Node) -> bool:
    """Drop the first Reshape of Reshape, elementwise functions, Reshape.

    The second Reshape is dropped too if its result has the shape of the first Reshape's input.
    """
    between, y = _nodes_between_reshapes(graph, back)
    if y is None:
        there = None
    else:
        there = y.producer()
    if y is None or there is None:
        return False
    x = there.inputs[0]
    wanted = constant_integers(back.inputs[1])
    if x is None or x.shape is None or wanted is None or 0 in wanted:
        return False
    for node in between:
        for i, value in enumerate(node.inputs):
            if value is y:
                node.replace_input_with(i, x)
        node.outputs[0].shape = x.shape.copy()
    result = back.outputs[0]
    if _has_shape(x, wanted) and not result.is_graph_output():
        inner = back.inputs[0]
        assert inner is not None
        result.replace_all_uses_with(inner)
    return True


def _nodes_between_reshapes(graph: ir.Graph, back: ir.Node) -> tuple[list[ir.Node], ir.Value | None]:
    """Find the elementwise nodes between the Reshape ``back`` and the single Reshape at which they begin.

    Returns: the nodes, and the first Reshape's result; ([], None) if any other node reads one of these values.
    """
    between: dict[ir.Node, None] = {}
    begins: set[ir.Value] = set()
    stack = [back.inputs[0]]
    while stack:
        value = stack.pop()
        if value is None:
            made = None
        else:
            made = value.producer()
        if value is None or made is None or made.domain != "" or made.graph is not graph or value.is_graph_output():
            return [], None
        if made.op_type == "Reshape":
            begins.add(value)
            continue
        if made in between:
            continue
        if made.op_type not in _EACH or len(between) == _LONGEST or value.dtype is None:
            return [], None
        between[made] = None
        stack += [v for v in made.inputs if v is not None and not _is_single_element(v)]
    if len(begins) != 1 or not between:
        return [], None
    inside = {*between, back}
    (begin,) = begins
    values = [begin, *(node.outputs[0] for node in between)]
    if any(user not in inside for v in values for user, _ in v.uses()):
        return [], None
    return list(between), begin


def _is_single_element(value: ir.Value) -> bool:
    constant = ir.convenience.get_const_tensor(value)
    return constant is not None and len(constant.shape) == 0


def _has_shape(x: ir.Value, wanted: Sequence[int]) -> bool:
    """Return whether a Reshape of ``x`` to ``wanted`` keeps its shape.

    ``wanted`` contains no 0; a -1 matches any size, because the other dims determine this size.
    """
    assert x.shape is not None
    return len(x.shape) == len(wanted) and all(n in (-1, d) for n, d in zip(wanted, x.shape, strict=True))


def _fold_gather_elements(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace a GatherElements of constants by a Constant."""
    data, index = (constant_array(value) for value in node.inputs)
    if data is None or index is None or index.size > min(_MOST, data.size):
        return False
    axis = node.attributes.get_int("axis", 0)
    if index.ndim != data.ndim or not -data.ndim <= axis < data.ndim:
        return False
    axis %= data.ndim
    if any(n > m for i, (n, m) in enumerate(zip(index.shape, data.shape, strict=True)) if i != axis):
        return False
    rows = data[tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(index.shape))]
    if index.size and not (-data.shape[axis] <= index.min() and index.max() < data.shape[axis]):
        return False
    made = ir.node("Constant", [], {"value": ir.tensor(np.take_along_axis(rows, index, axis))})
    return replace_node(graph, node, made)


def _selected_axis(node: ir.Node, rank: int) -> int | None:
    """Return the axis of which a Gather takes one index; None for any other node."""
    if node.op_type != "Gather" or node.domain != "":
        return None
    index = constant_array(node.inputs[1])
    if index is None or index.ndim:
        return None
    axis = node.attributes.get_int("axis", 0)
    if -rank <= axis < rank:
        return axis % rank
    return None


def _is_used_once(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def _permutation_of(transpose: ir.Node) -> list[int] | None:
    perm = transpose.attributes.get_ints("perm", ())
    if perm:
        return list(perm)
    return None


def _constant_axes(node: ir.Node, rank: int) -> set[int] | None:
    """Return the axes of an Unsqueeze or Squeeze as numbers from 0 to ``rank`` - 1; None if they are not constant."""
    axes = constant_integers(input_at(node, 1))
    if axes is None:
        return None
    return {axis % rank for axis in axes}


def _permutation_without(perm: Sequence[int], axes: set[int]) -> list[int]:
    """Return the permutation that remains after removing these axes of the result."""
    kept = [axis for i, axis in enumerate(perm) if i not in axes]
    order = sorted(kept)
    return [order.index(axis) for axis in kept]


_STEPS: dict[str, Rule] = {
    "Pad": _drop_empty_pad,
    "Squeeze": _drop_unit_axes,
    "Transpose": _select_before_transpose,
    "Unsqueeze": _merge_unsqueezes,
    "Reshape": _simplify_reshape,
    "GatherElements": _fold_gather_elements,
}
