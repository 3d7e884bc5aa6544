"""Nodes that a file has too many, and inputs in each other's place."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import onnx

from ...runtimes.exact import Array, Change, Exact, Values
from .changes import Cause, always, named
from .match import Spot
from .program import Program

_MOST_INPUTS = 4  # of a Concat, whose orders are all tried; of more each two are exchanged
_MOST_INDICES = 64  # of an axis, which are all tried
_MOST_COMPARED = 10_000_000  # elements, of rows with rows
_MOST_SIBLINGS = 64  # pairs that are exchanged
_VIEWS = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_MOST_READ = 32  # tensors that are read in another's place
_JOINING = ("Add", "Sub", "Mul", "Div", "MatMul", "Concat", "Where", "Sum")
# Ops that an exchange of these inputs changes.
_ORDERED = {
    "Sub": (0, 1),
    "Div": (0, 1),
    "Pow": (0, 1),
    "MatMul": (0, 1),
    "Where": (1, 2),
    "Less": (0, 1),
    "Greater": (0, 1),
}

# Operators that stand where another of their row should: of the same inputs, and no attributes that matter.
_ALIKE = (
    (
        *("Relu", "LeakyRelu", "Sigmoid", "Tanh", "Elu", "Selu", "Celu", "ThresholdedRelu", "Gelu", "Softplus"),
        *("Softsign", "HardSigmoid", "HardSwish", "Mish", "Erf", "Exp", "Log", "Identity"),
    ),
    ("Softmax", "LogSoftmax"),
    (
        *("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare"),
        *("ReduceLogSumExp", "ReduceLogSum"),
    ),
    ("ArgMax", "ArgMin"),
    ("Add", "Sub", "Mul", "Div"),
    ("Max", "Min"),
    ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"),
    ("And", "Or", "Xor"),
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
        # A window or an axis is that of the other operator too; what it does not know is not.
        known = onnx.defs.get_schema(op).attributes
        del changed.attribute[:]
        changed.attribute.extend(a for a in node.attribute if a.name in known)
        yield Cause("operator", f"{named(exact, place)} should be {op}", place), Change(nodes={place: changed})


def operators_of_the_model(
    exact: Exact, place: int, program: Program, operators: Iterable[str]
) -> Iterator[tuple[Cause, Change]]:
    """Let a node be what a reference's node of other kind, and as many inputs, is."""
    node = exact.nodes[place]
    for theirs in program.nodes(operators):
        same = (theirs.op_type, theirs.domain) == (node.op_type, node.domain)
        if same or (len(theirs.input), len(theirs.output)) != (len(node.input), len(node.output)):
            continue
        changed = onnx.NodeProto()
        changed.CopyFrom(theirs)
        changed.input[:], changed.output[:] = node.input, node.output
        text = f"{named(exact, place)} where the model has {theirs.op_type}"
        yield Cause("operator", text, place), Change(nodes={place: changed})


def at_another_index(exact: Exact, place: int, values: Values, spot: Spot) -> Iterator[tuple[Cause, Change]]:
    """Let a Gather take other indices: each one of the axis, or of several those that the right values are found at."""
    node = exact.nodes[place]
    if node.op_type != "Gather" or node.input[1] not in exact.constants or node.input[0] not in values:
        return
    index, data = exact.value(node.input[1], {}), values[node.input[0]]
    axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
    size = data.shape[axis]
    own = index % max(size, 1)
    others: list[Array] = []
    if index.size == 1 and size <= _MOST_INDICES:
        others = [np.full_like(index, other) for other in range(size)]
    elif index.ndim == 1 and node.output[0] == spot.end and data.size * index.size <= _MOST_COMPARED:
        others = _found_indices(data, spot, axis, len(index))
    for right in others:
        if not np.array_equal(right, own):
            what = "index" if index.size == 1 else "indices"
            text = f"{named(exact, place)} takes {what} {_indices(index)}, with {_indices(right)} it is right"
            yield Cause("order", text, place), Change(inputs={(place, 1): always(right.astype(index.dtype))})


def _found_indices(data: Array, spot: Spot, axis: int, count: int) -> list[Array]:
    """Return the indices at which ``data`` holds the right values; [] if it does not."""
    rows = np.moveaxis(data, axis, 0)
    shape = (*data.shape[:axis], count, *data.shape[axis:][1:])
    if spot.expected.size != np.prod(shape):
        return []
    wanted = np.moveaxis(spot.expected.reshape(shape), axis, 0)
    rows, wanted = rows.reshape(len(rows), -1), wanted.reshape(count, -1)
    near = (np.abs(rows[None] - wanted[:, None]) <= spot.allowed).all(-1)
    return [near.argmax(-1)] if near.any(-1).all() else []


def _indices(index: Array) -> str:
    return str(index.item() if index.size == 1 else index.tolist())


