"""Evaluate elementwise ops: arithmetic, comparisons, activations, casts (https://onnx.ai/onnx/operators)."""

import functools
import math
from typing import Any

import numpy as np

from .evaluator_core import (
    Array,
    Attrs,
    Function,
    Inputs,
    Result,
    Table,
    UnsupportedOp,
    decode_text,
    optional_input,
    round_to_float32,
)

# numpy has no erf. The C library's erf is accurate to the last digit. It is slow for arrays, but norms seldom contain
# an erf.
_ERF = np.frompyfunc(math.erf, 1, 1)
_ERFC = np.frompyfunc(math.erfc, 1, 1)

# Type that a Cast requests → dtype of the result. The key is an elem_type, or its name as in opset 5 and below. All
# floating types of 16 bits or more map to float64, because the evaluator does not round. Floats of 8 and 4 bits are
# missing, because a Cast to these types is quantization.
_CAST: dict[Any, Any] = {
    **dict.fromkeys((1, "FLOAT", 10, "FLOAT16", 11, "DOUBLE", 16, "BFLOAT16"), np.float64),
    **dict.fromkeys((2, "UINT8"), np.uint8),
    **dict.fromkeys((3, "INT8"), np.int8),
    **dict.fromkeys((4, "UINT16"), np.uint16),
    **dict.fromkeys((5, "INT16"), np.int16),
    **dict.fromkeys((6, "INT32"), np.int32),
    **dict.fromkeys((7, "INT64"), np.int64),
    **dict.fromkeys((9, "BOOL"), np.bool_),
    **dict.fromkeys((12, "UINT32"), np.uint32),
    **dict.fromkeys((13, "UINT64"), np.uint64),
}


