"""Try to remove added nodes, and to exchange inputs, outputs and tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import onnx

from ...runtimes.float64_evaluator import Float64Evaluator, NodeChange
from ...types import Array, Arrays
from .counterpart_search import FaultSpot
from .difference_analysis import match_slices
from .trial_changes import Cause, Trial, TrialNode, copy_node, node_at_text

# Maximum number of inputs of a Concat for which all orders are tried. With more inputs, only pairs are exchanged.
_MOST_INPUTS = 4
# Maximum size of an axis for which every index is tried.
_MOST_INDICES = 64
# Maximum number of comparisons of elements when each row is compared with every row.
_MOST_COMPARED = 10_000_000
# Maximum number of pairs of tensors whose exchange is tried.
_MOST_SIBLINGS = 64
_VIEWS = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
# Maximum number of tensors that are tried in place of an input.
_MOST_READ = 32
_JOINING = ("Add", "Sub", "Mul", "Div", "MatMul", "Concat", "Where", "Sum")
# Op -> pairs of inputs whose exchange changes its result.
_ORDERED = {
    **dict.fromkeys(("Sub", "Div", "Pow", "MatMul", "Less", "Greater"), ((0, 1),)),
    "Where": ((1, 2),),
}
# Groups of operators that are tried in place of each other. They have the same inputs and no attributes that matter.
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


def try_other_operators(at: TrialNode) -> Iterator[Trial]:
    """Try similar operators in place of the node's operator.

    Yields:
        Trials of kind "operator".
    """
    for op in next((row for row in _ALIKE if at.op in row), ()):
        if op == at.op:
            continue
        changed = copy_node(at.node)
        changed.op_type = op
        # Attributes that the other operator also has, such as a window or an axis, are kept.
        known = onnx.defs.get_schema(op).attributes
        del changed.attribute[:]
        changed.attribute.extend(a for a in at.node.attribute if a.name in known)
        yield at.as_node("operator", f"{at} should be {op}", changed)


def try_model_operators(at: TrialNode) -> Iterator[Trial]:
    """Try nodes of the reference with another operator and the same number of inputs in place of a node.

    Yields:
        Trials of kind "operator".
    """
    node = at.node
    for theirs in at.around.program.onnx_nodes(at.around.operators):
        same = (theirs.op_type, theirs.domain) == (node.op_type, node.domain)
        if same or (len(theirs.input), len(theirs.output)) != (len(node.input), len(node.output)):
            continue
        changed = copy_node(theirs)
        changed.input[:] = node.input
        changed.output[:] = node.output
        yield at.as_node("operator", f"{at}, but the model has {theirs.op_type}", changed)


def try_gather_indices(at: TrialNode) -> Iterator[Trial]:
    """Try other indices for a Gather.

    For a single index, every index of the axis is tried. For several indices, those at which the data has the right
    values are tried.

    Yields:
        Trials of kind "order".
    """
    data = at.input_value(0)
    index = at.fixed_input(1, "iu")
    if at.op != "Gather" or data is None or index is None:
        return
    spot = at.around.spot
    axis = at.stated_axis(0)
    size = data.shape[axis]
    others: list[Array] = []
    what = "indices"
    if index.size == 1:
        what = "index"
        if size <= _MOST_INDICES:
            others = [np.full_like(index, other) for other in range(size)]
    elif index.ndim == 1 and at.node.output[0] == spot.end and data.size * index.size <= _MOST_COMPARED:
        others = _find_indices(data, spot, axis, len(index))
    for right in others:
        if not np.array_equal(right, index % max(size, 1)):
            text = f"{at} uses {what} {_format_indices(index)}; with {_format_indices(right)} the result is correct"
            yield at.with_inputs("order", text, {1: right.astype(index.dtype)})


def _find_indices(data: Array, spot: FaultSpot, axis: int, count: int) -> list[Array]:
    """Return the indices at which ``data`` has the right values; an empty list if a right value is missing."""
    shape = [*data.shape]
    shape[axis] = count
    if spot.expected.size != np.prod(shape):
        return []
    indices = match_slices(data, spot.expected.reshape(shape), axis, spot.allowed)
    if indices is None:
        return []
    return [indices]


def _format_indices(index: Array) -> str:
    return str(index.item() if index.size == 1 else index.tolist())


def try_slice_ranges(at: TrialNode) -> Iterator[Trial]:
    """Try other ranges for a Slice on one of its axes: the range is moved, or it is longer or shorter by one.

    Yields:
        Trials of kind "order".
    """
    data = at.input_value(0)
    starts = at.fixed_input(1, "iu")
    ends = at.fixed_input(2, "iu")
    if at.op != "Slice" or data is None or starts is None or ends is None:
        return
    axes = at.fixed_input(3, "iu")
    if axes is None:
        axes = np.arange(starts.size)
    for i, axis in enumerate(axes.reshape(-1).tolist()):
        size = data.shape[axis]
        start, end, _ = slice(int(starts.flat[i]), int(ends.flat[i])).indices(size)
        length = max(end - start, 0)
        ranges = [(start + a, end + b) for a, b in ((-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (1, 1))]
        if size <= _MOST_INDICES:
            ranges += [(first, first + length) for first in range(size - length + 1)]
        for first, last in dict.fromkeys(ranges):
            if 0 <= first <= last <= size and (first, last) != (start, end):
                text = f"{at} uses {start}:{end} of axis {axis}; with {first}:{last} the result is correct"
                yield at.with_inputs("order", text, {1: _with_entry(starts, i, first), 2: _with_entry(ends, i, last)})


def _with_entry(values: Array, i: int, value: int) -> Array:
    """Return one-dimensional integers with one of them changed."""
    changed = np.atleast_1d(values).copy()
    changed[i] = value
    return changed


def try_split_orders(at: TrialNode) -> Iterator[Trial]:
    """Try other orders of the parts of a Split.

    Yields:
        Trials of kind "order".
    """
    own = list(at.node.output)
    if at.op != "Split" or not 1 < len(own) <= _MOST_INPUTS:
        return
    for order in map(list, itertools.permutations(own)):
        if order != own:
            changed = copy_node(at.node)
            changed.output[:] = order
            text = f"{at} returns {_format_names(own)}; in the order {_format_names(order)} the result is correct"
            yield at.as_node("order", text, changed)


def try_other_inputs(at: TrialNode, right: Arrays) -> Iterator[Trial]:
    """Try another tensor of the same size in place of an input of a node.

    Args:
        right: tensors that the model's operators read in place of the node's inputs.

    Yields:
        Trials of kind "input".
    """
    exact = at.exact
    values = at.around.values
    if at.op not in _JOINING:
        return
    # A node can read neither its own result nor results of later nodes.
    before = {n: v for n, v in values.items() if exact.makers.get(n, -1) < at.place and n not in exact.constants}
    for i, name in enumerate(at.node.input):
        read = values.get(name)
        if read is None or name in exact.constants:
            continue
        others = {n: v for n, v in {**right, **before}.items() if v.size == read.size and n not in at.node.input}
        for other, value in islice(others.items(), _MOST_READ):
            text = f"{at} reads {name!r}; with {other!r} instead the result is correct"
            yield at.with_inputs("input", text, {i: value.reshape(read.shape)})


def iter_siblings(exact: Float64Evaluator, values: Arrays) -> Iterator[tuple[str, str]]:
    """Pair tensors of the same shape that are results of nodes with the same op, or that are inputs of the file.

    Yields:
        Names of two tensors with different values.
    """
    kinds = {name: exact.nodes[exact.makers[name]].op_type if name in exact.makers else "" for name in values}
    names = [name for name in values if name in exact.inputs or (kinds[name] and name not in exact.sizes)]
    for one, other in itertools.combinations(names, 2):
        a = values[one]
        b = values[other]
        if kinds[one] == kinds[other] and a.shape == b.shape and a.dtype == b.dtype and not np.array_equal(a, b):
            yield one, other


def iter_same_source_siblings(exact: Float64Evaluator, values: Arrays) -> Iterator[tuple[str, str]]:
    """Pair siblings (`iter_siblings`) that are computed from the same tensor, or that are inputs of the file.

    Yields:
        Names of two tensors with different values.
    """
    sources = {name: exact.nodes[exact.makers[name]].input[:1] if name in exact.makers else () for name in values}
    groups: dict[tuple[str, ...], dict[str, Array]] = {}
    for name, value in values.items():
        groups.setdefault(tuple(sources[name]), {})[name] = value
    for group in groups.values():
        yield from iter_siblings(exact, group)


def try_exchanged_tensors(exact: Float64Evaluator, pairs: Iterable[tuple[str, str]], values: Arrays) -> Iterator[Trial]:
    """Exchange two tensors for all nodes that read them.

    Args:
        pairs: names of two tensors.

    Yields:
        Trials of kind "order".
    """
    for one, other in islice(pairs, _MOST_SIBLINGS):
        held = {one: values[other], other: values[one]}
        sources = [_view_source(exact, one), _view_source(exact, other)]
        places = [exact.makers[name] for name in sources if name in exact.makers]
        told = " and ".join(node_at_text(exact, place) for place in dict.fromkeys(places))
        text = f"{f'{told}: ' if told else ''}{sources[0]!r} and {sources[1]!r} are exchanged"
        yield Trial(Cause("order", text, places[0] if places else None, held=held), NodeChange(given=held))


def _view_source(exact: Float64Evaluator, name: str) -> str:
    """Return the tensor from which ``name`` is made by ops that only change its shape, order or type."""
    while (place := exact.makers.get(name)) is not None and exact.nodes[place].op_type in _VIEWS:
        name = exact.nodes[place].input[0]
    return name


def try_removed_node(at: TrialNode) -> Iterator[Trial]:
    """Remove a node whose result has the shape of one of its inputs.

    Yields:
        Trials of kind "added", one for each such input.
    """
    made = at.output_value
    if made is None or at.op == "Identity":
        return
    for i, name in enumerate(at.node.input):
        read = at.input_value(i)
        if name in at.exact.constants or read is None or read.shape != made.shape:
            continue
        text = f"{at} is not in the model: with {name!r} instead the result is correct"
        kept = onnx.helper.make_node("Identity", [name], [at.node.output[0]], name=at.node.name)
        yield at.as_node("added", text, kept, instead=name)


def try_input_orders(at: TrialNode) -> Iterator[Trial]:
    """Try other orders of a node's inputs.

    Yields:
        Trials of kind "order".
    """
    own = list(at.node.input)
    for order in _iter_input_orders(at.op, own):
        if order != own:
            changed = copy_node(at.node)
            changed.input[:] = order
            text = f"{at} reads {_format_names(own)}; in the order {_format_names(order)} the result is correct"
            yield at.as_node("order", text, changed)


def _iter_input_orders(op: str, own: list[str]) -> Iterator[list[str]]:
    if op == "Concat" and len(own) <= _MOST_INPUTS:
        yield from map(list, itertools.permutations(own))
        return
    pairs: Iterable[tuple[int, int]] = _ORDERED.get(op, ())
    if op == "Concat":
        pairs = itertools.combinations(range(len(own)), 2)
    for one, other in pairs:
        order = list(own)
        order[one], order[other] = own[other], own[one]
        yield order


def _format_names(names: list[str]) -> str:
    return ", ".join(map(repr, names))
