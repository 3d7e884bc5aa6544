"""Weights of a file that are not the model's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import ml_dtypes
import numpy as np
import onnx

from ...runtimes.float64_evaluator import Array, Float64Evaluator, NodeChange, Values
from .folded_norms import FoldedTensor
from .recurrent_weights import GATES, iter_packed_weights
from .trial_changes import Cause, float_constant, node_at_text, replace_by

# no tensor of a file
_BIAS = "the bias of the model's BatchNorm at"
# of weights that are exchanged
_MOST_PAIRS = 2000


def try_parameters(exact: Float64Evaluator, place: int, parameters: Values) -> Iterator[tuple[Cause, NodeChange]]:
    """Take a parameter of the model in the place of a weight that a node reads, or a body inside it."""
    inputs = list(exact.nodes[place].input)
    for i, name in enumerate([*inputs, *(n for n in exact.read_names(exact.nodes[place]) if n not in inputs)]):
        stored = float_constant(exact, name)
        if stored is None or stored.size < 2:
            continue
        if exact.nodes[place].op_type in GATES and i in (1, 2, 3):
            for parameter, right in iter_packed_weights(exact.nodes[place].op_type, i, parameters):
                if right.shape == stored.shape and not np.array_equal(right, stored):
                    text = f"{node_at_text(exact, place)}: {_describe_weight(name, stored, parameter, right, None)}"
                    yield Cause("weights", text, place), NodeChange(inputs={(place, i): replace_by(right)})
        for parameter, value in parameters.items():
            if value.size != stored.size:
                continue
            for layout, right in (("", value), ("transposed ", value.T)):
                right = right.reshape(stored.shape)
                if not np.array_equal(right, stored):
                    said = _describe_weight(name, stored, parameter, right, value.T if not layout else value)
                    # What a body sees around it has no place among the inputs.
                    if i < len(inputs):
                        change = NodeChange(inputs={(place, i): replace_by(right)})
                    else:
                        change = NodeChange(given={name: right})
                    yield Cause("weights", f"{node_at_text(exact, place)}: {said}", place), change


def _describe_weight(name: str, stored: Array, parameter: str, right: Array, turned: Array | None) -> str:
    if _is_reversed(stored, right):
        return f"{name!r} is {parameter!r} with its channels reversed"
    same = (stored == right) | (np.isnan(stored) & np.isnan(right))
    differs = np.where(same, 0.0, np.nan_to_num(np.abs(stored - right), nan=np.inf))
    near = 1e-3 * np.abs(right).max(initial=0)
    if turned is not None and stored.ndim > 1 and np.abs(stored - turned.reshape(stored.shape)).max() <= near:
        return f"{name!r} is {parameter!r} transposed the other way"
    for kind in (np.float16, ml_dtypes.bfloat16):
        with np.errstate(over="ignore"):
            rounded = right.astype(kind)
        if np.array_equal(rounded.astype(np.float64), stored):
            return f"{name!r} is {parameter!r} rounded to {rounded.dtype.name}"
    where = tuple(int(i) for i in np.unravel_index(int(differs.argmax()), stored.shape))
    count = stored.size - int(same.sum())
    whose = "the model's" if name == parameter else repr(parameter)
    return (
        f"{name!r} is not {whose}: {stored[where]:.6g} where the model has {right[where]:.6g} ({count} of {stored.size}"
        " numbers differ)"
    )


def try_all_parameters(
    exact: Float64Evaluator, places: Sequence[int], parameters: Values, folds: Mapping[str, FoldedTensor]
) -> Iterator[tuple[Cause, NodeChange]]:
    """Take parameters in the place of all weights that are none, where there are several: no single one explains it.

    The nearest parameter may be one without its BatchNorm, though the BatchNorm is folded in from wrong statistics.

    Args:
        parameters: those in ``folds`` among them.
    """
    yield from _try_all_at_node(exact, places, parameters, folds)
    # Beside a wrong weight a bias of zeros is none of the model's: it is what a mean of 0 makes.
    strange = [place for place in places if any(_iter_foreign_weights(exact, place, parameters))]
    for transposed in (False, True):
        rows = [place for place in strange if (exact.nodes[place].op_type == "ConvTranspose") is transposed]
        pool = {name: fold.right for name, fold in folds.items() if fold.transposed in (None, transposed)}
        yield from _try_all_at_node(exact, rows, pool, folds)


def _try_all_at_node(
    exact: Float64Evaluator, places: Sequence[int], parameters: Values, folds: Mapping[str, FoldedTensor]
) -> Iterator[tuple[Cause, NodeChange]]:
    wrong: dict[tuple[int, int], Array] = {}
    biases: dict[int, Array] = {}
    told = list[str]()
    epsilons = set[tuple[float, float]]()
    for place in places:
        for i, name, stored in _iter_foreign_weights(exact, place, parameters):
            parameter = _find_nearest(name, stored, parameters)
            if parameter is None:
                continue
            right = _orient_parameter(parameters[parameter], stored)
            wrong[place, i] = right
            fold = folds.get(parameter)
            bias = None if fold is None else folds.get(f"no bias with the BatchNorm {fold.owner} folded")
            if bias is not None and list(exact.nodes[place].input) == [exact.nodes[place].input[0], name]:
                biases[place] = bias.right
            if fold is None or not fold.is_near(stored):
                if fold is None:
                    statistics = ""
                else:
                    statistics = fold.describe_statistics(stored)
                told.append(statistics or _describe_weight(name, stored, parameter, right, None))
                epsilon = None if fold is None else fold.find_epsilon(stored)
                epsilons.add((np.nan, np.nan) if fold is None or epsilon is None else (epsilon, fold.epsilon))
    if not wrong:
        return
    first = min(place for place, _ in wrong)
    change = NodeChange(
        inputs={at: replace_by(right) for at, right in wrong.items()},
        nodes={place: _add_bias_input(exact.nodes[place], place) for place in biases},
        given={f"{_BIAS} {place}": bias for place, bias in biases.items()},
    )
    (own, models), *others = epsilons or {(np.nan, np.nan)}
    if not others and np.isfinite(own):
        text = f"{node_at_text(exact, first)} has a BatchNorm folded with epsilon {own:.3g}, the model has {models:.3g}"
        yield Cause("epsilon", text, first), change
    elif len(wrong) + len(biases) > 1:
        told += [f"{node_at_text(exact, place)} has no bias, the model's mean or shift makes one" for place in biases]
        yield Cause("weights", f"{node_at_text(exact, first)}: {'; '.join(dict.fromkeys(told))}", first), change


def _add_bias_input(node: onnx.NodeProto, place: int) -> onnx.NodeProto:
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    changed.input.append(f"{_BIAS} {place}")
    return changed


def _iter_foreign_weights(exact: Float64Evaluator, place: int, parameters: Values) -> Iterator[tuple[int, str, Array]]:
    """Yield the weights of a node that are none of the parameters: place among the inputs, name, numbers."""
    for i, name in enumerate(exact.nodes[place].input):
        stored = float_constant(exact, name)
        if (
            stored is not None
            and stored.size > 1
            and not any(_is_equal_or_transposed(stored, value) for value in parameters.values())
        ):
            yield i, name, stored


def _orient_parameter(parameter: Array, stored: Array) -> Array:
    """Return a parameter in the layout of a weight: transposed, if it is nearer so."""
    own = parameter.reshape(stored.shape)
    if parameter.ndim > 1 and parameter.T.shape == stored.shape:
        return min(own, parameter.T, key=lambda laid: float(np.abs(stored - laid).max()))
    return own


def try_exchanged_directions(exact: Float64Evaluator, place: int) -> Iterator[tuple[Cause, NodeChange]]:
    """Take the weights of the two directions of a recurrent node in each other's place."""
    node = exact.nodes[place]
    first = float_constant(exact, node.input[1]) if node.op_type in GATES else None
    if first is not None and len(first) == 2:
        text = f"{node_at_text(exact, place)}: the weights of its two directions are in each other's place"
        read = [i for i, name in enumerate(node.input[:4]) if i and name]
        yield Cause("weights", text, place), NodeChange(inputs={(place, i): _swap_directions for i in read})


