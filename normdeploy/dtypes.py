"""The names of floating types: whoever writes fp32, f32 or float32 means one type, in every option and every
function."""

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

"""What a file can be made to compute in, besides the float32 that it is exported in."""


def normalize_dtype(name: str) -> str | None:
    """numpy's name of a floating type ("bfloat16" too), "float32" for "FP32"; None where ``name`` is none."""
    return _TYPE_OF.get(name.lower())


def half_precision_of(name: str | None) -> str | None:
    """What ``--precision`` means: "fp16" or "bf16"; None for float32, which is no change.

    Raises:
        InputError: it is another type, or none.
    """
    if name is None:
        return None
    if isinstance(name, str):
        kind = normalize_dtype(name)
    else:
        kind = None
    if kind not in _PRECISIONS:
        raise InputError(
            f"there is no precision {name!r}; choose one of fp16 (float16, half), bf16 (bfloat16) or fp32, which is no"
            " change"
        )
    return _PRECISIONS[kind]


def unit_roundoff(dtype: np.dtype) -> float:
    """Return half of the distance between 1 and the next larger number of a floating type."""
    # The command line's help reads this module, and must not wait for numpy.
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps) / 2


# By numpy's names of the types that models compute in.
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def is_float_dtype(dtype: np.dtype) -> bool:
    """Whether it is a floating type."""
    return dtype.kind == "f" or (dtype.kind == "V" and not _is_narrow_integer_dtype(dtype))


def is_integer_dtype(dtype: np.dtype) -> bool:
    """Whether it is an integer type, of 2 and 4 bits too."""
    return dtype.kind in "iu" or (dtype.kind == "V" and _is_narrow_integer_dtype(dtype))


def _is_narrow_integer_dtype(dtype: np.dtype) -> bool:
    return dtype.name.startswith(("int", "uint"))
