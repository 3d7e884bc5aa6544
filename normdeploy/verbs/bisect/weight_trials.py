"""Try other values for the weights of a file."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import ml_dtypes
import numpy as np
import onnx

from ...compare.number_text import format_pair
from ...runtimes.float64_evaluator import NodeChange
from ...types import Array, Arrays
from .recurrent_weights import GATES, iter_packed_weights
from .trial_changes import Cause, Trial, TrialNode, TrialSpot, copy_node, replace_by

# Prefix of the name of a tensor that a trial adds. No file has a tensor with this prefix.
_BIAS = "the bias of the model's BatchNorm at"
# Maximum number of pairs of weights that are exchanged.
_MOST_PAIRS = 2000


@dataclass(frozen=True)
class _Weight:
    """Floating constant of several elements that a node reads as input ``i`` or inside its body."""

    at: TrialNode
    i: int
    name: str
    stored: Array


def _iter_weights(at: TrialNode, names: Iterable[str]) -> Iterator[_Weight]:
    for i, name in enumerate(names):
        stored = at.exact.fixed_value(name, "f")
        if stored is not None and stored.size > 1:
            yield _Weight(at, i, name, stored)


def try_parameters(at: TrialNode, parameters: Arrays) -> Iterator[Trial]:
    """Try a parameter of the model in place of a weight that a node or its body reads.

    Yields:
        Trials of kind "weights".
    """
    inputs = list(at.node.input)
    seen_by_bodies = [name for name in at.exact.read_names(at.node) if name not in inputs]
    for weight in _iter_weights(at, [*inputs, *seen_by_bodies]):
        for parameter, right, turned in _iter_replacements(weight, parameters):
            if np.array_equal(right, weight.stored):
                continue
            text = f"{at}: {_describe_weight(weight, parameter, right, turned)}"
            if weight.i < len(inputs):
                yield at.with_inputs("weights", text, {weight.i: right})
            else:
                yield Trial(Cause("weights", text, at.place), NodeChange(given={weight.name: right}))


def _iter_replacements(weight: _Weight, parameters: Arrays) -> Iterator[tuple[str, Array, Array | None]]:
    """Yield each parameter twice in the shape of a weight: in its own order of dims, and with its dims reversed.

    Yields:
        Name, the numbers in one of these two layouts, and the numbers in the other layout. Weights of recurrent nodes
        also get parameters in ONNX's layout, with None as the other layout.
    """
    shape = weight.stored.shape
    if weight.at.op in GATES and weight.i in (1, 2, 3):
        for parameter, right in iter_packed_weights(weight.at.op, weight.i, parameters):
            if right.shape == shape:
                yield parameter, right, None
    for parameter, value in parameters.items():
        if value.size == weight.stored.size:
            yield parameter, value.reshape(shape), value.T
            yield parameter, value.T.reshape(shape), value


def _describe_weight(weight: _Weight, parameter: str, right: Array, turned: Array | None) -> str:
    name = weight.name
    stored = weight.stored
    if _is_reversed(stored, right):
        return f"{name!r} is {parameter!r} with its channels reversed"
    near = 1e-3 * np.abs(right).max(initial=0)
    if turned is not None and stored.ndim > 1 and np.abs(stored - turned.reshape(stored.shape)).max() <= near:
        return f"{name!r} is {parameter!r} in the wrong layout (transposed)"
    for kind in (np.float16, ml_dtypes.bfloat16):
        with np.errstate(over="ignore"):
            rounded = right.astype(kind)
        if np.array_equal(rounded.astype(np.float64), stored):
            return f"{name!r} is {parameter!r} rounded to {rounded.dtype.name}"
    same = (stored == right) | (np.isnan(stored) & np.isnan(right))
    differs = np.where(same, 0.0, np.nan_to_num(np.abs(stored - right), nan=np.inf))
    where = np.unravel_index(int(differs.argmax()), stored.shape)
    if name == parameter:
        whose = "the model's"
    else:
        whose = repr(parameter)
    ours, theirs = format_pair(stored[where], right[where])
    return (
        f"{name!r} differs from {whose}: {ours}, but the model has {theirs}"
        f" ({np.count_nonzero(~same)} of {stored.size} numbers differ)"
    )


def try_all_parameters(around: TrialSpot) -> Iterator[Trial]:
    """Try parameters in place of all weights that match no parameter.

    This is needed if several weights are wrong, because then no single weight explains the error. If a BatchNorm was
    folded into a weight with wrong statistics, the nearest parameter may be the unfolded one. So both are tried.

    Yields:
        Trials of kind "weights" or "epsilon".
    """
    nodes = around.nodes
    yield from _try_nearest_parameters(around, nodes, around.weights)
    # Folding a BatchNorm with mean 0 gives a bias of zeros, which matches no parameter. Such a bias is wrong only
    # together with a wrong weight.
    strange = [at for at in nodes if any(_iter_foreign_weights([at], around.weights))]
    for transposed in (False, True):
        rows = [at for at in strange if (at.op == "ConvTranspose") is transposed]
        pool = {name: fold.right for name, fold in around.folds.items() if fold.transposed in (None, transposed)}
        yield from _try_nearest_parameters(around, rows, pool)


def _try_nearest_parameters(around: TrialSpot, nodes: Sequence[TrialNode], parameters: Arrays) -> Iterator[Trial]:
    wrong: dict[tuple[int, int], Array] = {}
    biases: dict[int, Array] = {}
    told = list[str]()
    # (epsilon of the file, epsilon of the model) for each folded weight that differs; None if no epsilon explains it.
    epsilons = set[tuple[float, float] | None]()
    for weight in _iter_foreign_weights(nodes, parameters):
        parameter = _find_nearest(weight, parameters)
        if parameter is None:
            continue
        right = _orient_parameter(parameters[parameter], weight.stored)
        wrong[weight.at.place, weight.i] = right
        fold = around.folds.get(parameter)
        if fold is None:
            told.append(_describe_weight(weight, parameter, right, None))
            epsilons.add(None)
            continue
        bias = around.folds.get(f"no bias with the BatchNorm {fold.owner} folded")
        if bias is not None and list(weight.at.node.input[1:]) == [weight.name]:
            biases[weight.at.place] = bias.right
        if not fold.is_near(weight.stored):
            told.append(fold.describe_statistics(weight.stored) or _describe_weight(weight, parameter, right, None))
            epsilon = fold.find_epsilon(weight.stored)
            epsilons.add(None if epsilon is None else (epsilon, fold.epsilon))
    if not wrong:
        return
    first = around.node_at(min(wrong)[0])
    change = NodeChange(
        inputs={at: replace_by(right) for at, right in wrong.items()},
        nodes={at.place: _add_bias_input(at) for at in nodes if at.place in biases},
        given={f"{_BIAS} {place}": bias for place, bias in biases.items()},
    )
    pair = epsilons.pop() if len(epsilons) == 1 else None
    if pair is not None:
        text = f"{first} has a BatchNorm folded with epsilon {pair[0]:.3g}, but the model has {pair[1]:.3g}"
        yield Trial(Cause("epsilon", text, first.place), change)
    elif len(wrong) + len(biases) > 1:
        told += [f"{at} has no bias, but the model's mean or shift makes one" for at in nodes if at.place in biases]
        yield Trial(Cause("weights", f"{first}: {'; '.join(dict.fromkeys(told))}", first.place), change)


def _add_bias_input(at: TrialNode) -> onnx.NodeProto:
    changed = copy_node(at.node)
    changed.input.append(f"{_BIAS} {at.place}")
    return changed


def _iter_foreign_weights(nodes: Iterable[TrialNode], parameters: Arrays) -> Iterator[_Weight]:
    """Yield the nodes' weights that equal no parameter of the model."""
    for at in nodes:
        for weight in _iter_weights(at, at.node.input):
            if not any(_is_equal_or_transposed(weight.stored, value) for value in parameters.values()):
                yield weight


