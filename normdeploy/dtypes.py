"""Names of floating types. "fp32", "f32" and "float32" mean the same type in every option and function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import InputError

if TYPE_CHECKING:
    import numpy as np

_NAMES = {
    "float64": ("fp64", "f64", "double"),
    "float32": ("fp32", "f32", "float", "single"),
    "float16": ("fp16", "f16", "half"),
    "bfloat16": ("bf16",),
}
_PRECISIONS = {"float32": None, "float16": "fp16", "bfloat16": "bf16"}
_TYPE_OF = {alias: name for name, aliases in _NAMES.items() for alias in (name, *aliases)}

"""Precisions that a file can compute in, besides the float32 that it is exported in."""


def normalize_dtype(name: str) -> str | None:
    """Return numpy's name of a floating type.

    Args:
        name: any spelling, in upper or lower case.

    Returns:
        "float32" for "FP32", "bfloat16" for "bf16"; None if ``name`` is not a floating type.
    """
    return _TYPE_OF.get(name.lower())


def half_precision_of(name: str | None) -> str | None:
    """Translate a value of ``--precision``.

    Returns:
        "fp16" or "bf16"; None for float32 and for no precision: both leave the model unchanged.

    Raises:
        InputError: ``name`` is not float32, float16 or bfloat16.
    """
    if name is None:
        return None
    if isinstance(name, str):
        kind = normalize_dtype(name)
    else:
        kind = None
    if kind not in _PRECISIONS:
        raise InputError(
            f"unknown precision {name!r}; choose one of fp16 (float16, half), bf16 (bfloat16) or fp32, which changes "
            "nothing"
        )
    return _PRECISIONS[kind]


def unit_roundoff(dtype: np.dtype) -> float:
    """Return half the distance between 1 and the next larger number of a floating type.

    Returns: for example 2**-24 for float32.
    """
    # The command line's help imports this module and must not wait for numpy.
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps) / 2


# Keyed by numpy's names of the types that models compute in.
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def is_float_dtype(dtype: np.dtype) -> bool:
    """Return whether ``dtype`` is a floating type, including bfloat16 and the 8-bit floating types.

    Returns: False also for 2-bit and 4-bit integers, which have the same numpy kind as bfloat16, "V".
    """
    return dtype.kind == "f" or (dtype.kind == "V" and not _is_narrow_integer_dtype(dtype))


def is_integer_dtype(dtype: np.dtype) -> bool:
    """Return whether ``dtype`` is an integer type, including 2-bit and 4-bit integers.

    Returns: False for bool.
    """
    return dtype.kind in "iu" or (dtype.kind == "V" and _is_narrow_integer_dtype(dtype))


def _is_narrow_integer_dtype(dtype: np.dtype) -> bool:
    return dtype.name.startswith(("int", "uint"))
