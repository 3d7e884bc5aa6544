"""Find single altered codes in the quantized weights of a file, by comparing them with the model's parameters.

A step is the distance between two codes. Because a file may store the scale in many places, the step is computed by a
fit to the codes q and the parameter w that they resemble: w ≈ a·q + b. The fit is made for all elements together or
along one axis, because a BatchNorm may be folded in.

Every quantizer rounds a weight to one of the two nearest codes (AdaRound also rounds to the farther one), or clips a
weight beyond the range of the codes. Some quantizers (GPTQ) move codes further so that errors cancel, but then they
move many codes. So a code is altered if it is more than a step away from its parameter, and if this holds for only a
few codes of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx

from ...graphs.quantization_info import is_quantized
from ...precision.type_conversion import initializer_values
from ...types import Array, Arrays
from .compute_budget import BudgetClock
from .model_tensors import iter_initializers
from .parameter_orders import iter_arrangements
from .row_matching import ROW

_KINDS = frozenset({"int8", "uint8", "int4", "uint4"})
# Number of elements of the codes and of a parameter that are compared first.
_SAMPLE = 4096
# Minimum correlation of these elements.
_ALIKE = 0.5
# Maximum distance in steps of a rounded code from its parameter, including the error of the fit.
_ROUNDED = 0.75
# Distance in steps beyond which a code is not a rounding up or down, including the error of the fit.
_FAR = 1.25
# Maximum share of codes that are not roundings. With a larger share, the quantizer moved many codes on purpose.
_MOST = 0.01
# Minimum number of elements to which a scale is fitted.
_FEWEST = 8
# The fit is repeated without outliers. For each repetition: distance in steps beyond which an element is an outlier.
_TRIMS = (8.0, 3.0, 1.25, 1.25)
_PACKED = "MatMulNBits"
_TYPES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.INT4, onnx.TensorProto.UINT4)


@dataclass(frozen=True)
class WeightCodes:
    """Codes of one weight as float64, with the limits of their type.

    Attributes:
        block: number of elements of the last axis that share a scale; 0 if unknown.
        lines: scale and intercept of each block, if known.
    """

    name: str
    array: Array
    ends: tuple[float, float]
    block: int = 0
    lines: tuple[Array, Array] | None = None


@dataclass(frozen=True)
class AlteredCode:
    """Altered code that is furthest from its parameter.

    Attributes:
        value: dequantized value of the code.
        expected: value of the parameter for this code.
        steps: distance between ``value`` and ``expected``, in steps.
        count: number of codes that are not roundings of the parameter.
    """

    place: tuple[int, ...]
    value: float
    expected: float
    steps: float
    count: int


def iter_weight_codes(proto: onnx.ModelProto) -> Iterator[WeightCodes]:
    """List the weights of a file that are stored in codes of 4 or 8 bits.

    Args:
        proto: the file with its weights loaded.

    Yields:
        the codes of each weight.
    """
    packed = dict[str, onnx.NodeProto]()
    for node in proto.graph.node:
        if node.op_type == _PACKED:
            packed[node.input[1]] = node
    for tensor in iter_initializers(proto.graph):
        if tensor.name in packed:
            yield from _unpack_codes(
                initializer_values(tensor), packed[tensor.name], {t.name: t for t in proto.graph.initializer}
            )
            continue
        array = initializer_values(tensor)
        if array.dtype.name in _KINDS and array.size >= ROW:
            limits = ml_dtypes.iinfo(array.dtype)
            yield WeightCodes(tensor.name, array.astype(np.float64), (float(limits.min), float(limits.max)))


def _unpack_codes(array: Array, node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> Iterator[WeightCodes]:
    """Yield the codes of a MatMulNBits, [N, K], with the scales and zero points of their blocks."""
    attributes = {a.name: a.i for a in node.attribute}
    bits = attributes.get("bits", 4)
    size = attributes["block_size"]
    rows = attributes["N"]
    columns = attributes["K"]
    scale = tensors.get(node.input[2])
    if len(node.input) > 3 and node.input[3]:
        zero = tensors.get(node.input[3])
    else:
        zero = None
    if bits not in (4, 8) or scale is None or (zero is None and any(node.input[3:4])):
        return
    scales = initializer_values(scale).astype(np.float64).reshape(rows, -1)
    zeros = np.full(scales.shape, 2.0 ** (bits - 1))
    if zero is not None:
        stored = initializer_values(zero)
        if stored.dtype == np.uint8:
            zeros = _unpack_nibbles(stored, bits)
        else:
            zeros = stored
        zeros = zeros.reshape(rows, -1)[:, : scales.shape[1]].astype(np.float64)
    codes = _unpack_nibbles(array, bits).reshape(rows, -1)[:, :columns].astype(np.float64)
    lines = scales.reshape(-1), (-zeros * scales).reshape(-1)
    yield WeightCodes(node.input[1], codes, (0.0, 2.0**bits - 1), size, lines)


def _unpack_nibbles(array: Array, bits: int) -> Array:
    """Split each byte into two 4-bit codes, the lower half first. 8-bit codes are returned unchanged."""
    if bits == 4:
        return np.stack([array & 15, array >> 4], axis=-1)
    return array


def find_altered_code(codes: WeightCodes, parameter: Array) -> tuple[bool, AlteredCode | None]:
    """Compare codes with a parameter of the same shape.

    A quantizer that moves many codes can't be distinguished from codes of another parameter.

    Returns:
        (True if the codes belong to this parameter, an altered code or None).
    """
    weight = parameter.astype(np.float64)
    if not _are_alike(codes, weight):
        return False, None
    closest: AlteredCode | None = None
    for groups in _iter_scale_groups(codes):
        fit = _fit_groups(codes, weight, groups)
        if fit.is_origin and fit.altered is None:
            return True, None
        closest = closest or fit.altered
    return closest is not None, closest


def _are_alike(codes: WeightCodes, weight: Array) -> bool:
    sample = slice(None, None, max(1, weight.size // _SAMPLE))
    q = codes.array.reshape(-1)[sample]
    w = weight.reshape(-1)[sample]
    if codes.lines is not None:
        groups = next(_iter_scale_groups(codes))[sample]
        q = codes.lines[0][groups] * q + codes.lines[1][groups]
    if not (q.std() and np.isfinite(w).all() and w.std()):
        return False
    return bool(abs(np.corrcoef(q, w)[0, 1]) >= _ALIKE)


def _iter_scale_groups(codes: WeightCodes) -> Iterator[Array]:
    """Yield possible groupings of elements that share a scale: the whole tensor, along each axis, or blocks.

    Yields:
        For each grouping, the number of the group of each element, flattened.
    """
    shape = codes.array.shape
    if codes.block:
        places = np.arange(shape[-1]) // codes.block
        rows = np.arange(codes.array.size // shape[-1]) * (places[-1] + 1)
        yield (rows[:, None] + places).reshape(-1)
        return
    yield np.zeros(codes.array.size, np.int64)
    for axis, size in enumerate(shape):
        if size > 1 and codes.array.size // size >= _FEWEST:
            along = np.arange(size).reshape([-1 if i == axis else 1 for i in range(len(shape))])
            yield np.broadcast_to(along, shape).reshape(-1)


@dataclass(frozen=True)
class _Fit:
    is_origin: bool
    altered: AlteredCode | None = None


def _fit_groups(codes: WeightCodes, weight: Array, groups: Array) -> _Fit:
    """Fit w = a·q + b in each group without its outliers, then examine the outliers."""
    q = codes.array.reshape(-1)
    w = weight.reshape(-1)
    kept = np.ones(q.size, bool)
    for furthest in _TRIMS:
        a, b = codes.lines or _fit_lines(q[kept], w[kept], groups[kept], int(groups.max()) + 1)
        with np.errstate(all="ignore"):
            # The slope of a group with a single code is undefined, so its distances are set to 0.
            away = np.nan_to_num((w - b[groups]) / a[groups] - q, nan=0.0, posinf=0.0, neginf=0.0)
        kept = np.abs(away) <= furthest
    low, high = _code_limits(q, codes.ends)
    away[((q >= high) & (away > 0)) | ((q <= low) & (away < 0))] = 0.0
    far = np.abs(away) > _FAR
    beyond = int((np.abs(away) > _ROUNDED).sum())
    # A quantizer that compensates errors moves many codes, most of them by little more than a rounding.
    if beyond > max(1.0, _MOST * q.size) or (far.any() and beyond > 2 * int(far.sum())):
        return _Fit(is_origin=False)
    if not far.any():
        return _Fit(is_origin=True)
    worst = int(np.abs(away).argmax())
    place = tuple(int(i) for i in np.unravel_index(worst, codes.array.shape))
    value = float(a[groups[worst]] * q[worst] + b[groups[worst]])
    altered = AlteredCode(place, value, float(w[worst]), float(abs(away[worst])), int(far.sum()))
    return _Fit(is_origin=True, altered=altered)


def _fit_lines(q: Array, w: Array, groups: Array, count: int) -> tuple[Array, Array]:
    """Return the slope and intercept of each group by least squares."""
    n, x, y, xx, xy = (
        np.bincount(groups, weights=values_of, minlength=count) for values_of in (np.ones_like(q), q, w, q * q, q * w)
    )
    with np.errstate(all="ignore"):
        slope = (xy - x * y / n) / (xx - x * x / n)
        return slope, (y - slope * x) / n


def _code_limits(q: Array, ends: tuple[float, float]) -> tuple[float, float]:
    """Return the limits at which codes are clipped.

    A limit is the extreme code if several codes have it; otherwise it is the limit of the type.
    """
    low = q.min()
    high = q.max()
    several = 2
    return (
        low if (q == low).sum() >= several else ends[0] + 1,
        high if (q == high).sum() >= several else ends[1] - 1,
    )


def audit_codes(
    stored: Arrays, proto: onnx.ModelProto, clock: BudgetClock
) -> Iterator[tuple[str, int, str, AlteredCode]]:
    """Find the weights of a quantized file with single altered codes.

    Args:
        stored: the model's tensors by name.
        proto: the file with its weights loaded.
        clock: stops the search when the time is over.

    Yields:
        (weight, number of elements, parameter, furthest altered code).
    """
    if not is_quantized(proto) and not any(t.data_type in _TYPES for t in proto.graph.initializer):
        return
    for codes in iter_weight_codes(proto):
        nearest: tuple[str, AlteredCode] | None = None
        for name, parameter in stored.items():
            if parameter.size != codes.array.size or clock.is_over():
                continue
            known, altered = _find_altered_in_orders(codes, parameter)
            if known and altered is None:
                nearest = None
                break
            if altered is not None and (nearest is None or altered.count < nearest[1].count):
                nearest = name, altered
        if nearest is not None:
            yield codes.name, codes.array.size, *nearest


def _find_altered_in_orders(codes: WeightCodes, parameter: Array) -> tuple[bool, AlteredCode | None]:
    """Apply `find_altered_code` to each order of a parameter's dims."""
    closest: AlteredCode | None = None
    for arranged in iter_arrangements(parameter, codes.array):
        known, altered = find_altered_code(codes, arranged)
        if known and altered is None:
            return True, None
        closest = closest or altered
    return closest is not None, closest
