"""The changes that are tried in the place of what a file has, each with the kind of mistake that it would mend."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx

from ...runtimes.exact import Array, Change, Exact, NotEvaluated, Values
from .match import Spot
from .program import Program
from .recurrent import GATES, packed

EPSILONS = (1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
_LARGEST = 0.1  # of what is taken for an epsilon
_MOST_AXES = 4  # whose orders are all tried
_MOST_DIMS = 5  # of which each choice of axes is tried
Edit = Callable[[Array], Array]
_STATE = "the model's initial state"  # no tensor of a file
_ROOTS = ("Sqrt", "Reciprocal", "Pow")


@dataclass(frozen=True)
class Cause:
    """``kind``: "weights" | "epsilon" | "axis" | "ddof" | "left out" | "approximation" | "training mode" | "hidden row"
    | "overflow" | "underflow" | "factor" | "accuracy" | "optimizer" | "precision" | "added" |
    "preprocessing" | "stale weights" | "state" | "unknown"; ``text``
    says what was found; ``place``: of the node that has it, None where more than one may; ``instead``:
    the tensor that belongs in the place of that node's result."""

    kind: str
    text: str
    place: int | None = None
    instead: str = ""


def trials(exact: Exact, values: Values, spot: Spot, program: Program) -> Iterator[tuple[Cause, Change]]:
    """Yield every change of one node of a spot that is tried, with the cause that it would show.

    Args:
        values: of all that the spot reads and makes, as the file has them.
    """
    for place in spot.places:
        yield from _weights(exact, place, program.parameters(spot.operators))
        yield from _states(exact, place, values, program.parameters(spot.operators))
        yield from _epsilons(exact, place, program.numbers(spot.operators))
        yield from _ddof(exact, place, values)
        yield from _training(exact, place, program.parameters(spot.operators))
        yield from _attributes(exact, place, values)
        yield from _hidden_rows(exact, place, values)
        yield from _added(exact, place, values)


def _always(value: Array) -> Edit:
    return lambda _: value


def _filled(value: float) -> Edit:
    return lambda x: np.full_like(x, value)


def _plus(value: float) -> Edit:
    return lambda x: x + value


def _times(value: float) -> Edit:
    return lambda x: x * value


def named(exact: Exact, place: int) -> str:
    node = exact.nodes[place]
    return f"{node.op_type} {node.name!r}" if node.name else node.op_type


def _constant(exact: Exact, name: str) -> Array | None:
    try:
        value = exact.value(name, {}) if name in exact.constants else None
    except NotEvaluated:
        return None
    return value if value is not None and value.dtype.kind == "f" else None


def _weights(exact: Exact, place: int, parameters: Values) -> Iterator[tuple[Cause, Change]]:
    for i, name in enumerate(exact.nodes[place].input):
        stored = _constant(exact, name)
        if stored is None or stored.size < 2:
            continue
        if exact.nodes[place].op_type in GATES and i in (1, 2, 3):
            for parameter, right in packed(exact.nodes[place].op_type, i, parameters):
                if right.shape == stored.shape and not np.array_equal(right, stored):
                    text = f"{named(exact, place)}: {_weight_said(name, stored, parameter, right, None)}"
                    yield Cause("weights", text, place), Change(inputs={(place, i): _always(right)})
        for parameter, value in parameters.items():
            if value.size != stored.size:
                continue
            for layout, right in (("", value), ("transposed ", value.T)):
                right = right.reshape(stored.shape)
                if not np.array_equal(right, stored):
                    text = (
                        f"{named(exact, place)}:"
                        f" {_weight_said(name, stored, parameter, right, value.T if not layout else value)}"
                    )
                    yield Cause("weights", text, place), Change(inputs={(place, i): _always(right)})


def _weight_said(name: str, stored: Array, parameter: str, right: Array, turned: Array | None) -> str:
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
    return (
        f"{name!r} is not {parameter!r}: {stored[where]:.6g} where that is {right[where]:.6g} ({count} of {stored.size}"
        " numbers differ)"
    )


