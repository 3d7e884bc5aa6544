"""Compare each floating-point initializer of a file with the model's parameters, buffers and constants.

A comparison of outputs does not detect a single weight among thousands that is off by 1e-4. This audit does.

A weight of the file is unchanged if it equals a tensor of the model bit for bit. The tensor may be cast to the file's
type, reshaped, or have its dims permuted. A weight is also unchanged if it consists of whole rows of the model's
tensors (slices, packed and reordered gates). Any other weight has one of these origins:

- folded: it is a tensor of the model times one number for each channel, up to rounding; or it is a bias with a
  BatchNorm folded in.
- altered: it is close to a tensor of the model that is missing from the file, but some elements differ, or all elements
  differ slightly. The audit fails.
- computed: it is similar to no tensor of the model, like constants that an exporter computes. This includes tensors
  that pack tensors of the model together with computed numbers. (``torch.cdist`` packs a codebook, its squares and ones
  into one tensor.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import onnx

from ...evaluate.evaluator_core import is_quantized_type
from ...graphs.proto_queries import module_path
from ...graphs.qoperator_expansion import expand_qoperators
from ...graphs.quantization_info import is_quantized, quantization_parameters
from ...model import LoadedModel
from ...precision.type_conversion import initializer_values
from ...types import Array, Arrays
from .bias_shifts import BiasShift, FixedShift, group_by_size
from .code_audit import audit_codes
from .compute_budget import BudgetClock, OutOfTime
from .constant_nodes import is_rounding_of, iter_constant_results
from .derived_tensors import FloatSpacing, find_derivation
from .equal_tensors import EqualTensors, cast_parameter
from .merged_branches import iter_merged_tensors
from .model_tensors import iter_bias_shifts, iter_initializers, model_tensors_by_name
from .parameter_orders import iter_arrangements, squeeze_shape
from .reference_models import Original
from .row_matching import MOSTLY, RowMatcher
from .weight_origin import AuditedWeight, WeightOrigin, are_smoothing_factors, explain_smoothing, find_origin


def audit_weights(
    model: Original, proto: onnx.ModelProto, label: str, clock: BudgetClock | None = None
) -> list[AuditedWeight]:
    """Find the floating-point initializers of ``proto`` that are not unchanged tensors of ``model``.

    Args:
        proto: the file with its weights loaded.
        label: name of the file.
        clock: limit on the time to trace weights to the model; None for no limit. The clock counts the weights that
            were not traced.

    Returns:
        the weights, altered ones first.
    """
    clock = BudgetClock(float("inf")) if clock is None else clock
    untraced = 0
    stored = model_tensors_by_name(model)
    modules = _modules_of_initializers(proto, stored)
    rows = RowMatcher(stored.values())
    equals = EqualTensors(stored)

    def weight_called(name: str, origin: WeightOrigin, elements: int) -> AuditedWeight:
        return AuditedWeight(label, name, modules.get(name, ""), origin, elements=elements)

    unknown: list[tuple[str, Array, float]] = []
    arranged: list[tuple[str, Array]] = []
    placed = set[str]()
    # Quantization scales and zero points are not audited, because the error budget judges them.
    apart = quantization_parameters(proto) | quantization_parameters(expand_qoperators(proto))
    for tensor in iter_initializers(proto.graph):
        array = initializer_values(tensor)
        if tensor.name in apart or not array.size or array.dtype.kind in "iubSOc" or is_quantized_type(array.dtype):
            continue
        same = equals.matching_names(array)
        placed.update(same)
        if same:
            continue
        if clock.is_over():
            untraced += 1
            continue
        share = rows.matched_share(array)
        if share < 1:
            unknown.append((tensor.name, array, share))
        else:
            arranged.append((tensor.name, array))
    missing = {name: value for name, value in stored.items() if name not in placed}
    every = list(iter_bias_shifts(model, stored))
    constants: Sequence[tuple[str, Array]] | None = ()
    if isinstance(model, LoadedModel):
        # The constants of the model are computed later, when a weight first needs them.
        constants = None
        every += [
            FixedShift(BiasShift(source, w.reshape(-1), size.reshape(-1)))
            for source, w, size in iter_merged_tensors(model, stored)
        ]
    shifts = group_by_size(every)
    inverses = [a.reshape(-1) for _, a, _ in unknown if is_quantized(proto) and are_smoothing_factors(a)]
    remarks = []
    for name, array in arranged:
        for parameter, count in _find_moved_rows(array, missing):
            reason = f"{count} of its rows are at other places than in {parameter}"
            weight = weight_called(name, WeightOrigin.ALTERED, array.size)
            remarks.append(replace(weight, parameter=parameter, reason=reason))
    for place, (name, array, share) in enumerate(unknown):
        weight = weight_called(name, WeightOrigin.COMPUTED, array.size)
        try:
            clock.require_time()
            smoothed = explain_smoothing(weight, array, inverses, missing)
            if smoothed is None:
                weight = find_origin(weight, array, missing, shifts, clock)
            else:
                weight = smoothed
            if (
                weight.origin is WeightOrigin.COMPUTED
                and share >= MOSTLY
                and rows.lacks_parameter(array, missing.values())
            ):
                reason = f"{share:.1%} of it consists of rows of the model's tensors, the rest does not"
                weight = replace(weight, origin=WeightOrigin.ALTERED, reason=reason)
            if weight.origin is WeightOrigin.ALTERED and smoothed is None:
                weight = _clear_if_derived(weight, array, stored, rows, clock)
        except OutOfTime:
            # Without more time, a harmless origin can't be excluded. So neither this weight nor the remaining ones are
            # reported.
            untraced += len(unknown) - place
            break
        if weight.origin is WeightOrigin.ALTERED:
            if constants is None and isinstance(model, LoadedModel):
                constants = list(iter_constant_results(model))
            weight = _clear_if_computed(weight, array, constants or ())
        remarks.append(weight)
    for name, elements, parameter, code in audit_codes(stored, proto, clock):
        reason = (
            f"{code.count} of {elements} codes differ from {parameter}, rounded: {code.value:.4g} at"
            f" {list(code.place)}, but the model has {code.expected:.4g}, {code.steps:.3g} steps away"
        )
        weight = weight_called(name, WeightOrigin.ALTERED, elements)
        difference = abs(code.value - code.expected)
        remarks.append(replace(weight, parameter=parameter, difference=difference, reason=reason))
    if untraced:
        clock.weights[label] = untraced
    return sorted(remarks, key=bool)


def _find_moved_rows(array: Array, missing: Arrays) -> Iterator[tuple[str, int]]:
    """Find the first parameter that equals most rows of ``array`` at the same positions, but not all.

    Exporters reorder the gates of LSTMs and GRUs. This moves more than half of the rows, so it is not reported.

    Yields:
        (parameter's name, number of rows at other positions), at most once.
    """
    for name, parameter in missing.items():
        if parameter.size != array.size or len(squeeze_shape(array.shape)) < 2:
            continue
        for candidate in iter_arrangements(cast_parameter(parameter, array.dtype), array):
            count = RowMatcher.count_foreign_rows(array, candidate)
            if count:
                yield name, count
                return


def _clear_if_computed(weight: AuditedWeight, array: Array, constants: Sequence[tuple[str, Array]]) -> AuditedWeight:
    """Mark a weight as folded if the model itself computes it from its parameters."""
    for name, computed in constants:
        if computed.size == array.size and any(is_rounding_of(array, c) for c in iter_arrangements(computed, array)):
            return replace(
                weight, origin=WeightOrigin.FOLDED, parameter=name, difference=0.0, reason=f"computed by {name}"
            )
    return weight


def _clear_if_derived(
    weight: AuditedWeight, array: Array, stored: Arrays, rows: RowMatcher, clock: BudgetClock
) -> AuditedWeight:
    """Mark a weight as folded if an exporter or optimizer may have computed it from the model's tensors."""
    name = find_derivation(array.astype(np.float64), stored, FloatSpacing.of_dtype(array.dtype), clock.require_time)
    if not name and rows.is_scaled(array, clock.require_time):
        name = "rows of the model's tensors, each times a factor"
    if not name:
        return weight
    return replace(weight, origin=WeightOrigin.FOLDED, parameter=name, difference=0.0, reason=f"made of {name}")


def _modules_of_initializers(proto: onnx.ModelProto, stored: Arrays) -> dict[str, str]:
    """Return initializer -> its module. The module comes from the name of the initializer, or else from its first
    reader.
    """
    owners = {name.rpartition(".")[0] for name in stored} - {""}
    modules: dict[str, str] = {}
    for node in proto.graph.node:
        for name in node.input:
            owner = name.rpartition(".")[0]
            modules.setdefault(name, owner if owner in owners else module_path(node))
    return modules
