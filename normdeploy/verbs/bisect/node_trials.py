"""The changes that are tried in the place of what a file has, each with the kind of mistake that it would mend."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np
import onnx

from ...runtimes.float64_evaluator import Array, Float64Evaluator, NodeChange, Values
from .attribute_trials import (
    attributes_with_defaults,
    try_attributes,
    try_integer_inputs,
    try_model_attributes,
    try_model_integers,
    try_num_groups,
)
from .body_trials import try_body_nodes, try_exchanged_branches
from .counterpart_search import FaultSpot
from .dequantized_file import is_extra_node
from .folded_norms import EPSILONS
from .recurrent_weights import GATES
from .reference_program import ReferenceProgram
from .training_mode import try_eval_mode, try_running_statistics
from .trial_changes import Cause, Edit, float_constant, node_at_text, replace_by, with_attribute
from .weight_trials import try_all_parameters, try_exchanged_directions, try_exchanged_weights, try_parameters
from .wiring_trials import (
    iter_siblings,
    try_exchanged_tensors,
    try_gather_indices,
    try_input_orders,
    try_model_operators,
    try_other_inputs,
    try_other_operators,
    try_removed_node,
    try_slice_ranges,
    try_split_orders,
)

# of what is taken for an epsilon
_LARGEST = 0.1
# whose orders are all tried
_MOST_AXES = 4
# of which each choice of axes is tried
_MOST_DIMS = 5
# no tensor of a file
_STATE = "the model's initial state"
_ROOTS = ("Sqrt", "Reciprocal", "Pow")


def iter_trials(
    exact: Float64Evaluator, values: Values, spot: FaultSpot, program: ReferenceProgram, held: Values
) -> Iterator[tuple[Cause, NodeChange]]:
    """Yield every change of one node of a spot that is tried, and of all that are alike, with the cause that it would
    show.

    Args:
        values: of all that the spot reads and makes, as the file has them.
        held: results of the model's operators that the file has too, float64.
    """
    tried = list[tuple[Cause, NodeChange]]()
    for cause, change in _try_one_node(exact, values, spot, program, held):
        if len(change.nodes) == 1 and not change.inputs and not change.given:
            tried.append((cause, change))
        yield cause, change
    yield from _try_all_similar(exact, tried)


def _try_all_similar(
    exact: Float64Evaluator, tried: Sequence[tuple[Cause, NodeChange]]
) -> Iterator[tuple[Cause, NodeChange]]:
    """Change all nodes that are alike in the same way: code that runs several times, as for queries and keys, is wrong
    each time."""
    alike: dict[tuple[object, ...], list[tuple[Cause, NodeChange]]] = {}
    for cause, change in tried:
        ((place, node),) = change.nodes.items()
        own = exact.nodes[place]
        inputs = list(own.input)
        order = tuple(inputs.index(name) for name in node.input if name in inputs)
        alike.setdefault((*_operator_key(own), *_operator_key(node), order), []).append((cause, change))
    for group in alike.values():
        nodes = {place: node for _, change in group for place, node in change.nodes.items()}
        first, *others = nodes
        if others and len(nodes) == len(group):
            cause = group[0][0]
            text = f"{cause.text}; so it is with {', '.join(node_at_text(exact, place) for place in others)}"
            yield Cause(cause.kind, text, first), NodeChange(nodes=nodes)


def _operator_key(node: onnx.NodeProto) -> tuple[str, ...]:
    attributes = sorted(node.attribute, key=lambda a: a.name)
    return (node.op_type, *(str(a.SerializeToString(deterministic=True)) for a in attributes))


def _try_one_node(
    exact: Float64Evaluator, values: Values, spot: FaultSpot, program: ReferenceProgram, held: Values
) -> Iterator[tuple[Cause, NodeChange]]:
    parameters = program.parameters_of(spot.operators)
    numbers = program.scalars_of(spot.operators)
    folds = program.folded_parameters(spot.operators)
    whole = {**parameters, **{name: fold.right for name, fold in folds.items()}}
    # Before the attributes of a reference file, of which training mode is one.
    yield from try_eval_mode(exact, spot.places, parameters)
    for place in (p for p in spot.places if not is_extra_node(exact.nodes[p])):
        yield from try_parameters(exact, place, whole)
        yield from try_exchanged_directions(exact, place)
        yield from _try_initial_states(exact, place, values, parameters)
        yield from _try_epsilons(exact, place, numbers)
        yield from _try_ddof(exact, place, values)
        yield from _try_axes_and_orders(exact, place, values)
        yield from try_hidden_rows(exact, place, values)
        yield from try_model_attributes(exact, place, program, spot.operators)
        yield from try_attributes(exact, place, values)
        yield from try_integer_inputs(exact, place, values)
        yield from try_num_groups(exact, place, values)
        yield from try_input_orders(exact, place)
        yield from try_split_orders(exact, place)
        yield from try_model_operators(exact, place, program, spot.operators)
        yield from try_other_operators(exact, place)
        yield from try_gather_indices(exact, place, values, spot)
        yield from try_slice_ranges(exact, place, values)
        yield from try_model_integers(exact, place, program, spot.operators)
        yield from try_removed_node(exact, place, values)
        yield from try_exchanged_branches(exact, place)
        yield from try_body_nodes(exact, place, program, spot.operators)
    yield from try_running_statistics(exact, spot.places, values, parameters)
    yield from try_all_parameters(exact, spot.places, whole, folds)
    yield from try_exchanged_weights(exact, spot.places)
    read = {name for p in spot.places for name in exact.read_names(exact.nodes[p])}
    pairs = iter_siblings(exact, {name: value for name, value in values.items() if name in read})
    yield from try_exchanged_tensors(exact, pairs, values)
    right = {name: held[name] for o in spot.operators for name in program.inputs_of(o) if name in held}
    for place in spot.places:
        yield from try_other_inputs(exact, place, values, right)


def _fill_with(value: float) -> Edit:
    return lambda x: np.full_like(x, value)


def _add_number(value: float) -> Edit:
    return lambda x: x + value


def _multiply_by(value: float) -> Edit:
    return lambda x: x * value


def _try_epsilons(exact: Float64Evaluator, place: int, numbers: Sequence[float]) -> Iterator[tuple[Cause, NodeChange]]:
    node = exact.nodes[place]
    tried = dict.fromkeys([*(n for n in numbers if 0 < n < _LARGEST), *EPSILONS])
    own = next((a for a in node.attribute if a.name == "epsilon"), None)
    for epsilon in tried:
        if own is not None and epsilon != own.f:
            text = f"{node_at_text(exact, place)} has epsilon {own.f:.3g}, the model has {epsilon:.3g}"
            yield Cause("epsilon", text, place), NodeChange(nodes={place: with_attribute(node, "epsilon", epsilon)})
        if node.op_type in ("Add", "Max", "Clip"):
            for i, name in enumerate(node.input):
                stored = float_constant(exact, name)
                if (
                    stored is not None
                    and stored.size == 1
                    and abs(stored.item()) < _LARGEST
                    and stored.item() != epsilon
                ):
                    was = stored.item()
                    vanishes = not was and name in exact.types and not np.asarray(epsilon).astype(exact.types[name])
                    if vanishes:
                        gone = f" (it vanished: {exact.types[name]} can't hold it)"
                    else:
                        gone = ""
                    text = f"{node_at_text(exact, place)} has epsilon {was:.3g}, the model has {epsilon:.3g}{gone}"
                    yield Cause("epsilon", text, place), NodeChange(inputs={(place, i): _fill_with(epsilon)})
        if node.op_type in (*_ROOTS, "Log"):
            text = f"the epsilon {epsilon:.3g} is missing before {node_at_text(exact, place)}"
            yield Cause("epsilon", text, place), NodeChange(inputs={(place, 0): _add_number(epsilon)})


def _try_ddof(exact: Float64Evaluator, place: int, values: Values) -> Iterator[tuple[Cause, NodeChange]]:
    """A variance over n − 1 in the place of one over n (torch.var's unbiased), or the other way: gamma times the root
    of the ratio."""
    node = exact.nodes[place]
    if node.op_type in _ROOTS:
        sizes = {d for value in values.values() if value.dtype.kind == "f" for d in value.shape if d > 1}
        for n, (text, power) in itertools.product(sorted(sizes), (("a biased", 1), ("an unbiased", -1))):
            other = "an unbiased" if power == 1 else "a biased"
            reason = (
                f"the variance before {node_at_text(exact, place)} is {text} one over {n} numbers, the model has "
                f"{other} one"
            )
            yield Cause("ddof", reason, place), NodeChange(inputs={(place, 0): _multiply_by((n / (n - 1)) ** power)})
    elif node.op_type == "LayerNormalization" and len(node.input) > 1:
        x = values.get(node.input[0])
        if x is None:
            return
        axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
        n = math.prod(x.shape[axis:])
        for text, power in (("a biased", -1), ("an unbiased", 1)) if n > 1 else ():
            other = "an unbiased" if power == -1 else "a biased"
            reason = f"{node_at_text(exact, place)} has {text} variance over {n} numbers, the model {other} one"
            yield (
                Cause("ddof", reason, place),
                NodeChange(inputs={(place, 1): _multiply_by((n / (n - 1)) ** (power / 2))}),
            )


def _try_initial_states(
    exact: Float64Evaluator, place: int, values: Values, parameters: Values
) -> Iterator[tuple[Cause, NodeChange]]:
    """The initial states of a recurrent layer that the file leaves out: zeros, by ONNX."""
    node = exact.nodes[place]
    if node.op_type not in GATES or node.input[0] not in values:
        return
    choices = [
        list(_iter_stored_states(exact, node, values, parameters)) if _has_zero_state(exact, node, i, values) else []
        for i in range(5, 7 if node.op_type == "LSTM" else 6)
    ]
    alone = [((5 + i, *state),) for i, states in enumerate(choices) for state in states]
    together = [((5, *state), (6, *cell)) for state, cell in itertools.product(choices[0], choices[-1])]
    for chosen in [*alone, *(together if node.op_type == "LSTM" else [])]:
        changed = onnx.NodeProto()
        changed.CopyFrom(node)
        given: dict[str, Array] = {}
        for i, _, state in chosen:
            changed.input.extend([""] * (i + 1 - len(changed.input)))
            changed.input[i] = f"{_STATE} {i}"
            given[f"{_STATE} {i}"] = state
        names = " and ".join(repr(name) for _, name, _ in chosen)
        text = f"{node_at_text(exact, place)} starts from zeros, the model from {names}"
        yield Cause("state", text, place), NodeChange(nodes={place: changed}, given=given)


def _has_zero_state(exact: Float64Evaluator, node: onnx.NodeProto, i: int, values: Values) -> bool:
    stated = node.input[i] if len(node.input) > i else ""
    start = _initial_state(exact, stated, values)
    return not stated or (start is not None and not start.any())


def _iter_stored_states(
    exact: Float64Evaluator, node: onnx.NodeProto, values: Values, parameters: Values
) -> Iterator[tuple[str, Array]]:
    """Yield the parameters that may be a state of a layer, for each sequence of the batch."""
    batch = values[node.input[0]].shape[1]
    for name, value in parameters.items():
        for state in _iter_as_states(exact, node, value):
            # Weights are often three-dimensional, and no state then.
            if state.shape[1] in (1, batch):
                yield name, np.broadcast_to(state, (len(state), batch, state.shape[2]))


def _initial_state(exact: Float64Evaluator, name: str, values: Values) -> Array | None:
    """A state that is computed or stored; None where it is not known."""
    if name in values:
        return values[name]
    return float_constant(exact, name)


def _iter_as_states(exact: Float64Evaluator, node: onnx.NodeProto, value: Array) -> Iterator[Array]:
    """``value`` as the state of all directions, [directions, batch, size], of each layer that it may be for."""
    recurrence = float_constant(exact, node.input[2])
    if recurrence is None or value.ndim != 3 or value.shape[2] != recurrence.shape[2]:
        return
    directions = len(recurrence)
    for first in range(0, len(value), directions):
        yield value[first : first + directions]


def _try_axes_and_orders(exact: Float64Evaluator, place: int, values: Values) -> Iterator[tuple[Cause, NodeChange]]:
    """Other axes, other orders of axes, the other form of an approximation."""
    node = exact.nodes[place]
    rank = next((values[i].ndim for i in node.input if i in values), 0)
    for name, value in attributes_with_defaults(exact, node).items():
        others: list[object] = []
        kind = "axis"
        if name == "axis" and isinstance(value, int):
            others = [i for i in range(rank) if i != value % max(rank, 1)]
        elif name == "perm" and isinstance(value, list) and len(value) <= _MOST_AXES:
            others = [list(p) for p in itertools.permutations(range(len(value))) if list(p) != value]
        elif name == "axes" and isinstance(value, list) and 0 < rank <= _MOST_DIMS:
            every = itertools.combinations(range(rank), len(value))
            others = [list(axes) for axes in every if list(axes) != sorted(i % rank for i in value)]
        elif name == "approximate":
            kind = "approximation"
            others = ["none" if value == "tanh" else "tanh"]
        for other in others:
            yield (
                Cause(kind, f"{node_at_text(exact, place)} has {name} {value}, with {other} it is right", place),
                NodeChange(nodes={place: with_attribute(node, name, other)}),
            )
    axes = _constant_axes(exact, node)
    if axes is None or rank > _MOST_DIMS:
        return
    own = [int(axis) for axis in axes]
    for other in itertools.combinations(range(rank), len(own)):
        if sorted(axis % rank for axis in own) != list(other):
            text = f"{node_at_text(exact, place)} has axes {own}, with {list(other)} it is right"
            yield Cause("axis", text, place), NodeChange(inputs={(place, 1): replace_by(np.array(other))})


def try_hidden_rows(exact: Float64Evaluator, place: int, values: Values) -> Iterator[tuple[Cause, NodeChange]]:
    """Rows of an attention that the mask hides whole, where torch gives 0 (`masked_rows`): the softmax is 0 there for
    all that read it."""
    node = exact.nodes[place]
    axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
    if node.op_type != "Softmax" or node.input[0] not in values or node.output[0] not in values:
        return
    scores = values[node.input[0]]
    made = values[node.output[0]]
    lowest = float(ml_dtypes.finfo(exact.types.get(node.input[0], np.dtype(np.float32))).min)
    hidden = scores.max(axis, keepdims=True, initial=-math.inf) < lowest / 2
    if not hidden.any():
        return
    readers = [
        (p, i) for p, reader in enumerate(exact.nodes) for i, name in enumerate(reader.input) if name == node.output[0]
    ]
    if np.isnan(np.where(hidden, made, 0)).any():
        what = "NaN"
    else:
        what = "the mean of all values"
    text = (
        f"{node_at_text(exact, place)}: the mask hides {int(hidden.sum())} of {hidden.size} rows whole, "
        f"where the model gives"
        f" 0 and the file {what}; its export guards such rows wrongly (docs/huggingface.md, Masks): export the model"
        " with normdeploy, or leave each row a 1"
    )
    yield (
        Cause("hidden row", text, place),
        NodeChange(inputs=dict.fromkeys(readers, lambda value: np.where(hidden, 0.0, value))),
    )


def _constant_axes(exact: Float64Evaluator, node: onnx.NodeProto) -> Array | None:
    """The axes that newer opsets give as the second input."""
    if not node.op_type.startswith("Reduce") or len(node.input) < 2 or node.input[1] not in exact.constants:
        return None
    return exact.tensor_value(node.input[1], {})