def _swap_directions(value: Array) -> Array:
    return value[::-1]


def try_exchanged_weights(exact: Float64Evaluator, places: Sequence[int]) -> Iterator[tuple[Cause, NodeChange]]:
    """Take two weights of one shape in each other's place."""
    stored: dict[tuple[int, int], Array] = {}
    for place in places:
        for i, name in enumerate(exact.nodes[place].input):
            value = float_constant(exact, name)
            if value is not None and value.size > 1:
                stored[place, i] = value
    for one, other in islice(itertools.combinations(stored, 2), _MOST_PAIRS):
        first = stored[one]
        second = stored[other]
        if first.shape != second.shape or np.array_equal(first, second):
            continue
        names = " and ".join(repr(exact.nodes[p].input[i]) for p, i in (one, other))
        text = f"{node_at_text(exact, one[0])} and {node_at_text(exact, other[0])}: {names} are in each other's place"
        yield Cause("weights", text, one[0]), NodeChange(inputs={one: replace_by(second), other: replace_by(first)})


def _is_equal_or_transposed(stored: Array, parameter: Array) -> bool:
    """Whether a weight is a parameter in either order of its dims."""
    if stored.size != parameter.size:
        return False
    return any(np.array_equal(laid.reshape(stored.shape), stored) for laid in (parameter, parameter.T))


def _find_nearest(name: str, stored: Array, parameters: Values) -> str | None:
    """The parameter that holds the same numbers in reverse, else the nearest; a name that is the same counts for half
    the distance: a weight that a BatchNorm is folded into keeps its name."""
    same_size = {n: _orient_parameter(v, stored) for n, v in parameters.items() if v.size == stored.size}

    def similarity_rank(n: str) -> tuple[bool, float, bool]:
        away = float(np.nan_to_num(np.abs(same_size[n] - stored), nan=np.inf).max())
        is_named = n == name or n.startswith(f"{name} with ")
        return not _is_reversed(stored, same_size[n]), away / 2 if is_named else away, not is_named

    return min(same_size, key=similarity_rank, default=None)


def _is_reversed(stored: Array, right: Array) -> bool:
    """Whether a vector, of whatever rank, holds the numbers of another in reverse."""
    is_vector = stored.size == max(stored.shape)
    return is_vector and np.array_equal(stored.reshape(-1)[::-1], right.reshape(-1))
