"""Try eval mode for nodes that a file has in training mode."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from ...precision.type_conversion import initializer_values
from ...runtimes.float64_evaluator import NodeChange
from ...storage.proto_traversal import copy_model
from ...types import Array, Arrays
from .trial_changes import Cause, Trial, TrialNode, TrialSpot, replace_by, with_attributes

# Input indices of a BatchNormalization's running statistics.
_STATISTICS = (3, 4)
BATCH = "the statistics of the batch instead of the model's running ones; export the model after eval()"


def try_eval_mode(around: TrialSpot) -> Iterator[Trial]:
    """Try eval mode for nodes in training mode (ONNX: BatchNormalization 14, Dropout 12).

    Yields:
        Trials of kind "training mode", for each node alone and for all nodes together.
    """
    trained = [at for at in around.nodes if _is_in_training_mode(at.node)]
    vectors = [value for value in around.parameters.values() if value.ndim == 1]
    for at in trained:
        text = f"{at} is in training mode: it uses {BATCH}"
        yield _in_eval([at], text, {})
        # An export in training mode runs the model, which changes the running statistics in the file. The model's
        # statistics are therefore tried too.
        for center, variance in itertools.permutations(vectors, 2):
            yield _in_eval([at], text, {(at.place, 3): center, (at.place, 4): variance})
    if len(trained) > 1:
        text = f"{trained[0]} and {len(trained) - 1} more are in training mode: they use {BATCH}"
        yield _in_eval(trained, text, {})
        yield _in_eval(trained, text, {key: v for at in trained for key, v in _running_statistics(at).items()})
    for at in around.nodes:
        if at.op == "Dropout" and at.name_of_input(2):
            text = f"{at} is in training mode: it drops at random; export the model after eval()"
            yield at.with_inputs("training mode", text, {2: np.zeros_like})


def _in_eval(nodes: Sequence[TrialNode], text: str, statistics: Mapping[tuple[int, int], Array]) -> Trial:
    """Try nodes in eval mode. ``statistics`` replaces running statistics: (index of the node, index of the input) ->
    vector.
    """
    changed = {at.place: _node_in_eval(at.node) for at in nodes}
    inputs = {key: replace_by(value) for key, value in statistics.items()}
    return Trial(Cause("training mode", text, nodes[0].place), NodeChange(nodes=changed, inputs=inputs))


def _is_in_training_mode(node: onnx.NodeProto) -> bool:
    return node.op_type == "BatchNormalization" and any(a.name == "training_mode" and a.i for a in node.attribute)


def _node_in_eval(node: onnx.NodeProto) -> onnx.NodeProto:
    changed = with_attributes(node, {"training_mode": 0})
    # The other outputs are updated running statistics, which do not exist in eval mode.
    del changed.output[1:]
    return changed


def _running_statistics(at: TrialNode) -> dict[tuple[int, int], Array]:
    """Return the model's running statistics for each input: the model's vector that has the name of this input in the
    file, or else the nearest vector.
    """
    found: dict[tuple[int, int], Array] = {}
    for i in _STATISTICS:
        stored = at.fixed_input(i, "f")
        if stored is None:
            continue
        vectors = {name: v for name, v in at.around.parameters.items() if v.shape == stored.shape}
        if at.name_of_input(i) in vectors:
            found[at.place, i] = vectors[at.name_of_input(i)]
        elif vectors:
            found[at.place, i] = min(vectors.values(), key=lambda v: float(np.abs(v - stored).max()))
    return found


def with_eval_mode(proto: onnx.ModelProto, parameters: Arrays) -> tuple[onnx.ModelProto, list[str]]:
    """Set the BatchNormalizations and Dropouts of a file to eval mode.

    Running statistics whose names are those of the model's tensors get the model's values. A file with fewer than two
    BatchNormalizations in training mode is not changed.

    Returns:
        The file, and the outputs of the BatchNormalizations that were in training mode.
    """
    changed = copy_model(proto)
    trained = [node for node in changed.graph.node if _is_in_training_mode(node)]
    if len(trained) < 2:
        return proto, []
    for node in trained:
        node.CopyFrom(_node_in_eval(node))
    for node in changed.graph.node:
        if node.op_type == "Dropout":
            # Without its third input, Dropout drops nothing.
            del node.input[2:]
    running = {node.input[i] for node in trained for i in _STATISTICS}
    for tensor in changed.graph.initializer:
        own = parameters.get(tensor.name)
        if tensor.name in running and own is not None and own.shape == tuple(tensor.dims):
            tensor.CopyFrom(numpy_helper.from_array(own.astype(initializer_values(tensor).dtype), tensor.name))
    return changed, [node.output[0] for node in trained]


def try_running_statistics(around: TrialSpot) -> Iterator[Trial]:
    """Try two parameters of the model in place of a mean and a variance that nodes compute from the batch.

    Yields:
        Trials of kind "training mode".
    """
    means = [at for at in around.nodes if _is_batch_statistic(at)]
    for center, spread in itertools.combinations(means, 2):
        made = (center.node.output[0], spread.node.output[0])
        sizes = {around.values[name].size for name in made}
        vectors = {name: v for name, v in around.parameters.items() if sizes == {v.size}}
        for names in itertools.permutations(vectors, 2):
            text = (
                f"{center} and {spread} use the statistics of the batch instead of the model's stored"
                f" {names[0]!r} and {names[1]!r}: the file is in training mode; export the model after eval()"
            )
            given = {one: vectors[n].reshape(around.values[one].shape) for one, n in zip(made, names, strict=True)}
            yield Trial(Cause("training mode", text, center.place), NodeChange(given=given))


def _is_batch_statistic(at: TrialNode) -> bool:
    """Check that a mean is taken over the first dim and gives one number for each channel."""
    read = at.input_value(0)
    made = at.output_value
    if at.op != "ReduceMean" or made is None or read is None or read.ndim < 2 or made.size != read.shape[1]:
        return False
    return made.ndim < read.ndim or made.shape[0] == 1
