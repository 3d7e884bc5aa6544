"""Find epsilons of a file that the model does not contain.

A comparison of outputs may not detect them: the input of a norm after an embedding or a bias can't be made small, so
another epsilon changes the output less than rounding does. Therefore epsilons are looked up in the model, as weights
are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from torch.utils._pytree import tree_leaves

from ...graphs.graph_thresholds import distinct_numbers, node_constant, small_constants
from ...runtimes.float64_evaluator import inline_functions
from ...runtimes.torch_runners import lifted_values
from ...storage.onnx_files import load_small_weights
from .reference_models import FileModel, Original
from .runtime_candidates import HALF_TYPES, ComparedFile
from .wording import list_some

# Largest number that is treated as an epsilon.
_LARGEST = 0.1
# Relative tolerance, because a file stores epsilons in float32.
_SAME = 1e-6
# Default epsilon of ONNX's normalizations.
_DEFAULT = 1e-5
_ROOTS = frozenset({"Sqrt", "Pow"})
_NAMED = 3


def find_foreign_epsilons(model: Original, subjects: Sequence[ComparedFile]) -> list[str]:
    """Find the norms' epsilons that a file has and the model does not.

    Only powers of ten are reported, because a folded scale turns an epsilon into another number.

    Returns:
        one note for each file with such epsilons.
    """
    known = sorted(_model_numbers(model))
    if isinstance(model, FileModel):
        source = model.label
    else:
        source = "the model's source"
    notes = []
    for subject in (s for s in subjects if not s.runtime):
        stated = dict(_iter_epsilons(load_small_weights(subject.path)))
        foreign = {n: value for n, value in stated.items() if _is_round(value) and not _is_among(value, known)}
        if foreign and known:
            some = list_some([f"{value:g} of {node!r}" for node, value in foreign.items()], _NAMED)
            near = ", ".join(f"{value:g}" for value in known[:_NAMED])
            notes.append(
                f"{subject.label}: the epsilon {some} is not one of the model's ({near}). A wrong epsilon need"
                f" not show in the outputs: compare it with {source}"
            )
    return notes


def _is_round(value: float) -> bool:
    """Return whether a number is a power of ten. An epsilon in a model's code is a power of ten, whereas an epsilon
    with a folded scale seldom is.
    """
    return value > 0 and abs(value / 10.0 ** round(math.log10(value)) - 1) <= _SAME


def _is_among(value: float, known: Sequence[float]) -> bool:
    with np.errstate(all="ignore"):
        halves = [float(np.asarray(other).astype(half)) for other in known for half in HALF_TYPES]
    return any(abs(value - other) <= _SAME * other for other in (*known, *halves))


def _iter_epsilons(proto: onnx.ModelProto) -> Iterator[tuple[str, float]]:
    """Yield (node, epsilon) for each attribute ``epsilon`` and for each small number that is added before a root."""
    proto = inline_functions(proto)
    constants = small_constants(proto.graph, {})
    rooted = {name for node in proto.graph.node if node.op_type in _ROOTS for name in node.input[:1]}
    for node in proto.graph.node:
        if (value := node_constant(node, constants)) is not None:
            constants[node.output[0]] = value
        title = node.name or node.output[0]
        yield from ((title, a.f) for a in node.attribute if a.name == "epsilon")
        if node.op_type != "Add" or node.output[0] not in rooted:
            continue
        for name in node.input:
            added = distinct_numbers(constants.get(name))
            if len(added) == 1 and 0 < added[0] <= _LARGEST:
                yield title, added[0]


def _model_numbers(model: Original) -> set[float]:
    """Return all numbers in a model that may be epsilons."""
    if isinstance(model, FileModel):
        proto = inline_functions(model.proto)
        constants = small_constants(proto.graph, {})
        values = [a.f for node in proto.graph.node for a in node.attribute if a.type == onnx.AttributeProto.FLOAT]
        values += [v for node in proto.graph.node for v in distinct_numbers(node_constant(node, constants))]
        values += [v for array in constants.values() for v in distinct_numbers(array)]
        defaults = any(
            node.op_type.endswith("Normalization") and all(a.name != "epsilon" for a in node.attribute)
            for node in proto.graph.node
        )
        if defaults:
            values += [_DEFAULT]
    else:
        nodes = [node for node in model.program.graph.nodes if node.op == "call_function"]
        arguments = [leaf for node in nodes for leaf in tree_leaves((node.args, dict(node.kwargs)))]
        schemas = [node.target._schema for node in nodes if hasattr(node.target, "_schema")]
        arguments += [argument.default_value for schema in schemas for argument in schema.arguments]
        values = [leaf for leaf in arguments if isinstance(leaf, float)]
        values += [v for value in lifted_values(model.program).values() for v in _scalar_values(value)]
        # Without an epsilon, torch's rms_norm uses the machine epsilon of the dtype.
        values += [torch.finfo(torch.float32).eps for schema in schemas if "rms_norm" in schema.name]
    return {v for v in values if 0 < v <= _LARGEST}


def _scalar_values(value: Any) -> list[float]:
    """Return the number in a tensor of one element; otherwise no numbers."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return []
    return distinct_numbers(np.asarray(value.detach().float()))
