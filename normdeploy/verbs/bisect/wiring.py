"""Nodes that a file has too many, and inputs in each other's place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import onnx

from ...runtimes.exact import Change, Exact, Values
from .changes import Cause, always, named

_MOST_INPUTS = 4  # of a Concat, whose orders are all tried
_MOST_INDICES = 16  # of a Gather, which are all tried
# Ops that an exchange of these inputs changes.
_ORDERED = {"Sub": (0, 1), "Div": (0, 1), "Pow": (0, 1), "MatMul": (0, 1), "Where": (1, 2), "Less": (0, 1)}

# Operators that stand where another of their row should: of the same inputs, and no attributes that matter.
_ALIKE = (
    ("Relu", "Sigmoid", "Tanh", "Elu", "Gelu", "Softplus", "HardSwish", "Mish", "Erf", "Exp", "Log", "Identity"),
    ("Softmax", "LogSoftmax"),
    ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"),
    ("Add", "Sub", "Mul", "Div"),
    ("Max", "Min"),
    ("Sin", "Cos"),
    ("Floor", "Ceil", "Round"),
    ("MaxPool", "AveragePool"),
    ("GlobalMaxPool", "GlobalAveragePool"),
)


def of_another_kind(exact: Exact, place: int) -> Iterator[tuple[Cause, Change]]:
    """Let a node compute what another operator does."""
    node = exact.nodes[place]
    for op in next((row for row in _ALIKE if node.op_type in row), ()):
        if op == node.op_type:
            continue
        changed = onnx.NodeProto()
        changed.CopyFrom(node)
        changed.op_type = op
        yield Cause("operator", f"{named(exact, place)} should be {op}", place), Change(nodes={place: changed})


def at_another_index(exact: Exact, place: int, values: Values) -> Iterator[tuple[Cause, Change]]:
    """Let a Gather of one index take another."""
    node = exact.nodes[place]
    if node.op_type != "Gather" or node.input[1] not in exact.constants or node.input[0] not in values:
        return
    index = exact.value(node.input[1], {})
    axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
    size = values[node.input[0]].shape[axis]
    if index.size != 1 or size > _MOST_INDICES:
        return
    own = int(index.item())
    for other in range(size):
        if other != own % size:
            text = f"{named(exact, place)} takes index {own}, with {other} it is right"
            yield Cause("order", text, place), Change(inputs={(place, 1): always(np.full_like(index, other))})


def added(exact: Exact, place: int, values: Values) -> Iterator[tuple[Cause, Change]]:
    """Take a node out whose result has the shape of what it reads."""
    node = exact.nodes[place]
    made = values.get(node.output[0])
    if made is None or node.op_type == "Identity":
        return
    for name in node.input:
        if name in exact.constants or name not in values or values[name].shape != made.shape:
            continue
        text = f"{named(exact, place)} does something that the model does not: with {name!r} in its place it is right"
        kept = onnx.helper.make_node("Identity", [name], [node.output[0]], name=node.name)
        yield Cause("added", text, place, instead=name), Change(nodes={place: kept})


def exchanged(exact: Exact, place: int) -> Iterator[tuple[Cause, Change]]:
    """Take the inputs of a node in other orders."""
    node = exact.nodes[place]
    own = list(node.input)
    for order in _orders(node):
        changed = onnx.NodeProto()
        changed.CopyFrom(node)
        changed.input[:] = order
        text = f"{named(exact, place)} reads {_listed(own)}, in the order {_listed(order)} it is right"
        if order != own:
            yield Cause("order", text, place), Change(nodes={place: changed})


def _orders(node: onnx.NodeProto) -> Iterator[list[str]]:
    own = list(node.input)
    if node.op_type == "Concat" and len(own) <= _MOST_INPUTS:
        yield from map(list, itertools.permutations(own))
    elif node.op_type in _ORDERED:
        one, other = _ORDERED[node.op_type]
        own[one], own[other] = own[other], own[one]
        yield own


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))
