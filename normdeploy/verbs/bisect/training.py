"""Training mode in the place of eval mode."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ...runtimes.exact import Array, Change, Exact, Values
from .changes import Cause, always, named, with_attribute


def training(exact: Exact, place: int, parameters: Values) -> Iterator[tuple[Cause, Change]]:
    """Eval mode in the place of training mode (ONNX: BatchNormalization 14, Dropout 12)."""
    node = exact.nodes[place]
    if node.op_type == "BatchNormalization" and any(a.name == "training_mode" and a.i for a in node.attribute):
        text = (
            f"{named(exact, place)} is in training mode: it takes the statistics of the batch, the model its running"
            " ones; export the model after eval()"
        )
        changed = with_attribute(node, "training_mode", 0)
        # The other outputs are the new running statistics, which eval mode does not give.
        del changed.output[1:]
        yield Cause("training mode", text, place), Change(nodes={place: changed})
        # An export in training mode runs the model, which moves its running statistics: the model's own are tried too.
        vectors = [value for value in parameters.values() if value.ndim == 1]
        for center, variance in itertools.permutations(vectors, 2):
            inputs = {(place, 3): always(center), (place, 4): always(variance)}
            yield Cause("training mode", text, place), Change(nodes={place: changed}, inputs=inputs)
    if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
        text = f"{named(exact, place)} is in training mode: it drops at random; export the model after eval()"
        yield Cause("training mode", text, place), Change(inputs={(place, 2): np.zeros_like})


def batch_statistics(
    exact: Exact, places: Sequence[int], values: Values, parameters: Values
) -> Iterator[tuple[Cause, Change]]:
    """Take two parameters in the place of a mean and a variance of the batch that nodes compute."""
    means = [exact.nodes[p].output[0] for p in places if exact.nodes[p].op_type == "ReduceMean"]
    own = {name: values[name] for name in means if name in values and _of_the_batch(exact, name, values)}
    for center, spread in itertools.permutations(own, 2):
        if exact.makers[center] > exact.makers[spread]:
            continue
        vectors = {n: v for n, v in parameters.items() if v.size == own[center].size == own[spread].size}
        for mean, variance in itertools.permutations(vectors, 2):
            text = (
                f"{named(exact, exact.makers[center])} and {named(exact, exact.makers[spread])} take the statistics of"
                f" the batch, the model the stored {mean!r} and {variance!r}: the file is in training mode; export the"
                " model after eval()"
            )
            given = {center: _like(vectors[mean], own[center]), spread: _like(vectors[variance], own[spread])}
            yield Cause("training mode", text, exact.makers[center]), Change(given=given)


def _of_the_batch(exact: Exact, name: str, values: Values) -> bool:
    """Whether a mean is one over the first dim, one number for each of several channels."""
    read = values.get(exact.nodes[exact.makers[name]].input[0])
    made = values[name]
    if read is None or read.ndim < 2 or made.size != read.shape[1]:
        return False
    return made.ndim < read.ndim or made.shape[0] == 1


def _like(vector: Array, other: Array) -> Array:
    return vector.reshape(other.shape)
