"""Training mode in the place of eval mode."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from ...precision.type_conversion import initializer_values as values_of
from ...runtimes.float64_evaluator import Array, Float64Evaluator, NodeChange, Values
from ...storage.proto_traversal import copy_model
from .trial_changes import Cause, float_constant, node_at_text, replace_by, with_attribute

# the inputs of a BatchNormalization that are running ones
_STATISTICS = (3, 4)
BATCH = "the statistics of the batch, the model its running ones; export the model after eval()"


def try_eval_mode(
    exact: Float64Evaluator, places: Sequence[int], parameters: Values
) -> Iterator[tuple[Cause, NodeChange]]:
    """Eval mode in the place of training mode (ONNX: BatchNormalization 14, Dropout 12)."""
    trained = [place for place in places if _is_in_training_mode(exact.nodes[place])]
    for place in trained:
        yield from _try_node_in_eval(exact, place, parameters)
    if len(trained) > 1:
        text = f"{node_at_text(exact, trained[0])} and {len(trained) - 1} more are in training mode: they take {BATCH}"
        nodes = {place: _node_in_eval(exact.nodes[place]) for place in trained}
        inputs = {(p, i): replace_by(v) for p in trained for i, v in _running_statistics(exact, p, parameters).items()}
        for moved in ({}, inputs):
            yield Cause("training mode", text, trained[0]), NodeChange(nodes=nodes, inputs=moved)
    for place in places:
        node = exact.nodes[place]
        if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
            text = (
                f"{node_at_text(exact, place)} is in training mode: it drops at random; export the model after eval()"
            )
            yield Cause("training mode", text, place), NodeChange(inputs={(place, 2): np.zeros_like})


def _try_node_in_eval(exact: Float64Evaluator, place: int, parameters: Values) -> Iterator[tuple[Cause, NodeChange]]:
    cause = Cause("training mode", f"{node_at_text(exact, place)} is in training mode: it takes {BATCH}", place)
    nodes = {place: _node_in_eval(exact.nodes[place])}
    yield cause, NodeChange(nodes=nodes)
    # An export in training mode runs the model, which moves its running statistics: the model's own are tried too.
    vectors = [value for value in parameters.values() if value.ndim == 1]
    for center, variance in itertools.permutations(vectors, 2):
        yield cause, NodeChange(nodes=nodes, inputs={(place, 3): replace_by(center), (place, 4): replace_by(variance)})


def _is_in_training_mode(node: onnx.NodeProto) -> bool:
    return node.op_type == "BatchNormalization" and any(a.name == "training_mode" and a.i for a in node.attribute)


def _node_in_eval(node: onnx.NodeProto) -> onnx.NodeProto:
    changed = with_attribute(node, "training_mode", 0)
    # The other outputs are the new running statistics, which eval mode does not give.
    del changed.output[1:]
    return changed


def _running_statistics(exact: Float64Evaluator, place: int, parameters: Values) -> dict[int, Array]:
    """Return the model's running statistics by their input: those of the file's names, else the nearest."""
    found: dict[int, Array] = {}
    for i in _STATISTICS:
        name = exact.nodes[place].input[i]
        stored = float_constant(exact, name)
        vectors = {n: v for n, v in parameters.items() if stored is not None and v.shape == stored.shape}
        if stored is not None and vectors:
            nearest = min(vectors, key=lambda n: (n != name, float(np.abs(vectors[n] - stored).max())))
            found[i] = vectors[nearest]
    return found


def with_eval_mode(proto: onnx.ModelProto, parameters: Values) -> tuple[onnx.ModelProto, list[str]]:
    """Return a file with its BatchNormalizations and Dropouts in eval mode, and what the former gave that were not.

    Running statistics of the model's names become the model's; nothing for a single node.
    """
    changed = copy_model(proto)
    trained = [node for node in changed.graph.node if _is_in_training_mode(node)]
    if len(trained) < 2:
        return proto, []
    for node in trained:
        node.CopyFrom(_node_in_eval(node))
    for node in changed.graph.node:
        if node.op_type == "Dropout":
            # Without its third input it drops nothing.
            del node.input[2:]
    running = {node.input[i] for node in trained for i in _STATISTICS}
    for tensor in changed.graph.initializer:
        own = parameters.get(tensor.name)
        if tensor.name in running and own is not None and own.shape == tuple(tensor.dims):
            tensor.CopyFrom(numpy_helper.from_array(own.astype(values_of(tensor).dtype), tensor.name))
    return changed, [node.output[0] for node in trained]


def try_running_statistics(
    exact: Float64Evaluator, places: Sequence[int], values: Values, parameters: Values
) -> Iterator[tuple[Cause, NodeChange]]:
    """Take two parameters in the place of a mean and a variance of the batch that nodes compute."""
    means = [exact.nodes[p].output[0] for p in places if exact.nodes[p].op_type == "ReduceMean"]
    own = {name: values[name] for name in means if name in values and _is_batch_statistic(exact, name, values)}
    for center, spread in itertools.permutations(own, 2):
        if exact.makers[center] > exact.makers[spread]:
            continue
        vectors = {n: v for n, v in parameters.items() if v.size == own[center].size == own[spread].size}
        for mean, variance in itertools.permutations(vectors, 2):
            text = (
                f"{node_at_text(exact, exact.makers[center])} and {node_at_text(exact, exact.makers[spread])} "
                "take the statistics of"
                f" the batch, the model the stored {mean!r} and {variance!r}: the file is in training mode; export the"
                " model after eval()"
            )
            given = {
                center: _reshape_like(vectors[mean], own[center]),
                spread: _reshape_like(vectors[variance], own[spread]),
            }
            yield Cause("training mode", text, exact.makers[center]), NodeChange(given=given)


def _is_batch_statistic(exact: Float64Evaluator, name: str, values: Values) -> bool:
    """Whether a mean is one over the first dim, one number for each of several channels."""
    read = values.get(exact.nodes[exact.makers[name]].input[0])
    made = values[name]
    if read is None or read.ndim < 2 or made.size != read.shape[1]:
        return False
    return made.ndim < read.ndim or made.shape[0] == 1


def _reshape_like(vector: Array, other: Array) -> Array:
    return vector.reshape(other.shape)