def _unary_op(function: Any) -> Function:
    def evaluate(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
        """Apply the function to the only input.

        Returns: the output.
        """
        return function(inputs[0])

    return evaluate


def _binary_op(function: Any) -> Function:
    def evaluate(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
        """Apply the function to both inputs.

        Returns: the output.
        """
        if opset < 7 and "axis" in attrs:
            raise UnsupportedOp("broadcasting by the attribute axis (opset 6 or older)")
        return function(inputs[0], inputs[1])

    return evaluate


def _variadic_op(function: Any) -> Function:
    def evaluate(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
        """Combine all inputs pairwise, from left to right.

        Returns: the output.
        """
        return functools.reduce(function, inputs)

    return evaluate


def erf(x: Array) -> Array:
    """Compute erf(x) elementwise.

    Returns: float64 of x's shape.
    """
    return np.asarray(_ERF(x), np.float64)


def divide(a: Array, b: Array) -> Array:
    """Compute a / b elementwise.

    Returns: the quotient. Integers are truncated toward zero, as ONNX's Div specifies; numpy would round down.
    """
    if a.dtype.kind == "f":
        return a / b
    quotient = a // b
    return quotient + ((quotient * b != a) & ((a < 0) != (b < 0)))


def _power(a: Array, b: Array) -> Array:
    """Compute a ** b in the type of a. In ONNX, the result has this type whatever the type of b is."""
    if a.dtype.kind == "f":
        return np.power(a, b)
    if b.dtype.kind == "f" or (b < 0).any():
        return np.power(a.astype(np.float64), b).astype(a.dtype)
    return np.power(a, b).astype(a.dtype)


def _mod(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    if attrs.get("fmod"):
        return np.fmod(inputs[0], inputs[1])
    return np.mod(inputs[0], inputs[1])


def _clip(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    x = inputs[0]
    if opset < 11:
        low = attrs.get("min")
    else:
        low = optional_input(inputs, 1)
    if opset < 11:
        high = attrs.get("max")
    else:
        high = optional_input(inputs, 2)
    if low is not None:
        x = np.maximum(x, np.reshape(low, ()))
    if high is None:
        return x
    return np.minimum(x, np.reshape(high, ()))


def _mean(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    return functools.reduce(np.add, inputs) / len(inputs)


def _gelu(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    x = inputs[0]
    if decode_text(attrs.get("approximate", "none")) == "tanh":
        return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
    # The definition contains 1 + erf(x/√2), whose terms cancel for negative x. erfc(−x/√2) equals this sum, without
    # cancellation.
    return 0.5 * x * np.asarray(_ERFC(x * -math.sqrt(0.5)), np.float64)


def _leaky_relu(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    x = inputs[0]
    return np.where(x < 0, attrs.get("alpha", round_to_float32(0.01)) * x, x)


def _hard_sigmoid(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    line = attrs.get("alpha", round_to_float32(0.2)) * inputs[0] + attrs.get("beta", 0.5)
    return np.maximum(0.0, np.minimum(1.0, line))


def _swish(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    return inputs[0] / (1.0 + np.exp(-attrs.get("alpha", 1.0) * inputs[0]))


def _cast(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    to = attrs["to"]
    dtype = _CAST.get(to if isinstance(to, int) else decode_text(to))
    if dtype is None:
        raise UnsupportedOp(
            f"Cast to type {to}; supported types are float16, bfloat16, float, double, the integers of 8 to 64 "
            "bits and bool"
        )
    return inputs[0].astype(dtype, copy=False)


def _cast_like(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    return inputs[0].astype(inputs[1].dtype, copy=False)


def _dropout(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """Evaluate Dropout in inference mode: the input, and a mask of ones.

    The mask is bool from opset 10 on, and of the input's type before.
    """
    x = inputs[0]
    training = optional_input(inputs, 2)
    ratio = optional_input(inputs, 1)
    if opset < 7 and not attrs.get("is_test"):
        raise UnsupportedOp("Dropout in training mode (opset 6 or older without is_test)")
    if training is not None and training.all() and (ratio is None or ratio.any()):
        raise UnsupportedOp("Dropout in training mode")
    if outputs < 2:
        return x
    return x, np.ones(x.shape, np.bool_ if opset >= 10 else x.dtype)


def _where(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    return np.where(inputs[0], inputs[1], inputs[2])


_UNARY: dict[str, Any] = {
    "Neg": np.negative,
    "Abs": np.absolute,
    "Sqrt": np.sqrt,
    "Reciprocal": np.reciprocal,
    "Exp": np.exp,
    "Log": np.log,
    "Erf": erf,
    "Tanh": np.tanh,
    "Sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "Relu": lambda x: np.maximum(x, 0),
    "Softplus": lambda x: np.logaddexp(0.0, x),
    "Softsign": lambda x: x / (1.0 + np.absolute(x)),
    "HardSwish": lambda x: x * np.maximum(0.0, np.minimum(1.0, x / 6.0 + 0.5)),
    "Sign": np.sign,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.rint,
    "Not": np.logical_not,
    "IsNaN": np.isnan,
    "Identity": lambda x: x,
}

_BINARY: dict[str, Any] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": divide,
    "Pow": _power,
    "Equal": np.equal,
    "Less": np.less,
    "Greater": np.greater,
    "LessOrEqual": np.less_equal,
    "GreaterOrEqual": np.greater_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
}

FUNCTIONS: dict[str, Any] = {**_UNARY, **_BINARY}
"""Ops without attributes, as functions of their inputs."""

TABLE: Table = {
    **{("", op): _unary_op(function) for op, function in _UNARY.items()},
    **{("", op): _binary_op(function) for op, function in _BINARY.items()},
    ("", "Sum"): _variadic_op(np.add),
    ("", "Max"): _variadic_op(np.maximum),
    ("", "Min"): _variadic_op(np.minimum),
    ("", "Mean"): _mean,
    ("", "Mod"): _mod,
    ("", "Clip"): _clip,
    ("", "Where"): _where,
    ("", "Gelu"): _gelu,
    ("", "LeakyRelu"): _leaky_relu,
    ("", "HardSigmoid"): _hard_sigmoid,
    ("", "Swish"): _swish,
    ("", "Cast"): _cast,
    ("", "CastLike"): _cast_like,
    ("", "Dropout"): _dropout,
}
