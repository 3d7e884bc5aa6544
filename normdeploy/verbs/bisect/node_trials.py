"""List the changes of single nodes that are tried, each with the mistake that it would correct.

A spot is the group of nodes at a fault; its end is the tensor that these nodes compute wrongly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import ml_dtypes
import numpy as np
import onnx

from ...runtimes.float64_evaluator import NodeChange
from ...types import Array, Arrays
from .attribute_trials import (
    try_attributes,
    try_integer_inputs,
    try_model_attributes,
    try_model_integers,
    try_num_groups,
)
from .body_trials import try_body_nodes, try_exchanged_branches
from .dequantized_file import is_extra_node
from .folded_norms import EPSILONS
from .recurrent_weights import GATES
from .training_mode import try_eval_mode, try_running_statistics
from .trial_changes import Cause, Edit, Trial, TrialNode, TrialSpot, copy_node, with_attributes
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

# Largest number that is treated as an epsilon.
_LARGEST = 0.1
# Maximum number of axes of a tensor for which all orders of axes are tried.
_MOST_AXES = 4
# Maximum number of dims of a tensor for which all choices of axes are tried.
_MOST_DIMS = 5
# Name of a tensor that a trial adds. No file has a tensor of this name.
_STATE = "the model's initial state"
_ROOTS = ("Sqrt", "Reciprocal", "Pow")
# (variance of the file, variance of the model, p): the model's variance is the file's times (n / (n - 1)) ** p.
_VARIANCES = (("a biased", "an unbiased", 1), ("an unbiased", "a biased", -1))


def iter_trials(around: TrialSpot, held: Arrays) -> Iterator[Trial]:
    """List every change of one node of a spot, and the same change of all similar nodes.

    Args:
        held: results of the model's operators that are also tensors of the file, float64.

    Yields:
        Trials, each with the cause that it would confirm.
    """
    tried = list[Trial]()
    for trial in _try_one_node(around, held):
        if len(trial.change.nodes) == 1 and not trial.change.inputs and not trial.change.given:
            tried.append(trial)
        yield trial
    yield from _try_all_similar(around, tried)


def _try_all_similar(around: TrialSpot, tried: Sequence[Trial]) -> Iterator[Trial]:
    """Change all similar nodes in the same way.

    Wrong code that runs several times, for example for queries and keys, gives several wrong nodes.
    """
    alike: dict[tuple[object, ...], list[Trial]] = {}
    for trial in tried:
        ((place, node),) = trial.change.nodes.items()
        own = around.node_at(place).node
        inputs = list(own.input)
        order = tuple(inputs.index(name) for name in node.input if name in inputs)
        alike.setdefault((*_operator_key(own), *_operator_key(node), order), []).append(trial)
    for group in alike.values():
        nodes = {place: node for trial in group for place, node in trial.change.nodes.items()}
        first, *others = nodes
        if others and len(nodes) == len(group):
            cause = group[0].cause
            text = f"{cause.text}; the same holds for {', '.join(str(around.node_at(place)) for place in others)}"
            yield Trial(Cause(cause.kind, text, first), NodeChange(nodes=nodes))


def _operator_key(node: onnx.NodeProto) -> tuple[str, ...]:
    attributes = sorted(node.attribute, key=lambda a: a.name)
    return (node.op_type, *(str(a.SerializeToString(deterministic=True)) for a in attributes))


def _try_one_node(around: TrialSpot, held: Arrays) -> Iterator[Trial]:
    # Training mode is tried before the attributes of a reference's node, because these include the training mode.
    yield from try_eval_mode(around)
    for at in around.nodes:
        if not is_extra_node(at.node):
            for try_node in _NODE_TRIALS:
                yield from try_node(at)
    yield from try_running_statistics(around)
    yield from try_all_parameters(around)
    yield from try_exchanged_weights(around)
    read = {name for at in around.nodes for name in at.exact.read_names(at.node)}
    pairs = iter_siblings(around.exact, {name: value for name, value in around.values.items() if name in read})
    yield from try_exchanged_tensors(around.exact, pairs, around.values)
    right = {name: held[name] for o in around.operators for name in around.program.inputs_of(o) if name in held}
    for at in around.nodes:
        yield from try_other_inputs(at, right)


def _add_number(value: float) -> Edit:
    return lambda x: x + value


def _multiply_by(value: float) -> Edit:
    return lambda x: x * value


def _try_epsilons(at: TrialNode) -> Iterator[Trial]:
    numbers = [n for n in at.around.numbers if 0 < n < _LARGEST]
    own = next((a.f for a in at.node.attribute if a.name == "epsilon"), None)
    for epsilon in dict.fromkeys([*numbers, *EPSILONS]):
        if own is not None and epsilon != own:
            text = f"{at} has epsilon {own:.3g}, but the model has {epsilon:.3g}"
            yield at.as_node("epsilon", text, with_attributes(at.node, {"epsilon": epsilon}))
        if at.op in ("Add", "Max", "Clip"):
            yield from _try_added_epsilon(at, epsilon)
        if at.op in (*_ROOTS, "Log"):
            text = f"the epsilon {epsilon:.3g} is missing before {at}"
            yield at.with_inputs("epsilon", text, {0: _add_number(epsilon)})


def _try_added_epsilon(at: TrialNode, epsilon: float) -> Iterator[Trial]:
    """Try another epsilon in place of a small number that the node reads."""
    for i, name in enumerate(at.node.input):
        stored = at.fixed_input(i, "f")
        if stored is None or stored.size != 1:
            continue
        own = stored.item()
        if abs(own) < _LARGEST and own != epsilon:
            text = f"{at} has epsilon {own:.3g}, but the model has {epsilon:.3g}"
            if not own and name in at.exact.types and not np.asarray(epsilon).astype(at.exact.types[name]):
                text += f" (it rounds to 0 in {at.exact.types[name]})"
            yield at.with_inputs("epsilon", text, {i: np.full_like(stored, epsilon)})


def _try_ddof(at: TrialNode) -> Iterator[Trial]:
    """Try a variance divided by n − 1 in place of n (torch.var's ``unbiased``), or the reverse.

    In a norm node, gamma is multiplied by the root of the ratio instead.
    """
    x = at.input_value(0)
    if at.op in _ROOTS:
        sizes = {d for value in at.around.values.values() if value.dtype.kind == "f" for d in value.shape if d > 1}
        for n, (own, other, power) in itertools.product(sorted(sizes), _VARIANCES):
            text = f"the variance before {at} is {own} one over {n} numbers, but the model has {other} one"
            yield at.with_inputs("ddof", text, {0: _multiply_by((n / (n - 1)) ** power)})
    elif at.op == "LayerNormalization" and at.name_of_input(1) and x is not None:
        n = math.prod(x.shape[at.stated_axis(-1) :])
        for own, other, power in _VARIANCES if n > 1 else ():
            text = f"{at} has {own} variance over {n} numbers, but the model has {other} one"
            yield at.with_inputs("ddof", text, {1: _multiply_by((n / (n - 1)) ** (-power / 2))})


def _try_initial_states(at: TrialNode) -> Iterator[Trial]:
    """Try initial states of a recurrent layer whose initial state in the file is zero, which is ONNX's default."""
    if at.op not in GATES or at.input_value(0) is None:
        return
    places = (5, 6) if at.op == "LSTM" else (5,)
    choices = [[(i, *state) for state in _iter_stored_states(at, i)] for i in places]
    chosen: list[tuple[tuple[int, str, Array], ...]] = [(state,) for states in choices for state in states]
    if at.op == "LSTM":
        chosen += itertools.product(*choices)
    for states in chosen:
        changed = copy_node(at.node)
        given: dict[str, Array] = {}
        for i, _, state in states:
            changed.input.extend([""] * (i + 1 - len(changed.input)))
            changed.input[i] = f"{_STATE} {i}"
            given[f"{_STATE} {i}"] = state
        names = " and ".join(repr(name) for _, name, _ in states)
        text = f"{at} starts from zeros, but the model starts from {names}"
        yield Trial(Cause("state", text, at.place), NodeChange(nodes={at.place: changed}, given=given))


def _iter_stored_states(at: TrialNode, i: int) -> Iterator[tuple[str, Array]]:
    """Yield the parameters that may be the initial state of a recurrent layer, as arrays [directions, batch, size].
    Nothing is yielded if the layer's initial state in the file is not zero.
    """
    x = at.input_value(0)
    recurrence = at.fixed_input(2, "f")
    start = at.input_value(i)
    if start is None:
        start = at.fixed_input(i, "f")
    is_zero = not at.name_of_input(i) or (start is not None and not start.any())
    if x is None or recurrence is None or not is_zero:
        return
    batch = x.shape[1]
    directions = len(recurrence)
    for name, value in at.around.parameters.items():
        # Many weights also have three dims, but their sizes are not those of a state.
        if value.ndim != 3 or value.shape[1] not in (1, batch) or value.shape[2] != recurrence.shape[2]:
            continue
        for layer in range(0, len(value), directions):
            state = value[layer : layer + directions]
            yield name, np.broadcast_to(state, (len(state), batch, state.shape[2]))


def _try_axes_and_orders(at: TrialNode) -> Iterator[Trial]:
    """Try other axes, other orders of axes, and another approximation (for example, of GELU)."""
    read = [at.input_value(i) for i in range(len(at.node.input))]
    rank = next((value.ndim for value in read if value is not None), 0)
    for name, value in at.attributes.items():
        kind = "axis"
        others: list[object] = []
        if name == "axis" and isinstance(value, int):
            others = [i for i in range(rank) if i != value % max(rank, 1)]
        elif name == "perm" and isinstance(value, list) and len(value) <= _MOST_AXES:
            others = [list(p) for p in itertools.permutations(range(len(value))) if list(p) != value]
        elif name == "axes" and isinstance(value, list):
            others = [*_other_axes(value, rank)]
        elif name == "approximate":
            kind = "approximation"
            others = ["none" if value == "tanh" else "tanh"]
        for other in others:
            yield at.with_setting(kind, name, value, other)
    # Newer opsets give axes as the second input.
    axes = at.fixed_input(1, "iu")
    if axes is not None and at.op.startswith("Reduce"):
        own = axes.tolist()
        for axes_tried in _other_axes(own, rank):
            yield at.with_inputs("axis", at.describe_other("axes", own, axes_tried), {1: np.array(axes_tried)})


def _other_axes(own: Sequence[int], rank: int) -> list[list[int]]:
    """Return every other choice of as many axes as in ``own``; no choice if the rank is 0 or more than `_MOST_DIMS`."""
    if not 0 < rank <= _MOST_DIMS:
        return []
    here = sorted(axis % rank for axis in own)
    return [list(axes) for axes in itertools.combinations(range(rank), len(own)) if list(axes) != here]


def try_hidden_rows(at: TrialNode) -> Iterator[Trial]:
    """Set attention rows to 0 if the mask hides them completely, as torch does.

    docs/reference/huggingface.md, Masks, describes these rows.

    Yields:
        One trial, in which all nodes that read the result of the softmax read 0 in these rows.
    """
    scores = at.input_value(0)
    made = at.output_value
    if at.op != "Softmax" or scores is None or made is None:
        return
    lowest = float(ml_dtypes.finfo(at.exact.types.get(at.node.input[0], np.dtype(np.float32))).min)
    hidden = scores.max(at.stated_axis(-1), keepdims=True, initial=-math.inf) < lowest / 2
    if not hidden.any():
        return
    readers = [
        (place, i)
        for place, reader in enumerate(at.exact.nodes)
        for i, name in enumerate(reader.input)
        if name == at.node.output[0]
    ]
    if np.isnan(np.where(hidden, made, 0)).any():
        what = "NaN"
    else:
        what = "the mean of all values"
    text = (
        f"{at}: the mask hides {int(hidden.sum())} of {hidden.size} rows completely; there the model gives 0"
        f" and the file {what}, because its export guards such rows incorrectly (docs/reference/huggingface.md, Masks):"
        " export the model with normdeploy, or keep at least one 1 in each row"
    )
    change = NodeChange(inputs=dict.fromkeys(readers, lambda value: np.where(hidden, 0.0, value)))
    yield Trial(Cause("hidden row", text, at.place), change)


def _try_weights(at: TrialNode) -> Iterator[Trial]:
    return try_parameters(at, at.around.weights)


# Trials in the order in which they are tried. Of trials that reduce the error equally, the first one is chosen.
_NODE_TRIALS: tuple[Callable[[TrialNode], Iterator[Trial]], ...] = (
    _try_weights,
    try_exchanged_directions,
    _try_initial_states,
    _try_epsilons,
    _try_ddof,
    _try_axes_and_orders,
    try_hidden_rows,
    try_model_attributes,
    try_attributes,
    try_integer_inputs,
    try_num_groups,
    try_input_orders,
    try_split_orders,
    try_model_operators,
    try_other_operators,
    try_gather_indices,
    try_slice_ranges,
    try_model_integers,
    try_removed_node,
    try_exchanged_branches,
    try_body_nodes,
)
