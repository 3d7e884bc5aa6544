"""Nodes that a file has too many, and inputs in each other's place."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import onnx

from ...runtimes.float64_evaluator import Array, Float64Evaluator, NodeChange, Values
from .counterpart_search import FaultSpot
from .reference_program import ReferenceProgram
from .trial_changes import Cause, node_at_text, replace_by

# of a Concat, whose orders are all tried; of more each two are exchanged
_MOST_INPUTS = 4
# of an axis, which are all tried
_MOST_INDICES = 64
# elements, of rows with rows
_MOST_COMPARED = 10_000_000
# pairs that are exchanged
_MOST_SIBLINGS = 64
_VIEWS = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
# tensors that are read in another's place
_MOST_READ = 32
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


def try_other_operators(exact: Float64Evaluator, place: int) -> Iterator[tuple[Cause, NodeChange]]:
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
        yield (
            Cause("operator", f"{node_at_text(exact, place)} should be {op}", place),
            NodeChange(nodes={place: changed}),
        )


def try_model_operators(
    exact: Float64Evaluator, place: int, program: ReferenceProgram, operators: Iterable[str]
) -> Iterator[tuple[Cause, NodeChange]]:
    """Let a node be what a reference's node of other kind, and as many inputs, is."""
    node = exact.nodes[place]
    for theirs in program.onnx_nodes(operators):
        same = (theirs.op_type, theirs.domain) == (node.op_type, node.domain)
        if same or (len(theirs.input), len(theirs.output)) != (len(node.input), len(node.output)):
            continue
        changed = onnx.NodeProto()
        changed.CopyFrom(theirs)
        changed.input[:], changed.output[:] = node.input, node.output
        text = f"{node_at_text(exact, place)} where the model has {theirs.op_type}"
        yield Cause("operator", text, place), NodeChange(nodes={place: changed})


def try_gather_indices(
    exact: Float64Evaluator, place: int, values: Values, spot: FaultSpot
) -> Iterator[tuple[Cause, NodeChange]]:
    """Let a Gather take other indices: each one of the axis, or of several those that the right values are found at."""
    node = exact.nodes[place]
    if node.op_type != "Gather" or node.input[1] not in exact.constants or node.input[0] not in values:
        return
    index = exact.tensor_value(node.input[1], {})
    data = values[node.input[0]]
    axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
    size = data.shape[axis]
    own = index % max(size, 1)
    others: list[Array] = []
    if index.size == 1 and size <= _MOST_INDICES:
        others = [np.full_like(index, other) for other in range(size)]
    elif index.ndim == 1 and node.output[0] == spot.end and data.size * index.size <= _MOST_COMPARED:
        others = _find_indices(data, spot, axis, len(index))
    for right in others:
        if not np.array_equal(right, own):
            what = "index" if index.size == 1 else "indices"
            text = (
                f"{node_at_text(exact, place)} takes {what} {_format_indices(index)}, with "
                f"{_format_indices(right)} it is right"
            )
            yield Cause("order", text, place), NodeChange(inputs={(place, 1): replace_by(right.astype(index.dtype))})


def _find_indices(data: Array, spot: FaultSpot, axis: int, count: int) -> list[Array]:
    """Return the indices at which ``data`` holds the right values; [] if it does not."""
    rows = np.moveaxis(data, axis, 0)
    shape = (*data.shape[:axis], count, *data.shape[axis:][1:])
    if spot.expected.size != np.prod(shape):
        return []
    wanted = np.moveaxis(spot.expected.reshape(shape), axis, 0)
    rows = rows.reshape(len(rows), -1)
    wanted = wanted.reshape(count, -1)
    near = (np.abs(rows[None] - wanted[:, None]) <= spot.allowed).all(-1)
    if near.any(-1).all():
        return [near.argmax(-1)]
    return []


def _format_indices(index: Array) -> str:
    return str(index.item() if index.size == 1 else index.tolist())


def try_slice_ranges(exact: Float64Evaluator, place: int, values: Values) -> Iterator[tuple[Cause, NodeChange]]:
    """Let a Slice begin and end elsewhere on one of its axes: moved as it is, or one longer or shorter."""
    node = exact.nodes[place]
    if node.op_type != "Slice" or len(node.input) < 3 or node.input[0] not in values:
        return
    if not {*node.input[1:3]} <= exact.constants:
        return
    starts, ends = (np.atleast_1d(exact.tensor_value(name, {})) for name in node.input[1:3])
    if len(node.input) > 3 and node.input[3] in exact.constants:
        axes = np.atleast_1d(exact.tensor_value(node.input[3], {}))
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
                text = (
                    f"{node_at_text(exact, place)} takes {start}:{end} of axis {int(axis)}, with {first}:{last} it "
                    "is right"
                )
                yield (
                    Cause("order", text, place),
                    NodeChange(inputs={(place, k + 1): replace_by(other[k]) for k in range(2)}),
                )


