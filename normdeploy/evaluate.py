"""A float64 evaluator of ONNX ops in numpy: the reference of certificates (see `normdeploy.certify`).

Every op is computed by its specification (https://onnx.ai/onnx/operators) in all its forms from opset 1 on. Floating tensors are float64
throughout, whatever type the model holds: a rounding Cast is an identity. Epsilons and other attributes are the file's float32 numbers.

    with quiet():
        (y,) = apply("ReduceMean", [x, axes], {"keepdims": 1}, opset=18)
"""

import contextlib

import numpy as np

from normdeploy import evaluate_linear, evaluate_pointwise, evaluate_reductions, evaluate_shapes
from normdeploy.evaluate_core import Array, Attrs, Inputs, Table, Unsupported

__all__ = ["OPS", "Unsupported", "apply", "quiet", "supported"]

OPS: Table = evaluate_pointwise.TABLE | evaluate_shapes.TABLE | evaluate_reductions.TABLE | evaluate_linear.TABLE


def supported(domain: str, op: str) -> bool:
    """Whether there is a function for the op; `apply` may still refuse a form of it (training mode, a padding mode)."""
    return ("" if domain == "ai.onnx" else domain, op) in OPS


def quiet() -> contextlib.AbstractContextManager[object]:
    """Silences numpy about division by zero, overflow and NaN, which are IEEE's answers here. Put it around a whole evaluation: it costs
    more than a small op."""
    return np.errstate(all="ignore")


def apply(op: str, inputs: Inputs, attrs: Attrs, *, opset: int, domain: str = "", outputs: int = 1) -> tuple[Array | None, ...]:
    """The outputs of one node, at most ``outputs`` of them.

    ``inputs``: arrays, float64 if floating, None for an optional input that is left out. ``attrs``: ints, floats, strings or bytes, lists
    of these, and arrays of any type for tensors; Cast's ``to`` is ONNX's number of the type. ``opset``: the version of the op's domain that
    the model imports. ``outputs``: how many the node has. An output can be a view of an input and read-only: don't write into one. None
    stands for an output that the op never fills.

    Raises Unsupported for an op or a form that is not covered; ValueError, TypeError or IndexError where the inputs don't fit the op.
    """
    function = OPS.get((domain, op)) or (OPS.get(("", op)) if domain == "ai.onnx" else None)
    if function is None:
        raise Unsupported(f"no float64 evaluation of {op}" + (f" of the domain {domain}" if domain else ""))
    result = function(inputs, attrs, opset, outputs)
    if type(result) is tuple:
        return tuple(value if value is None else np.asarray(value) for value in result[:outputs])
    return (np.asarray(result),)