def _epsilons(exact: Exact, place: int, numbers: Sequence[float]) -> Iterator[tuple[Cause, Change]]:
    node = exact.nodes[place]
    tried = dict.fromkeys([*(n for n in numbers if 0 < n < _LARGEST), *EPSILONS])
    own = next((a for a in node.attribute if a.name == "epsilon"), None)
    for epsilon in tried:
        if own is not None and epsilon != own.f:
            text = f"{named(exact, place)} has epsilon {own.f:.3g}, the model has {epsilon:.3g}"
            yield Cause("epsilon", text, place), Change(nodes={place: _with(node, "epsilon", epsilon)})
        if node.op_type in ("Add", "Max", "Clip"):
            for i, name in enumerate(node.input):
                stored = _constant(exact, name)
                if (
                    stored is not None
                    and stored.size == 1
                    and abs(stored.item()) < _LARGEST
                    and stored.item() != epsilon
                ):
                    was = stored.item()
                    gone = (
                        f" (it vanished: {exact.types[name]} can't hold it)" if not was and name in exact.types else ""
                    )
                    text = f"{named(exact, place)} has epsilon {was:.3g}, the model has {epsilon:.3g}{gone}"
                    yield Cause("epsilon", text, place), Change(inputs={(place, i): _filled(epsilon)})
        if node.op_type in _ROOTS:
            text = f"the epsilon {epsilon:.3g} is missing before {named(exact, place)}"
            yield Cause("epsilon", text, place), Change(inputs={(place, 0): _plus(epsilon)})


def _ddof(exact: Exact, place: int, values: Values) -> Iterator[tuple[Cause, Change]]:
    """A variance over n − 1 in the place of one over n (torch.var's unbiased), or the other way: gamma times the root
    of the ratio."""
    node = exact.nodes[place]
    if node.op_type in _ROOTS:
        sizes = {d for value in values.values() if value.dtype.kind == "f" for d in value.shape if d > 1}
        for n, (text, power) in itertools.product(sorted(sizes), (("a biased", 1), ("an unbiased", -1))):
            other = "an unbiased" if power == 1 else "a biased"
            reason = (
                f"the variance before {named(exact, place)} is {text} one over {n} numbers, the model has {other} one"
            )
            yield Cause("ddof", reason, place), Change(inputs={(place, 0): _times((n / (n - 1)) ** power)})
    elif node.op_type == "LayerNormalization" and len(node.input) > 1:
        x = values.get(node.input[0])
        if x is None:
            return
        axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
        n = math.prod(x.shape[axis:])
        for text, power in (("a biased", -1), ("an unbiased", 1)) if n > 1 else ():
            other = "an unbiased" if power == -1 else "a biased"
            reason = f"{named(exact, place)} has {text} variance over {n} numbers, the model {other} one"
            yield Cause("ddof", reason, place), Change(inputs={(place, 1): _times((n / (n - 1)) ** (power / 2))})


def _states(exact: Exact, place: int, values: Values, parameters: Values) -> Iterator[tuple[Cause, Change]]:
    """The initial state of a recurrent layer that the file leaves out: zeros, by ONNX."""
    node = exact.nodes[place]
    last = {"LSTM": 6, "GRU": 5, "RNN": 5}.get(node.op_type, 0)
    for i in range(5, last + 1):
        stated = node.input[i] if len(node.input) > i else ""
        start = _starting(exact, stated, values)
        if (stated and (start is None or start.any())) or node.input[0] not in values:
            continue
        with_state = onnx.NodeProto()
        with_state.CopyFrom(node)
        with_state.input.extend([""] * (i + 1 - len(node.input)))
        with_state.input[i] = _STATE
        for name, value in parameters.items():
            for state in _as_states(exact, node, value):
                text = f"{named(exact, place)} starts from zeros, the model from {name!r}"
                batch = values[node.input[0]].shape[1]
                whole = np.broadcast_to(state, (len(state), batch, state.shape[2]))
                yield Cause("state", text, place), Change(nodes={place: with_state}, given={_STATE: whole})


def _starting(exact: Exact, name: str, values: Values) -> Array | None:
    """A state that is computed or stored; None where it is not known."""
    return values[name] if name in values else _constant(exact, name)


def _as_states(exact: Exact, node: onnx.NodeProto, value: Array) -> Iterator[Array]:
    """``value`` as the state of all directions, [directions, batch, size], of each layer that it may be for."""
    recurrence = _constant(exact, node.input[2])
    if recurrence is None or value.ndim != 3 or value.shape[2] != recurrence.shape[2]:
        return
    directions = len(recurrence)
    for first in range(0, len(value), directions):
        yield value[first : first + directions]


def _training(exact: Exact, place: int, parameters: Values) -> Iterator[tuple[Cause, Change]]:
    """Eval mode in the place of training mode (ONNX: BatchNormalization 14, Dropout 12)."""
    node = exact.nodes[place]
    if node.op_type == "BatchNormalization" and any(a.name == "training_mode" and a.i for a in node.attribute):
        text = (
            f"{named(exact, place)} is in training mode: it takes the statistics of the batch, the model its running"
            " ones; export the model after eval()"
        )
        changed = _with(node, "training_mode", 0)
        # The other outputs are the new running statistics, which eval mode does not give.
        del changed.output[1:]
        yield Cause("training mode", text, place), Change(nodes={place: changed})
        # An export in training mode runs the model, which moves its running statistics: the model's own are tried too.
        vectors = [value for value in parameters.values() if value.ndim == 1]
        for center, variance in itertools.permutations(vectors, 2):
            inputs = {(place, 3): _always(center), (place, 4): _always(variance)}
            yield Cause("training mode", text, place), Change(nodes={place: changed}, inputs=inputs)
    if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
        text = f"{named(exact, place)} is in training mode: it drops at random; export the model after eval()"
        yield Cause("training mode", text, place), Change(inputs={(place, 2): np.zeros_like})


