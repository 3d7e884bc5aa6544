"""Shared parts of the float64 evaluator: the type of an op's function, its refusal, and helpers to read attributes.

An op's function takes ``(inputs, attrs, opset, outputs)`` as `evaluate.evaluator.evaluate_node` got them. It never
writes into an input, and returns one array or a tuple of outputs. Floating tensors are float64 throughout; integer and
boolean tensors keep their dtype.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Inputs = Sequence[Any]
Attrs = Mapping[str, Any]
Result = Array | tuple[Array | None, ...]
Function = Callable[[Inputs, Attrs, int, int], Result]
Table = dict[tuple[str, str], Function]


class UnsupportedOp(Exception):
    """Raised if the evaluator does not cover an op or a form of an op. Nothing was computed then."""


def round_to_float32(value: float) -> float:
    """Round a number to float32, as attributes and their defaults are stored.

    Returns: the nearest float32 as a Python float.
    """
    return float(np.float32(value))


def optional_input(inputs: Inputs, index: int) -> Array | None:
    """Return the input at ``index``.

    Returns: None if the input is omitted, by an empty name or because the list ends before it.
    """
    if index < len(inputs):
        return inputs[index]
    return None


def decode_text(value: str | bytes) -> str:
    """Decode a string attribute, which protobuf returns as bytes.

    Returns: the text; a str is returned unchanged.
    """
    if isinstance(value, bytes):
        return value.decode()
    return value


def integers_from(inputs: Inputs, index: int, attrs: Attrs, name: str) -> list[int] | None:
    """Read a list of ints, which older opsets store in an attribute and newer opsets store in an input.

    Args:
        index: position of the input, which takes precedence.
        name: the attribute.

    Returns: the ints; None if neither is present.
    """
    if index < len(inputs) and inputs[index] is not None:
        values: list[int] = inputs[index].reshape(-1).tolist()
        return values
    given = attrs.get(name)
    if given is None:
        return None
    return list(given)


def is_quantized_type(dtype: np.dtype[Any]) -> bool:
    """Return whether ``dtype`` is a type that only quantization produces and numpy lacks.

    Returns: True for floats of 4, 6 and 8 bits and integers of 2 and 4 bits.
    """
    return dtype.name.startswith(("float8", "float6", "float4", "int4", "uint4", "int2", "uint2"))


def widen_attribute(value: Array) -> Array:
    """Convert a tensor attribute to the evaluator's types.

    Returns:
        float64 for floats, bfloat16 included (numpy has no kind for it); integers, booleans and quantized types
        unchanged.

    Raises:
        UnsupportedOp: the tensor holds strings or complex numbers.
    """
    kind = value.dtype.kind
    if kind in "iub" or is_quantized_type(value.dtype):
        return value
    if kind == "f" or value.dtype.name == "bfloat16":
        return value.astype(np.float64)
    raise UnsupportedOp(f"a tensor of type {value.dtype}; the evaluator supports floats, integers and booleans")
