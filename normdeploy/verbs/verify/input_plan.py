"""Plan the inputs of a comparison: the user's inputs, or generated inputs within the budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ...graphs.graph_thresholds import find_thresholds
from ...inputs.input_cases import LENIENT, SMALL_IN_HALF, InputCase, NamedInputs, check_user_cases, small_value_cases
from ...model import LoadedModel
from ...runtimes.tensor_spec import as_numpy
from ...storage.onnx_files import load_small_weights
from ...types import Array
from .compute_budget import ComparisonBudget, InnerSizes, drop_large_cases, shrink_usual_sizes
from .decision_thresholds import find_model_thresholds, grid_cases, has_decisions, threshold_cases
from .edge_cases import InputPlan, IntegerHints, has_unknown_range, make_affordable_cases
from .reference_models import FileModel, Original
from .runtime_candidates import FLOATS, HALF_TYPES, ComparedFile

# Maximum number of thresholds that are tried for one input of one file.
_THRESHOLDS = 8


def plan_inputs(
    model: Original,
    compared: Sequence[ComparedFile],
    seeds: int,
    own: Sequence[NamedInputs] | None,
    most: int | None,
    budget: ComparisonBudget,
) -> InputPlan:
    """Plan the inputs to compare files with a model on, as ``verify`` documents.

    Args:
        seeds: number of random inputs at the usual sizes.
        own: the user's inputs; None to generate them.
        most: limit on the elements of the largest generated input; None for the default.

    Returns:
        the cases, and the sizes that exceed the budget.
    """
    insides = [InnerSizes(load_small_weights(s.path), s.inputs, model.inputs) for s in compared if not s.runtime]
    # A reference file is included, because an optimized file may not contain the reference's largest tensor.
    if isinstance(model, FileModel):
        insides.append(InnerSizes(model.proto, {}, model.inputs))
    usual = shrink_usual_sizes(model, insides, budget)
    opt = usual.usual_sizes
    more = list[InputCase]()
    if own is not None:
        plan = InputPlan(tuple(check_user_cases(model, own, _half_input_types(compared))))
    else:
        plan = make_affordable_cases(
            usual, seeds, most, quantized=are_quantized(compared), integers=_integer_hints(model, compared)
        )
        halves = sorted({FLOATS[kind] for s in compared for kind in s.computing.halves})
        if halves:
            more += small_value_cases(usual, seeds, SMALL_IN_HALF)
        more += threshold_cases(usual, opt, seeds, find_model_thresholds(model), halves)
        if has_decisions(model):
            more += grid_cases(usual, opt, seeds)
    cases = [case for case in (*plan.cases, *more) if case.kind not in LENIENT or not are_quantized(compared)]
    cases, too_large = drop_large_cases(cases, opt, insides, budget)
    return replace(plan, cases=tuple(_mark_unpromised(model, cases)), too_large=tuple(too_large))


def _integer_hints(model: Original, compared: Sequence[ComparedFile]) -> IntegerHints:
    whole = {spec.name for spec in model.inputs if spec.dtype.startswith(("int", "uint"))}
    if not whole:
        return IntegerHints()
    if isinstance(model, FileModel):
        own = [(model.proto, dict[str, str]())]
    else:
        own = []
    files = [(load_small_weights(s.path), s.inputs) for s in compared if not s.runtime]
    named: dict[str, list[int]] = {}
    taken = set[str]()
    # Thresholds of the model's own file come first, because only the first few are tried.
    for proto, names in (*own, *files):
        edges = find_thresholds(proto)
        used = {*edges.sized, *edges.limits}
        taken |= {names.get(theirs, theirs) for theirs in used}
        for theirs, values in edges.values.items():
            ours = names.get(theirs, theirs)
            if ours in whole and theirs not in used:
                found = named.setdefault(ours, [])
                found += [v for v in map(math.floor, values[:_THRESHOLDS]) if v not in found]
    if any(map(has_unknown_range, model.inputs)):
        examples = _example_inputs(model)
    else:
        examples = {}
    return IntegerHints(named, examples, whole - taken)


def _example_inputs(model: Original) -> dict[str, Array]:
    """Return the inputs that the program was traced with, by name; {} if they were not kept."""
    if not isinstance(model, LoadedModel) or model.program.example_inputs is None:
        return {}
    leaves = [leaf for leaf in pytree.tree_leaves(model.program.example_inputs) if isinstance(leaf, torch.Tensor)]
    if len(leaves) != len(model.inputs):
        return {}
    return {spec.name: as_numpy(leaf) for spec, leaf in zip(model.inputs, leaves, strict=True)}


def _mark_unpromised(model: Original, cases: Sequence[InputCase]) -> Iterable[InputCase]:
    """If sizes are guessed, mark generated cases as unpromised: the model need not accept these sizes."""
    guessed = isinstance(model, FileModel) and model.guessed
    return (replace(case, promised=False) if guessed and case.kind != "given" else case for case in cases)


def _half_input_types(compared: Sequence[ComparedFile]) -> dict[str, set[np.dtype]]:
    """Return, for each input, the half-precision dtypes that the files have for this input."""
    kinds: dict[str, set[np.dtype]] = {}
    for name, kind in (pair for subject in compared for pair in subject.types.items()):
        if kind in HALF_TYPES:
            kinds.setdefault(name, set()).add(kind)
    return kinds


def are_quantized(compared: Sequence[ComparedFile]) -> bool:
    """Check whether every file has an error budget, which covers only ordinary numbers.

    Returns:
        True if all files have one.
    """
    return all(subject.steps is not None for subject in compared)
