"""The inputs of a comparison: generated within what it may spend, or the user's own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ...graphs.edges import edges_of
from ...model import Model
from ...runtimes.tensors import as_numpy
from ...storage.files import load_small_weights
from .battery import Battery, Integers, battery_of, is_open
from .candidates import FLOATS, HALF_TYPES, File, Subject, subjects
from .cases import LENIENT, SMALL_IN_HALF, Case, Given, given_to, small
from .names import Map, parse_map
from .originals import FileModel, Original, outputs_of, rounds_itself, stores_codes, unit_roundoff, unused_inputs
from .spending import Budget, InnerSizes, affordable, with_usual_sizes
from .thresholds import at_thresholds, has_decisions, on_grid, thresholds_of

_THRESHOLDS = 8  # of one input of one file that are tried


@dataclass(frozen=True)
class Plan:
    """``left_out``: sizes that cost too much, each with the reason; ``too_large``: those whose inner tensors do;
    ``most``: the input elements up to which sizes are run."""

    cases: tuple[Case, ...]
    left_out: tuple[str, ...]
    too_large: tuple[str, ...]
    most: int


def subjects_of(model: Original, files: Iterable[File], names: Map | None) -> tuple[list[Subject], list[str]]:
    """Return the files that are compared with a model, and notes on them.

    Args:
        names: as for ``verify``.
    """
    return subjects(
        files,
        model,
        outputs_of(model),
        parse_map(names or (), model),
        ordered=names is not None,
        own_unit=unit_roundoff(model),
        rounding_model=rounds_itself(model),
        unused=unused_inputs(model),
        stores_codes=stores_codes(model),
    )


def planned(
    model: Original,
    compared: Sequence[Subject],
    seeds: int,
    own: Sequence[Given] | None,
    most: int | None,
    budget: Budget,
) -> Plan:
    """Return the inputs on which files are compared with a model, as ``verify`` describes them."""
    insides = [InnerSizes(load_small_weights(s.path), s.inputs, model.inputs) for s in compared if not s.runtime]
    # A file that was optimized may have no trace of the largest tensor of its reference.
    if isinstance(model, FileModel):
        insides.append(InnerSizes(model.proto, {}, model.inputs))
    usual = with_usual_sizes(model, insides, budget)
    opt = {name: dim.opt for name, dim in usual.dims.items()}
    plan = (
        battery_of(usual, seeds, most, quantized=are_quantized(compared), integers=_integers(model, compared))
        if own is None
        else Battery(tuple(given_to(model, own, _halves(compared))), (), 0)
    )
    more = small(usual, seeds, SMALL_IN_HALF) if own is None and any(s.computing.halves for s in compared) else []
    if own is None:
        halves = sorted({FLOATS[kind] for s in compared for kind in s.computing.halves})
        more += at_thresholds(usual, opt, seeds, thresholds_of(model), halves)
        more += on_grid(usual, opt, seeds) if has_decisions(model) else ()
    cases = [case for case in (*plan.cases, *more) if case.kind not in LENIENT or not are_quantized(compared)]
    cases, too_large = affordable(cases, opt, insides, budget)
    return Plan(tuple(_unpromised(model, cases)), plan.left_out, tuple(too_large), plan.most)


def _integers(model: Original, compared: Sequence[Subject]) -> Integers:
    whole = {spec.name for spec in model.inputs if spec.dtype.startswith(("int", "uint"))}
    if not whole:
        return Integers()
    own = [(model.proto, dict[str, str]())] if isinstance(model, FileModel) else []
    files = [(load_small_weights(s.path), s.inputs) for s in compared if not s.runtime]
    named: dict[str, list[int]] = {}
    taken = set[str]()
    # What the model's own file compares an input with comes first: the number of those that are tried is limited.
    for proto, names in (*own, *files):
        edges = edges_of(proto)
        used = {*edges.sized, *edges.limits}
        taken |= {names.get(theirs, theirs) for theirs in used}
        for theirs, values in edges.values.items():
            ours = names.get(theirs, theirs)
            if ours in whole and theirs not in used:
                found = named.setdefault(ours, [])
                found += [v for v in map(math.floor, values[:_THRESHOLDS]) if v not in found]
    examples = _example(model) if any(map(is_open, model.inputs)) else {}
    return Integers(named, examples, whole - taken)


def _example(model: Original) -> dict[str, np.ndarray]:
    """Return the inputs that the program was traced with; {} where they are not kept."""
    if not isinstance(model, Model) or model.program.example_inputs is None:
        return {}
    leaves = [leaf for leaf in pytree.tree_leaves(model.program.example_inputs) if isinstance(leaf, torch.Tensor)]
    if len(leaves) != len(model.inputs):
        return {}
    return {spec.name: as_numpy(leaf) for spec, leaf in zip(model.inputs, leaves, strict=True)}


def _unpromised(model: Original, cases: Sequence[Case]) -> Iterable[Case]:
    """Where sizes are guessed, the model need not take them all."""
    guessed = isinstance(model, FileModel) and model.guessed
    return (replace(case, promised=False) if guessed and case.kind != "given" else case for case in cases)


def _halves(compared: Sequence[Subject]) -> dict[str, set[np.dtype]]:
    """Input -> the half types in which a file takes it."""
    kinds: dict[str, set[np.dtype]] = {}
    for name, kind in (pair for subject in compared for pair in subject.types.items()):
        if kind in HALF_TYPES:
            kinds.setdefault(name, set()).add(kind)
    return kinds


def are_quantized(compared: Sequence[Subject]) -> bool:
    """Whether every file is, with a budget of its steps, which is of usual numbers alone."""
    return all(subject.steps is not None for subject in compared)
