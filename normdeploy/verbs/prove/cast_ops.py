"""Evaluate casts at a random point. A conversion that may round or overflow is an unknown function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from ...graphs.symbolic_sizes import Size
from .field_values import CastRounding, NotEvaluated, Sign, Value
from .float_errors import UNITS
from .op_call import Call
from .residues import Array
from .value_helpers import as_boolean

_FLOATS: dict[int, np.dtype[Any]] = {
    onnx.TensorProto.FLOAT: np.dtype(np.float32),
    onnx.TensorProto.FLOAT16: np.dtype(np.float16),
    onnx.TensorProto.DOUBLE: np.dtype(np.float64),
    onnx.TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}


# Bits of the fraction of a floating type, with the hidden bit
_PRECISION: dict[int, int] = {
    onnx.TensorProto.FLOAT: 24,
    onnx.TensorProto.FLOAT16: 11,
    onnx.TensorProto.DOUBLE: 53,
    onnx.TensorProto.BFLOAT16: 8,
}


# Floating type → the types that hold all of its numbers
_WIDER = {
    onnx.TensorProto.FLOAT: {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE},
    onnx.TensorProto.FLOAT16: {onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE},
    onnx.TensorProto.BFLOAT16: {onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE},
    onnx.TensorProto.DOUBLE: {onnx.TensorProto.DOUBLE},
}


_INTEGERS: dict[int, np.dtype[Any]] = {
    onnx.TensorProto.UINT8: np.dtype(np.uint8),
    onnx.TensorProto.INT8: np.dtype(np.int8),
    onnx.TensorProto.UINT16: np.dtype(np.uint16),
    onnx.TensorProto.INT16: np.dtype(np.int16),
    onnx.TensorProto.INT32: np.dtype(np.int32),
    onnx.TensorProto.INT64: np.dtype(np.int64),
    onnx.TensorProto.UINT32: np.dtype(np.uint32),
    onnx.TensorProto.UINT64: np.dtype(np.uint64),
}


# Integer types that hold every size and position, so that a Cast to them loses nothing
_WIDE = (onnx.TensorProto.INT32, onnx.TensorProto.INT64, onnx.TensorProto.UINT64)


def evaluate_cast(call: Call) -> Value:
    return _cast_to(call, call.data(0), call.attrs["to"])


def _cast_to(call: Call, x: Value, to: Any) -> Value:
    if not isinstance(to, int):
        raise NotEvaluated("Cast to a type by its name (opset 5 or older)")
    if to in _FLOATS:
        return replace(_cast_to_float(call, x, to), elem=to)
    if to == onnx.TensorProto.BOOL:
        if x.kind == "b":
            return x
        if x.stored is not None:
            return call.field.constant(x.stored.astype(bool))
        return as_boolean(call.field.unknown_function("not zero", [x], kind="b"))
    if to not in _INTEGERS:
        raise NotEvaluated(f"Cast to type {to}")
    return replace(_cast_to_integer(call, x, to), elem=to)


def _cast_to_float(call: Call, x: Value, to: int) -> Value:
    """Convert to a floating type. A conversion that may round is an unknown function."""
    if x.stored is not None and x.stored.dtype == object:
        for size in x.stored.reshape(-1):
            call.field.limits.add((Size.from_int(size), 2 ** _PRECISION[to]))
        return replace(x, stored=None, residues=call.field.residues(x), kind="f", sign=_sign_of_sizes(x.stored))
    if x.stored is not None:
        return _cast_stored_to_float(call, x, x.stored, to)
    if x.kind == "b":
        return replace(x, kind="f")
    if x.kind == "i":
        dtype = _INTEGERS.get(x.elem)
        if dtype is not None and not x.wraps and 8 * dtype.itemsize <= _PRECISION[to]:
            return replace(x, kind="f")
        return call.field.unknown_function(f"Cast to {to}", [x])
    source = x.fits or x.elem
    if to in _WIDER.get(source, ()):
        return replace(x, fits=source)
    return _round_to(call, x, to)


def _round_to(call: Call, x: Value, to: int) -> Value:
    """Round to a narrower floating type."""
    approx = call.field.approx(x)
    if approx is not None:
        approx = approx.rounded(UNITS[to])
    if call.field.casts is not CastRounding.ALL and not (approx is not None and _vanishes(approx.numbers, to)):
        call.field.exact_casts.add(to)
        return replace(x, approx=approx)
    made = call.field.unknown_function(f"Cast to {to}", [x], approx=approx)
    # Rounding keeps zero and the sign, but a small number becomes zero.
    made.sign = min(x.sign, Sign.NOT_NEGATIVE)
    return made


def _cast_stored_to_float(call: Call, x: Value, stored: Array, to: int) -> Value:
    with np.errstate(all="ignore"):
        rounded = stored.astype(_FLOATS[to])
    made = call.field.constant(rounded)
    if x.kind == "f" and call.field.casts is CastRounding.NONE and not made.special and not _vanishes(stored, to):
        if not np.array_equal(rounded.astype(np.float64), stored.astype(np.float64)):
            call.field.exact_casts.add(to)
        return x
    return made


def _vanishes(numbers: Array, to: int) -> bool:
    """Return True if a number becomes zero. A lost epsilon is not a rounding error."""
    with np.errstate(all="ignore"):
        rounded = numbers.astype(_FLOATS[to])
    return bool(((rounded == 0) & (numbers != 0)).any())


def _sign_of_sizes(array: Array) -> Sign:
    return Sign.POSITIVE if all(Size.from_int(n).is_positive for n in array.reshape(-1)) else Sign.UNKNOWN


def _cast_to_integer(call: Call, x: Value, to: int) -> Value:
    if x.stored is not None and x.stored.dtype == object:
        if to not in _WIDE:
            raise NotEvaluated("Cast of an open size to a narrow type")
        return x
    if x.stored is not None:
        if x.kind == "f":
            _require_range(x.stored.astype(np.float64), to)
        return call.field.constant(x.stored.astype(_INTEGERS[to]))
    if x.approx is not None and x.kind == "f":
        numbers = truncate_constants(x.approx.numbers)
        _require_range(numbers, to)
        return call.field.constant(numbers.astype(_INTEGERS[to]))
    if x.kind == "b":
        return replace(x, kind="i")
    if x.kind == "i" and x.elem in _INTEGERS:
        return _cast_integer(call, x, to)
    return call.field.unknown_function(f"Cast from {x.kind} {x.elem if x.kind == 'i' else ''} to {to}", [x], kind="i")


def _cast_integer(call: Call, x: Value, to: int) -> Value:
    """Convert between integer types, which keeps the low bits."""
    source, target = (np.iinfo(_INTEGERS[elem]) for elem in (x.elem, to))
    if not x.wraps:
        holds_all = target.min <= source.min and source.max <= target.max
        return replace(x, wraps=not holds_all, sign=x.sign if holds_all else Sign.UNKNOWN)
    if target.bits <= source.bits:
        return x
    return call.field.unknown_function(f"Cast to {to}", [x], kind="i")


def _require_range(numbers: Array, to: int) -> None:
    """Refuse floats that an integer type does not hold.

    Raises:
        NotEvaluated: a number is out of range, infinite or NaN.
    """
    limits = np.iinfo(_INTEGERS[to])
    if not ((numbers >= float(limits.min)) & (numbers < float(limits.max) + 1.0)).all():
        raise NotEvaluated("Cast of numbers that the integer type does not hold")


def truncate_constants(approx: Array) -> Array:
    """Drop the fraction of constants that were computed in float64.

    Raises:
        NotEvaluated: a number is so near to an integer that rounding decides.
    """
    nearest = np.rint(approx)
    distance = np.abs(approx - nearest)
    if ((distance > 0) & (distance < 1e-6 * np.maximum(1, np.abs(approx)))).any():
        raise NotEvaluated("Cast of a computed constant near an integer")
    return np.trunc(approx)


def evaluate_cast_like(call: Call) -> Value:
    x, like = call.data(0), call.data(1)
    if like.elem:
        return _cast_to(call, x, like.elem)
    raise NotEvaluated("CastLike to an unknown type")
