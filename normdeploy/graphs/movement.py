"""Axes of one place that are put in only to be moved and taken out again, and Transposes that a selection makes needless.

What packed attention leaves (``torch.nn.MultiheadAttention``): query, key and value as an axis of three places are brought to the front by
Unsqueeze, Transpose, Squeeze, and taken apart by Gather. Elements are moved and none is computed, so the results are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir


class Movement(ir.passes.InPlacePass):
    """Unsqueeze, Transpose, Squeeze of the same axes become one Transpose or nothing. A Transpose goes away where all its uses take single
    places and leave the rest in its old order. Of the main graph, in one walk."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in model.graph:
            if node.domain == "" and node.op_type == "Squeeze":
                modified |= _without_unit_axes(model.graph, node)
        for node in model.graph:
            if node.domain == "" and node.op_type == "Transpose":
                modified |= _selected_before(model.graph, node)
        return ir.passes.PassResult(model, modified)


def _without_unit_axes(graph: ir.Graph, squeeze: ir.Node) -> bool:
    transpose = _producer(squeeze, "Transpose")
    unsqueeze = _producer(transpose or squeeze, "Unsqueeze")
    if unsqueeze is None or unsqueeze.outputs[0].shape is None:
        return False
    if not all(_used_once(n.outputs[0]) for n in (transpose, unsqueeze) if n is not None):
        return False
    rank = len(unsqueeze.outputs[0].shape)
    perm = list(range(rank)) if transpose is None else _perm(transpose)
    put, taken = _axes(unsqueeze, rank), _axes(squeeze, rank)
    if perm is None or put is None or taken is None or {perm[axis] for axis in taken} != put:
        return False
    order, x = _without(perm, taken), unsqueeze.inputs[0]
    moved = ir.node("Identity", [x]) if order == sorted(order) else ir.node("Transpose", [x], {"perm": order})
    return _replaced(graph, squeeze, moved)


def _selected_before(graph: ir.Graph, transpose: ir.Node) -> bool:
    """Where each use takes one place of an axis, and what is left has its old order, it is taken of the tensor before."""
    perm, y = _perm(transpose), transpose.outputs[0]
    uses = list(y.uses())
    if perm is None or not uses or y.is_graph_output() or any(node.graph is not graph for node, _ in uses):
        return False
    axes = [_selected(node, len(perm)) if index == 0 else None for node, index in uses]
    if any(axis is None or _without(perm, {axis}) != list(range(len(perm) - 1)) for axis in axes):
        return False
    for (node, _), axis in zip(uses, axes, strict=True):
        assert axis is not None
        _replaced(graph, node, ir.node("Gather", [transpose.inputs[0], node.inputs[1]], {"axis": perm[axis]}))
    return True


def _selected(node: ir.Node, rank: int) -> int | None:
    """The axis of which a Gather takes one place; None of any other node."""
    if node.op_type != "Gather" or node.domain != "":
        return None
    index = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
    if index is None or len(index.shape) != 0:
        return None
    axis = node.attributes.get_int("axis", 0)
    return axis % rank if -rank <= axis < rank else None


def _producer(node: ir.Node, op: str) -> ir.Node | None:
    made = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    return made if made is not None and made.op_type == op and made.domain == "" else None


def _used_once(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def _perm(transpose: ir.Node) -> list[int] | None:
    perm = transpose.attributes.get_ints("perm", ())
    return list(perm) if perm else None


def _axes(node: ir.Node, rank: int) -> set[int] | None:
    """The axes of an Unsqueeze or Squeeze, of ``rank`` axes in all; None where they are not stated as a constant."""
    if len(node.inputs) < 2 or node.inputs[1] is None:
        return None
    held = ir.convenience.get_const_tensor(node.inputs[1])
    return None if held is None else {int(axis) % rank for axis in held.numpy().reshape(-1)}


def _without(perm: Sequence[int], axes: set[int]) -> list[int]:
    """The order that is left where these axes of the result are gone."""
    kept = [axis for i, axis in enumerate(perm) if i not in axes]
    order = sorted(kept)
    return [order.index(axis) for axis in kept]


def _replaced(graph: ir.Graph, old: ir.Node, new: ir.Node) -> bool:
    new.metadata_props.update(old.metadata_props)
    ir.convenience.replace_nodes_and_values(graph, old, [old], [new], old.outputs, new.outputs)
    return True