def try_split_orders(exact: Float64Evaluator, place: int) -> Iterator[tuple[Cause, NodeChange]]:
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
            text = (
                f"{node_at_text(exact, place)} gives {_format_names(own)}, in the order "
                f"{_format_names(list(order))} it is right"
            )
            yield Cause("order", text, place), NodeChange(nodes={place: changed})


def try_other_inputs(
    exact: Float64Evaluator, place: int, values: Values, right: Values
) -> Iterator[tuple[Cause, NodeChange]]:
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
            text = f"{node_at_text(exact, place)} reads {name!r}, with {other!r} in its place it is right"
            yield Cause("input", text, place), NodeChange(inputs={(place, i): replace_by(value.reshape(read.shape))})


def iter_siblings(exact: Float64Evaluator, values: Values) -> Iterator[tuple[str, str]]:
    """Yield each two tensors of one shape that nodes of one kind make, or that enter the file."""
    kinds = {name: exact.nodes[exact.makers[name]].op_type if name in exact.makers else "" for name in values}
    names = [name for name in values if name in exact.inputs or (kinds[name] and name not in exact.sizes)]
    for one, other in itertools.combinations(names, 2):
        a = values[one]
        b = values[other]
        if kinds[one] == kinds[other] and a.shape == b.shape and a.dtype == b.dtype and not np.array_equal(a, b):
            yield one, other


def iter_same_source_siblings(exact: Float64Evaluator, values: Values) -> Iterator[tuple[str, str]]:
    """Yield each two siblings that are taken from one tensor, or that enter the file."""
    sources = {name: exact.nodes[exact.makers[name]].input[:1] if name in exact.makers else () for name in values}
    groups: dict[tuple[str, ...], dict[str, Array]] = {}
    for name, value in values.items():
        groups.setdefault(tuple(sources[name]), {})[name] = value
    for group in groups.values():
        yield from iter_siblings(exact, group)


def try_exchanged_tensors(
    exact: Float64Evaluator, pairs: Iterable[tuple[str, str]], values: Values
) -> Iterator[tuple[Cause, NodeChange]]:
    """Give all readers of two tensors the other one."""
    for one, other in islice(pairs, _MOST_SIBLINGS):
        held = {one: values[other], other: values[one]}
        sources = [_view_source(exact, one), _view_source(exact, other)]
        places = [exact.makers[name] for name in sources if name in exact.makers]
        told = " and ".join(node_at_text(exact, place) for place in dict.fromkeys(places))
        text = f"{f'{told}: ' if told else ''}{sources[0]!r} and {sources[1]!r} are in each other's place"
        yield Cause("order", text, places[0] if places else None, held=held), NodeChange(given=held)


def _view_source(exact: Float64Evaluator, name: str) -> str:
    """The tensor that another one is a mere view of."""
    while (place := exact.makers.get(name)) is not None and exact.nodes[place].op_type in _VIEWS:
        name = exact.nodes[place].input[0]
    return name


def try_removed_node(exact: Float64Evaluator, place: int, values: Values) -> Iterator[tuple[Cause, NodeChange]]:
    """Take a node out whose result has the shape of what it reads."""
    node = exact.nodes[place]
    made = values.get(node.output[0])
    if made is None or node.op_type == "Identity":
        return
    for name in node.input:
        if name in exact.constants or name not in values or values[name].shape != made.shape:
            continue
        text = (
            f"{node_at_text(exact, place)} does something that the model does not: with {name!r} in its "
            "place it is right"
        )
        kept = onnx.helper.make_node("Identity", [name], [node.output[0]], name=node.name)
        yield Cause("added", text, place, instead=name), NodeChange(nodes={place: kept})


def try_input_orders(exact: Float64Evaluator, place: int) -> Iterator[tuple[Cause, NodeChange]]:
    """Take the inputs of a node in other orders."""
    node = exact.nodes[place]
    own = list(node.input)
    for order in _iter_input_orders(node):
        changed = onnx.NodeProto()
        changed.CopyFrom(node)
        changed.input[:] = order
        text = (
            f"{node_at_text(exact, place)} reads {_format_names(own)}, in the order {_format_names(order)} it is right"
        )
        if order != own:
            yield Cause("order", text, place), NodeChange(nodes={place: changed})


def _iter_input_orders(node: onnx.NodeProto) -> Iterator[list[str]]:
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


def _format_names(names: list[str]) -> str:
    return ", ".join(map(repr, names))