def _orient_parameter(parameter: Array, stored: Array) -> Array:
    """Return a parameter in the layout of a weight. It is transposed if the transpose is nearer to the weight."""
    own = parameter.reshape(stored.shape)
    if parameter.ndim > 1 and parameter.T.shape == stored.shape:
        return min(own, parameter.T, key=lambda laid: float(np.abs(stored - laid).max()))
    return own


def try_exchanged_directions(at: TrialNode) -> Iterator[Trial]:
    """Exchange the weights of the two directions of a recurrent node.

    Yields:
        At most one trial.
    """
    first = at.fixed_input(1, "f")
    if at.op in GATES and first is not None and len(first) == 2:
        text = f"{at}: the weights of its two directions are exchanged"
        yield at.with_inputs("weights", text, {i: np.flipud for i in (1, 2, 3) if at.name_of_input(i)})


def try_exchanged_weights(around: TrialSpot) -> Iterator[Trial]:
    """Exchange two weights of one shape.

    Yields:
        Trials of kind "weights".
    """
    weights = [weight for at in around.nodes for weight in _iter_weights(at, at.node.input)]
    for one, other in islice(itertools.combinations(weights, 2), _MOST_PAIRS):
        if one.stored.shape != other.stored.shape or np.array_equal(one.stored, other.stored):
            continue
        text = f"{one.at} and {other.at}: {one.name!r} and {other.name!r} are exchanged"
        inputs = {(one.at.place, one.i): replace_by(other.stored), (other.at.place, other.i): replace_by(one.stored)}
        yield Trial(Cause("weights", text, one.at.place), NodeChange(inputs=inputs))


def _is_equal_or_transposed(stored: Array, parameter: Array) -> bool:
    """Check that a weight equals a parameter or its transpose."""
    if stored.size != parameter.size:
        return False
    return any(np.array_equal(laid.reshape(stored.shape), stored) for laid in (parameter, parameter.T))


def _find_nearest(weight: _Weight, parameters: Arrays) -> str | None:
    """Return the parameter with the same numbers in reverse order. Without such a parameter, return the nearest one.

    The distance is halved if the names are equal, because a weight keeps its name when a BatchNorm is folded into it.
    """
    stored = weight.stored
    same_size = {n: _orient_parameter(v, stored) for n, v in parameters.items() if v.size == stored.size}

    def similarity_rank(n: str) -> tuple[bool, float, bool]:
        """Rank a parameter; the smallest rank is nearest.

        Returns:
            (True if not reversed, distance, True if the names differ).
        """
        away = float(np.nan_to_num(np.abs(same_size[n] - stored), nan=np.inf).max())
        is_named = n == weight.name or n.startswith(f"{weight.name} with ")
        return not _is_reversed(stored, same_size[n]), away / 2 if is_named else away, not is_named

    return min(same_size, key=similarity_rank, default=None)


def _is_reversed(stored: Array, right: Array) -> bool:
    """Check that a vector has the numbers of another vector in reverse order. Both may have dims of size 1."""
    is_vector = stored.size == max(stored.shape)
    return is_vector and np.array_equal(stored.reshape(-1)[::-1], right.reshape(-1))
