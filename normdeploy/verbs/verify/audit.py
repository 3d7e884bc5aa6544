"""Compares a file's weights with the model's: each floating initializer with the parameters, buffers and constants.

A weight is the model's where it is bit for bit one of its tensors, cast to the file's type, in another shape or with
its dims in another order, or is put together from whole rows of such tensors (slices, packed and reordered gates). What
is not is one of these:

- folded: a tensor of the model times one number for each channel, up to rounding; or a shift that a BatchNorm makes of
  a bias.
- altered: next to a tensor of the model that the file has nowhere else, with some elements changed or all of them by a
  little. It fails.
- computed: like nothing in the model, as the constants are that an exporter computes; or whole tensors of the model
  beside such numbers (``torch.cdist`` packs a codebook, its squares and ones into one).

A comparison of outputs does not see one weight off by 1e-4 among thousands; this does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from ...evaluate.core import is_quantized_type
from ...graphs.protos import module
from ...graphs.qoperators import opened
from ...graphs.quantized import is_quantized, steps
from ...model import Model
from ...precision.retype import values
from .arranged import arrangements
from .codes import audit_codes
from .constant_nodes import constant_results, is_rounding_of
from .derived import Format, derivation
from .equal_tensors import EqualTensors, cast
from .merged import merged
from .originals import FileModel, Original
from .rows import MOSTLY, Rows, squeezed
from .shifts import FixedShift, Shift, by_size
from .spending import Clock, OutOfTime
from .stored import initializers, shifts_of, stored_in
from .weight_origin import Origin, Weight, are_factors, origin_of, smoothed_from

Array = np.ndarray[Any, Any]


def audit(model: Original, proto: onnx.ModelProto, label: str, clock: Clock | None = None) -> list[Weight]:
    """Every floating initializer of ``proto`` (its weights loaded) that is no tensor of ``model``; those altered
    first.

    What is no tensor of the model as it stands is traced to one until ``clock``, if any, is over.
    """
    clock = Clock(float("inf")) if clock is None else clock
    untraced = 0
    stored = stored_in(model)
    rows = Rows(stored.values())
    equals = EqualTensors(stored)
    unknown: list[tuple[onnx.TensorProto, Array, float]] = []
    arranged: list[tuple[onnx.TensorProto, Array]] = []
    placed, apart = set[str](), steps(proto) | steps(opened(proto))  # the error budget judges the steps
    for tensor in initializers(proto.graph):
        array = values(tensor)
        if tensor.name in apart or not array.size or array.dtype.kind in "iubSOc" or is_quantized_type(array.dtype):
            continue
        same = equals.names(array)
        placed.update(same)
        if same:
            continue
        if clock.is_over():
            untraced += 1
            continue
        share = rows.share(array)
        if share < 1:
            unknown.append((tensor, array, share))
        else:
            arranged.append((tensor, array))
    missing = {name: value for name, value in stored.items() if name not in placed}
    every = list(shifts_of(model, stored))
    if not isinstance(model, FileModel):
        every += [
            FixedShift(Shift(source, w.reshape(-1), size.reshape(-1))) for source, w, size in merged(model, stored)
        ]
    shifts = by_size(every)
    modules = _modules(proto, stored)
    inverses = [a.reshape(-1) for _, a, _ in unknown if is_quantized(proto) and are_factors(a)]
    remarks = []
    for tensor, array in arranged:
        for name, count in _moved(array, missing):
            reason = f"{count} of its rows stand elsewhere than in {name}"
            remarks.append(
                Weight(label, tensor.name, modules.get(tensor.name, ""), Origin.ALTERED, name, 0.0, reason, array.size)
            )
    constants: list[tuple[str, Array]] | None = None
    for place, (tensor, array, share) in enumerate(unknown):
        weight = Weight(label, tensor.name, modules.get(tensor.name, ""), Origin.COMPUTED, elements=array.size)
        try:
            clock.require_time()
            smoothed = smoothed_from(weight, array, inverses, missing)
            weight = origin_of(weight, array, missing, shifts, clock) if smoothed is None else smoothed
            if weight.origin is Origin.COMPUTED and share >= MOSTLY and rows.lacks(array, missing.values()):
                parameter = f"{share:.1%} of it is put together from rows of the model's tensors, the rest is not"
                weight = replace(weight, origin=Origin.ALTERED, reason=parameter)
            if weight.origin is Origin.ALTERED and smoothed is None:
                weight = _explained(weight, array, stored, rows, clock)
        except OutOfTime:
            # An accusation that time did not suffice to take back is none.
            untraced += len(unknown) - place
            break
        if weight.origin is Origin.ALTERED and isinstance(model, Model):
            constants = list(constant_results(model)) if constants is None else constants
            weight = _computed_by_model(weight, array, constants)
        remarks.append(weight)
    for name, elements, parameter, code in audit_codes(stored, proto, clock):
        remarks.append(
            Weight(
                label,
                name,
                modules.get(name, ""),
                Origin.ALTERED,
                parameter,
                abs(code.value - code.expected),
                f"{code.count} of {elements} codes are not those of {parameter}, rounded: {code.value:.4g} at"
                f" {list(code.place)} where the model has {code.expected:.4g}, {code.steps:.3g} steps away",
                elements,
            )
        )
    if untraced:
        clock.weights[label] = untraced
    return sorted(remarks, key=bool)


def _moved(array: Array, missing: Mapping[str, Array]) -> Iterator[tuple[str, int]]:
    """The first parameter of which most rows stand where they should and the others do not, with their number.

    Gates in another order move more than half of their rows.
    """
    for name, parameter in missing.items():
        if parameter.size != array.size or len(squeezed(array.shape)) < 2:
            continue
        for candidate in arrangements(cast(parameter, array.dtype), array):
            count = Rows.moved(array, candidate)
            if count:
                yield name, count
                return


def _computed_by_model(weight: Weight, array: Array, constants: Sequence[tuple[str, Array]]) -> Weight:
    """Take an accusation back where the model itself computes the weight from its parameters."""
    for name, computed in constants:
        if computed.size == array.size and any(is_rounding_of(array, c) for c in arrangements(computed, array)):
            return replace(weight, origin=Origin.FOLDED, parameter=name, difference=0.0, reason=f"computed by {name}")
    return weight


def _explained(weight: Weight, array: Array, stored: Mapping[str, Array], rows: Rows, clock: Clock) -> Weight:
    """Take an accusation back where an exporter or optimizer may have computed the weight from the model's tensors."""
    name = derivation(array.astype(np.float64), stored, Format.of(array.dtype), clock.require_time)
    if not name and rows.scaled(array, clock.require_time):
        name = "rows of the model's tensors, each times a number"
    if not name:
        return weight
    return replace(weight, origin=Origin.FOLDED, parameter=name, difference=0.0, reason=f"made of {name}")


def _modules(proto: onnx.ModelProto, stored: Mapping[str, Array]) -> dict[str, str]:
    """Initializer -> the module that it belongs to: by its name, else by the first node that takes it."""
    owners = {name.rpartition(".")[0] for name in stored} - {""}
    modules: dict[str, str] = {}
    for node in proto.graph.node:
        for name in node.input:
            owner = name.rpartition(".")[0]
            modules.setdefault(name, owner if owner in owners else module(node))
    return modules
