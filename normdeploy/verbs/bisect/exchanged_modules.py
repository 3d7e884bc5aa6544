"""Find two modules of the same kind whose weights are exchanged in a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import onnx
from onnx import numpy_helper

from ...precision.type_conversion import initializer_values
from ...storage.proto_traversal import copy_model
from ...types import Arrays
from ..verify.reference_models import Original
from .folded_norms import fold_parameters
from .reference_program import ReferenceProgram
from .stale_weights import file_weights, holds_same_numbers, is_rounded_copy, model_parameters
from .trial_changes import Cause


@dataclass(frozen=True, kw_only=True)
class ModuleExchange:
    """File with the weights of two modules exchanged.

    Attributes:
        names: for each of the two modules, the first of its weights that the file reads.
    """

    proto: onnx.ModelProto
    names: tuple[str, str]
    cause: Cause


def iter_exchanges(model: Original, program: ReferenceProgram, proto: onnx.ModelProto) -> Iterator[ModuleExchange]:
    """Exchange the weights of two modules if the file reads them in another order than the model.

    Pairs of modules with the most parameters come first.

    Yields:
        The changed file and its cause.
    """
    parameters = model_parameters(model)
    stored = parameters | {name: fold.right for name, fold in fold_parameters(model, parameters).items()}
    kept = file_weights(proto)
    sources = {
        name: [source for source, value in stored.items() if holds_same_numbers(value, kept[name])]
        for name in dict.fromkeys(name for node in proto.graph.node for name in node.input)
        if name in kept
    }
    # Weights that several modules share, such as biases of 0, do not identify a module.
    first = {found[0]: name for name, found in reversed(sources.items()) if len(found) == 1}
    ours = {name: place for place, name in enumerate(reversed(first))}
    theirs = program.first_reader_places()
    for one, other in _iter_module_pairs(parameters):
        own = _first_read(one, ours)
        others = _first_read(other, ours)
        if not own or not others:
            continue
        is_before = theirs.get(_first_read(one, theirs), 0) < theirs.get(_first_read(other, theirs), 0)
        if is_before != (ours[own] < ours[others]):
            text = (
                f"the modules {one!r} and {other!r} are exchanged: {first[others]!r} is {others!r}, but the"
                f" model reads {one!r} there, and {first[own]!r} is {own!r}"
            )
            changed = _exchange_weights(proto, one, other, sources, stored)
            yield ModuleExchange(proto=changed, names=(first[others], first[own]), cause=Cause("order", text))


def _first_read(module: str, places: Mapping[str, int]) -> str:
    """Return the first weight of a module that is read; "" if no weight is read."""
    return min((name for name in places if _belongs_to(name, module)), key=places.__getitem__, default="")


def _belongs_to(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def _iter_module_pairs(parameters: Arrays) -> Iterator[tuple[str, str]]:
    """Yield pairs of modules whose parameters have the same names and shapes, the pairs with the most parameters
    first.
    """
    inside: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, value in parameters.items():
        parts = name.split(".")
        for count in range(1, len(parts)):
            inside.setdefault(".".join(parts[:count]), {})[".".join(parts[count:])] = value.shape
    for one, other in combinations(sorted(inside, key=lambda module: -len(inside[module])), 2):
        if inside[one] == inside[other]:
            yield one, other


def _exchange_weights(
    proto: onnx.ModelProto, one: str, other: str, sources: Mapping[str, list[str]], stored: Arrays
) -> onnx.ModelProto:
    changed = copy_model(proto)
    for tensor in changed.graph.initializer:
        for source in sources.get(tensor.name, ()):
            # The name of a folded tensor contains two names: those of the parameter and of its BatchNorm.
            moved = " ".join(_rename_to_module(word, one, other) for word in source.split(" "))
            if moved == source or moved not in stored:
                continue
            was = initializer_values(tensor)
            if is_rounded_copy(stored[source], was):
                right = stored[moved]
            else:
                right = stored[moved].T
            tensor.CopyFrom(numpy_helper.from_array(right.reshape(was.shape).astype(was.dtype), tensor.name))
            break
    return changed


def _rename_to_module(name: str, one: str, other: str) -> str:
    """Translate a name in one module to the corresponding name in the other module."""
    for old, new in ((one, other), (other, one)):
        if name == old or _belongs_to(name, old):
            return f"{new}{name.removeprefix(old)}"
    return name
