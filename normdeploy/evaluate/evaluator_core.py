"""What the files of the float64 evaluator share: the type of an op's function, the refusal, and the readers of common
forms.

An op's function takes ``(inputs, attrs, opset, outputs)`` as `evaluate.evaluator.evaluate_node` got them, never writes
into an input, and returns one array or a tuple of outputs. Floating tensors are float64 throughout; integer and boolean
ones keep their dtype.
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
    """The evaluator does not know this op, or this form of it; nothing was computed."""


def round_to_float32(value: float) -> float:
    """The number that an attribute of the written value holds: attributes and their defaults are float32."""
    return float(np.float32(value))


def optional_input(inputs: Inputs, index: int) -> Array | None:
    """The input at ``index``; None where it is left out, at the end of the list or by an empty name."""
    if index < len(inputs):
        return inputs[index]
    return None


def decode_text(value: str | bytes) -> str:
    """A string attribute, which protobuf gives as bytes."""
    if isinstance(value, bytes):
        return value.decode()
    return value


def integers_from(inputs: Inputs, index: int, attrs: Attrs, name: str) -> list[int] | None:
    """A list of ints that older opsets give as the attribute ``name`` and newer ones as the input ``index``; None if
    neither is there."""
    if index < len(inputs) and inputs[index] is not None:
        values: list[int] = inputs[index].reshape(-1).tolist()
        return values
    given = attrs.get(name)
    if given is None:
        return None
    return list(given)


def is_quantized_type(dtype: np.dtype[Any]) -> bool:
    """Whether it is one of the types that numpy does not have and that only quantization makes: integers and floats of
    8 bits and less."""
    return dtype.name.startswith(("float8", "float6", "float4", "int4", "uint4", "int2", "uint2"))


def widen_attribute(value: Array) -> Array:
    """A tensor attribute as the evaluator holds it: float64 if floating (kind ``V`` is bfloat16, numpy has no kind for
    it), and as it is if quantized.

    Raises Unsupported for strings and complex numbers.
    """
    kind = value.dtype.kind
    if kind in "iub" or is_quantized_type(value.dtype):
        return value
    if kind == "f" or value.dtype.name == "bfloat16":
        return value.astype(np.float64)
    raise UnsupportedOp(f"a tensor of type {value.dtype}; the evaluator holds floats, integers and booleans")