def _attributes(exact: Exact, place: int, values: Values) -> Iterator[tuple[Cause, Change]]:
    """Other axes, other orders of axes, the other form of an approximation."""
    node = exact.nodes[place]
    rank = next((values[i].ndim for i in node.input if i in values), 0)
    for a in node.attribute:
        value = onnx.helper.get_attribute_value(a)
        others: list[object] = []
        kind = "axis"
        if a.name == "axis":
            others = [i for i in range(rank) if i != value % max(rank, 1)]
        elif a.name == "perm" and len(value) <= _MOST_AXES:
            others = [p for p in itertools.permutations(range(len(value))) if p != tuple(value)]
        elif a.name == "axes" and 0 < rank <= _MOST_DIMS:
            every = itertools.combinations(range(rank), len(value))
            others = [list(axes) for axes in every if list(axes) != sorted(i % rank for i in value)]
        elif a.name == "approximate":
            kind, others = "approximation", ["none" if value == b"tanh" else "tanh"]
        for other in others:
            was = value.decode() if isinstance(value, bytes) else list(value) if isinstance(value, Sequence) else value
            told = list(other) if isinstance(other, tuple) else other
            yield (
                Cause(kind, f"{named(exact, place)} has {a.name} {was}, with {told} it is right", place),
                Change(nodes={place: _with(node, a.name, other)}),
            )
    if node.op_type == "Gelu" and not node.attribute:
        yield (
            Cause("approximation", f"{named(exact, place)} is exact, the model's is the tanh form", place),
            Change(nodes={place: _with(node, "approximate", "tanh")}),
        )
    axes = _axes(exact, node)
    if axes is None or rank > _MOST_DIMS:
        return
    own = [int(axis) for axis in axes]
    for other in itertools.combinations(range(rank), len(own)):
        if sorted(axis % rank for axis in own) != list(other):
            text = f"{named(exact, place)} has axes {own}, with {list(other)} it is right"
            yield Cause("axis", text, place), Change(inputs={(place, 1): _always(np.array(other))})


def _hidden_rows(exact: Exact, place: int, values: Values) -> Iterator[tuple[Cause, Change]]:
    """Rows of an attention that the mask hides whole, where torch gives 0 (`masked_rows`): the softmax is 0 there for
    all that read it."""
    node = exact.nodes[place]
    axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
    if node.op_type != "Softmax" or node.input[0] not in values or node.output[0] not in values:
        return
    scores, made = values[node.input[0]], values[node.output[0]]
    lowest = float(ml_dtypes.finfo(exact.types.get(node.input[0], np.dtype(np.float32))).min)
    hidden = scores.max(axis, keepdims=True, initial=-math.inf) < lowest / 2
    if not hidden.any():
        return
    readers = [
        (p, i) for p, reader in enumerate(exact.nodes) for i, name in enumerate(reader.input) if name == node.output[0]
    ]
    what = "NaN" if np.isnan(np.where(hidden, made, 0)).any() else "the mean of all values"
    text = (
        f"{named(exact, place)}: the mask hides {int(hidden.sum())} of {hidden.size} rows whole, where the model gives"
        f" 0 and the file {what}; its export guards such rows wrongly (docs/huggingface.md, Masks): export the model"
        " with normdeploy, or leave each row a 1"
    )
    yield (
        Cause("hidden row", text, place),
        Change(inputs=dict.fromkeys(readers, lambda value: np.where(hidden, 0.0, value))),
    )


def _added(exact: Exact, place: int, values: Values) -> Iterator[tuple[Cause, Change]]:
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


def _axes(exact: Exact, node: onnx.NodeProto) -> Array | None:
    """The axes that newer opsets give as the second input."""
    if not node.op_type.startswith("Reduce") or len(node.input) < 2 or node.input[1] not in exact.constants:
        return None
    return exact.value(node.input[1], {})


def _with(node: onnx.NodeProto, name: str, value: object) -> onnx.NodeProto:
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    kept = [a for a in changed.attribute if a.name != name]
    del changed.attribute[:]
    changed.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])
    return changed
