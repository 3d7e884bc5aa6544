"""A float64 evaluator of ONNX ops in numpy: the reference of certificates (see `normdeploy.rewriting.certification`).

Every op is computed by its specification (https://onnx.ai/onnx/operators) in all its forms from opset 1 on. Floating
tensors are float64 throughout, whatever type the model holds: a rounding Cast is an identity. Epsilons and other
attributes are the file's float32 numbers.

    with quiet():
        (y,) = apply("ReduceMean", [x, axes], {"keepdims": 1}, opset=18)
"""

import contextlib
from typing import Any

import numpy as np

from ..norms import function_bodies
from ..norms.norm_op import NormOp
from ..norms.third_party import function_op_row
from . import attention_op, contractions, elementwise_ops, norm_functions, quantize_ops, reductions, shape_ops
from .evaluation_budget import require_room_for
from .evaluator_core import Array, Attrs, Inputs, Table, UnsupportedOp

__all__ = ["OPS", "QUANTIZATION", "UnsupportedOp", "evaluate_node", "is_supported", "silence_numpy"]

OPS: Table = (
    elementwise_ops.TABLE
    | shape_ops.TABLE
    | reductions.TABLE
    | norm_functions.TABLE
    | contractions.TABLE
    | attention_op.TABLE
)
# what rounds: computed by `evaluate_node`, and nothing else may look through it
QUANTIZATION: Table = quantize_ops.TABLE


def is_supported(domain: str, op: str) -> bool:
    """Whether values may be computed through the op; `evaluate_node` may still refuse a form of it (training mode, a
    padding
    mode). Not through what quantizes: `evaluate_node` computes that, and a proof, a recognition or a fold of constants
    that saw through it would take its rounding for nothing."""
    return ("" if domain == "ai.onnx" else domain, op) in OPS or function_op_row(domain, op) is not None


def silence_numpy() -> contextlib.AbstractContextManager[object]:
    """Silences numpy about division by zero, overflow and NaN, which are IEEE's answers here. Put it around a whole
    evaluation: it costs more than a small op."""
    return np.errstate(all="ignore")


def evaluate_node(
    op: str, inputs: Inputs, attrs: Attrs, *, opset: int, domain: str = "", outputs: int = 1
) -> tuple[Array | None, ...]:
    """The outputs of one node, at most ``outputs`` of them.

    ``inputs``: arrays, float64 if floating, None for an optional input that is left out. ``attrs``: ints, floats,
    strings or bytes, lists of these, and arrays of any type for tensors; Cast's ``to`` is ONNX's number of the type.
    ``opset``: the version of the op's domain that the model imports. ``outputs``: how many the node has. An output can
    be a view of an input and read-only: don't write into one. None stands for an output that the op never fills.

    Raises Unsupported for an op or a form that is not covered, or that makes far more elements than it is given;
    ValueError, TypeError or IndexError where the inputs don't fit the op.
    """
    if domain == "ai.onnx":
        domain = ""
    function = OPS.get((domain, op)) or QUANTIZATION.get((domain, op))
    if function is None and (row := function_op_row(domain, op)) is not None:
        return _evaluate_body(row, inputs, attrs, opset, outputs)
    if function is None:
        raise UnsupportedOp(f"no float64 evaluation of {op}" + (f" of the domain {domain}" if domain else ""))
    require_room_for(op, inputs)
    result = function(inputs, attrs, opset, outputs)
    if type(result) is tuple:
        return tuple(value if value is None else np.asarray(value) for value in result[:outputs])
    return (np.asarray(result),)


def _evaluate_body(row: NormOp, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> tuple[Array | None, ...]:
    """An op whose function body travels in the file, by that: what other runtimes run is what certificates judge."""
    opset = max(opset, row.since)
    function = function_bodies.norm_function_body(row, opset)
    known: dict[str, Any] = {"": None, **dict(zip(function.input, inputs, strict=False))}
    for node in function.node:
        # rounding is an identity here
        if node.op_type == "CastLike":
            known[node.output[0]] = known[node.input[0]]
            continue
        given = function_bodies.call_attributes(node, attrs)
        results = evaluate_node(
            node.op_type, [known[i] for i in node.input], given, opset=opset, outputs=len(node.output)
        )
        known.update(zip(node.output, results, strict=False))
    return tuple(known[name] for name in function.output[:outputs])
