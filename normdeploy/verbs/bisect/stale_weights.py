"""Find a file with the weights of another state of the model, such as an earlier step of its training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import onnx
from ml_dtypes import bfloat16
from onnx import numpy_helper

from ...precision.type_conversion import initializer_values
from ...storage.proto_traversal import copy_model
from ...types import Array, Arrays
from ..verify.model_tensors import model_tensors_by_name
from ..verify.reference_models import Original
from .folded_norms import FoldedTensor, fold_parameters
from .trial_changes import Cause

# If more than this share of a file's weights differ, the file has another state of the model, not single mistakes.
_MOST = 1 / 2
# Minimum number of differing weights for another state of the model. Fewer are treated as separate mistakes.
_FEWEST = 3
# Allowed relative error of weights that an exporter computes in float32.
_NEAR = 2.0**-20
# Allowed relative error of weights that are rounded to float16 or bfloat16.
_NEAR_HALF = 2.0**-7


@dataclass(frozen=True, kw_only=True)
class WeightReplacement:
    """File whose weights were replaced by the model's weights.

    Attributes:
        names: the replaced weights; empty if no weights were replaced.
        cause: the mistake in the replaced weights; None if no weights were replaced.
    """

    proto: onnx.ModelProto
    names: tuple[str, ...] = ()
    cause: Cause | None = None


def replace_weights(model: Original, proto: onnx.ModelProto) -> WeightReplacement:
    """Replace a file's weights by the model's.

    Nothing is replaced if at most half of the file's weights, or fewer than three, differ from the model's. Nothing is
    replaced either if one of the differing weights matches no weight of the model.

    Returns:
        The changed file and its cause, or the file unchanged.
    """
    parameters = model_parameters(model)
    folds = fold_parameters(model, parameters)
    stored = parameters | {name: fold.right for name, fold in folds.items()}
    kept = file_weights(proto)
    strange = {name: v for name, v in kept.items() if not any(holds_same_numbers(p, v) for p in stored.values())}
    if len(strange) < _FEWEST or len(strange) <= _MOST * len(kept):
        return WeightReplacement(proto=proto)
    places = dict(_iter_places(strange, stored))
    if len(places) < len(strange):
        return WeightReplacement(proto=proto)
    changed = copy_model(proto)
    for tensor in changed.graph.initializer:
        if tensor.name in places:
            right = places[tensor.name].values.astype(kept[tensor.name].dtype)
            tensor.CopyFrom(numpy_helper.from_array(right, tensor.name))
    own = {folds[p.source].find_epsilon(strange[n]) if p.source in folds else None for n, p in places.items()}
    return WeightReplacement(proto=changed, names=tuple(places), cause=_stale_fold_cause(list(places), own, folds))


def model_parameters(model: Original) -> dict[str, Array]:
    """Collect the model's floating tensors of several elements.

    Returns:
        Name -> array in float64.
    """
    return {name: v.astype(np.float64) for name, v in model_tensors_by_name(model).items() if v.size > 1}


def file_weights(proto: onnx.ModelProto) -> dict[str, Array]:
    """Collect the floating initializers of several elements.

    Returns:
        Name -> array in the file's type.
    """
    kept = {t.name: initializer_values(t) for t in proto.graph.initializer}
    return {name: v for name, v in kept.items() if v.dtype.kind == "f" and v.size > 1}


def _stale_fold_cause(names: Sequence[str], epsilons: Set[float | None], folds: Mapping[str, FoldedTensor]) -> Cause:
    if names[1:]:
        more = f" and {len(names) - 1} more"
    else:
        more = ""
    (own, *others) = epsilons
    if own is not None and not others:
        models = sorted({fold.epsilon for fold in folds.values()})
        said = (
            f"the BatchNorms are folded with epsilon {own:.3g}, but the model has"
            f" {', '.join(f'{e:.3g}' for e in models)}"
        )
        return Cause("epsilon", f"{names[0]!r}{more}: {said}")
    return Cause(
        "stale weights",
        f"{names[0]!r}{more} differ from the model's, and with the model's weights the output is correct: the"
        " file was made from another state of the model; export it again",
    )


def holds_same_numbers(one: Array, other: Array) -> bool:
    """Check that two weights have the same numbers; one of them may be transposed.

    Returns:
        True if they are equal up to rounding.
    """
    return any(is_rounded_copy(laid, other) for laid in (one, one.T))


def is_rounded_copy(one: Array, other: Array) -> bool:
    """Check that ``other`` has the numbers of a parameter in the same memory order.

    Returns:
        True if they are equal up to the rounding of float32. If ``other`` is rounded to a 16-bit type, up to the
        rounding of this type.
    """
    if one.size != other.size:
        return False
    a = one.astype(np.float64)
    b = other.astype(np.float64)
    near = (_NEAR_HALF if _is_rounded_to_half(other) else _NEAR) * np.abs(a).max(initial=0)
    return bool(np.abs(a.reshape(b.shape) - b).max(initial=0) <= near)


def _is_rounded_to_half(value: Array) -> bool:
    """Check that numbers are rounded to a type of 16 bits."""
    with np.errstate(over="ignore"):
        return any(np.array_equal(value.astype(kind).astype(value.dtype), value) for kind in (np.float16, bfloat16))


@dataclass(frozen=True, kw_only=True)
class _PlacedWeight:
    """Weight of the model that may replace a weight of the file.

    Attributes:
        away: 1 - cosine of the angle between the two weights; halved if their names are equal.
    """

    source: str
    values: Array
    away: float


def _iter_places(strange: Arrays, stored: Arrays) -> Iterator[tuple[str, _PlacedWeight]]:
    """Match each unknown weight with the model's weight that has the most similar direction.

    In two states of the same training, a weight has a similar direction.
    """
    for name, value in strange.items():
        laid = [
            _PlacedWeight(
                source=own, values=turned, away=(1 - cosine_similarity(turned, value)) / (2 if own == name else 1)
            )
            for own, parameter in stored.items()
            for turned in ((parameter, parameter.T) if parameter.ndim > 1 else (parameter,))
            if turned.shape == value.shape
        ]
        if laid:
            yield name, min(laid, key=lambda placed: placed.away)


def cosine_similarity(one: Array, other: Array) -> float:
    """Compute the cosine of the angle between two tensors of the same shape.

    Returns:
        The cosine; 0 if either tensor is zero.
    """
    wide = other.astype(np.float64)
    size = float(np.sqrt((one * one).sum() * (wide * wide).sum()))
    if size:
        return float((one * wide).sum()) / size
    return 0.0