def at_another_range(exact: Exact, place: int, values: Values) -> Iterator[tuple[Cause, Change]]:
    """Let a Slice begin and end elsewhere on one of its axes: moved as it is, or one longer or shorter."""
    node = exact.nodes[place]
    if node.op_type != "Slice" or len(node.input) < 3 or node.input[0] not in values:
        return
    if not {*node.input[1:3]} <= exact.constants:
        return
    starts, ends = (np.atleast_1d(exact.value(name, {})) for name in node.input[1:3])
    if len(node.input) > 3 and node.input[3] in exact.constants:
        axes = np.atleast_1d(exact.value(node.input[3], {}))
    else:
        axes = np.arange(len(starts))
    for i, axis in enumerate(axes):
        size = values[node.input[0]].shape[int(axis)]
        start, end, _ = slice(int(starts[i]), int(ends[i])).indices(size)
        length = max(end - start, 0)
        moved = [(first, first + length) for first in range(size - length + 1)] if size <= _MOST_INDICES else []
        near = [(start + a, end + b) for a, b in ((-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (1, 1))]
        for first, last in dict.fromkeys([*near, *moved]):
            if 0 <= first <= last <= size and (first, last) != (start, end):
                other = [array.copy() for array in (starts, ends)]
                other[0][i], other[1][i] = first, last
                text = f"{named(exact, place)} takes {start}:{end} of axis {int(axis)}, with {first}:{last} it is right"
                yield Cause("order", text, place), Change(inputs={(place, k + 1): always(other[k]) for k in range(2)})


def parts_exchanged(exact: Exact, place: int) -> Iterator[tuple[Cause, Change]]:
    """Give the parts of a Split in other orders."""
    node = exact.nodes[place]
    if node.op_type != "Split" or not 1 < len(node.output) <= _MOST_INPUTS:
        return
    own = list(node.output)
    for order in itertools.permutations(own):
        if list(order) != own:
            changed = onnx.NodeProto()
            changed.CopyFrom(node)
            changed.output[:] = order
            text = f"{named(exact, place)} gives {_listed(own)}, in the order {_listed(list(order))} it is right"
            yield Cause("order", text, place), Change(nodes={place: changed})


def rewired(exact: Exact, place: int, values: Values, right: Values) -> Iterator[tuple[Cause, Change]]:
    """Let a node read another tensor of the same shape in the place of one that it reads.

    Args:
        right: what the operators of the model read that the node stands for.
    """
    node = exact.nodes[place]
    if node.op_type not in _JOINING:
        return
    for i, name in enumerate(node.input):
        read = values.get(name)
        if read is None or name in exact.constants:
            continue
        # A node can read neither its own result nor those of later nodes.
        before = {n: v for n, v in values.items() if exact.makers.get(n, -1) < place and n not in exact.constants}
        others = {n: v for n, v in {**right, **before}.items() if v.size == read.size and n not in node.input}
        for other, value in islice(others.items(), _MOST_READ):
            text = f"{named(exact, place)} reads {name!r}, with {other!r} in its place it is right"
            yield Cause("input", text, place), Change(inputs={(place, i): always(value.reshape(read.shape))})


def siblings(exact: Exact, values: Values) -> Iterator[tuple[str, str]]:
    """Yield each two tensors of one shape that nodes of one kind make, or that enter the file."""
    kinds = {name: exact.nodes[exact.makers[name]].op_type if name in exact.makers else "" for name in values}
    names = [name for name in values if name in exact.inputs or (kinds[name] and name not in exact.sizes)]
    for one, other in itertools.combinations(names, 2):
        a, b = values[one], values[other]
        if kinds[one] == kinds[other] and a.shape == b.shape and a.dtype == b.dtype and not np.array_equal(a, b):
            yield one, other


def of_one_source(exact: Exact, values: Values) -> Iterator[tuple[str, str]]:
    """Yield each two siblings that are taken from one tensor, or that enter the file."""
    sources = {name: exact.nodes[exact.makers[name]].input[:1] if name in exact.makers else () for name in values}
    groups: dict[tuple[str, ...], dict[str, Array]] = {}
    for name, value in values.items():
        groups.setdefault(tuple(sources[name]), {})[name] = value
    for group in groups.values():
        yield from siblings(exact, group)


def exchanged_tensors(exact: Exact, pairs: Iterable[tuple[str, str]], values: Values) -> Iterator[tuple[Cause, Change]]:
    """Give all readers of two tensors the other one."""
    for one, other in islice(pairs, _MOST_SIBLINGS):
        held = {one: values[other], other: values[one]}
        sources = [_source(exact, one), _source(exact, other)]
        places = [exact.makers[name] for name in sources if name in exact.makers]
        told = " and ".join(named(exact, place) for place in dict.fromkeys(places))
        text = f"{f'{told}: ' if told else ''}{sources[0]!r} and {sources[1]!r} are in each other's place"
        yield Cause("order", text, places[0] if places else None, held=held), Change(given=held)


def _source(exact: Exact, name: str) -> str:
    """The tensor that another one is a mere view of."""
    while (place := exact.makers.get(name)) is not None and exact.nodes[place].op_type in _VIEWS:
        name = exact.nodes[place].input[0]
    return name


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
    elif node.op_type == "Concat":
        for one, other in itertools.combinations(range(len(own)), 2):
            order = list(own)
            order[one], order[other] = own[other], own[one]
            yield order
    elif node.op_type in _ORDERED:
        one, other = _ORDERED[node.op_type]
        own[one], own[other] = own[other], own[one]
        yield own


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))
