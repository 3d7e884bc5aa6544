"""Evaluate ONNX ops in numpy's float64: the reference of certificates (`normdeploy.rewriting.certification`).

Every op is computed by its specification (https://onnx.ai/onnx/operators) in all its forms from opset 1 on. Floating
tensors are float64 throughout, whatever their type in the model, so a Cast that would round returns its input. Epsilons
and other attributes keep the file's float32 value.

    with silence_numpy():
        (y,) = evaluate_node("ReduceMean", [x, axes], {"keepdims": 1}, opset=18)
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
# Ops that round. Only `evaluate_node` computes them; proofs, recognition and constant folding stop at them.
QUANTIZATION: Table = quantize_ops.TABLE


def is_supported(domain: str, op: str) -> bool:
    """Return whether values may be computed through the op.

    `evaluate_node` may still refuse some of its forms, such as training mode or a padding mode. Quantization ops count
    as unsupported here although `evaluate_node` computes them. Otherwise proofs, recognition and constant folding would
    ignore the rounding of these ops.

    Returns: True for the ops of `OPS` and for norm ops with a function body.
    """
    return ("" if domain == "ai.onnx" else domain, op) in OPS or function_op_row(domain, op) is not None


def silence_numpy() -> contextlib.AbstractContextManager[object]:
    """Silence numpy's warnings about division by zero, overflow and NaN, because the IEEE results are intended here.

    Returns: a context manager. Use it around a whole evaluation, because entering it takes longer than a small op.
    """
    return np.errstate(all="ignore")


def evaluate_node(
    op: str, inputs: Inputs, attrs: Attrs, *, opset: int, domain: str = "", outputs: int = 1
) -> tuple[Array | None, ...]:
    """Evaluate one node.

    Args:
        inputs: arrays, float64 if floating; None for an omitted optional input.
        attrs: ints, floats, strings or bytes, lists of these, and arrays of any type for tensors. Cast's ``to`` is an
            elem_type.
        opset: version of the op's domain that the model imports.
        outputs: number of outputs of the node.

    Returns:
        At most ``outputs`` arrays. An output may be a read-only view of an input, so don't write into it. None marks an
        output that the evaluator does not compute.

    Raises:
        UnsupportedOp: the op or its form is not covered, or creates far more elements than its inputs have.
        ValueError: the inputs don't fit the op; TypeError and IndexError may occur too.
    """
    if domain == "ai.onnx":
        domain = ""
    function = OPS.get((domain, op)) or QUANTIZATION.get((domain, op))
    if function is None and (row := function_op_row(domain, op)) is not None:
        return _evaluate_body(row, inputs, attrs, opset, outputs)
    if function is None:
        raise UnsupportedOp(f"no float64 evaluation of {op}" + (f" of domain {domain}" if domain else ""))
    require_room_for(op, inputs)
    result = function(inputs, attrs, opset, outputs)
    if type(result) is tuple:
        return tuple(value if value is None else np.asarray(value) for value in result[:outputs])
    return (np.asarray(result),)


def _evaluate_body(row: NormOp, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> tuple[Array | None, ...]:
    """Evaluate an op by its function body in the file. So certificates judge the nodes that other runtimes run."""
    opset = max(opset, row.since)
    function = function_bodies.norm_function_body(row, opset)
    known: dict[str, Any] = {"": None, **dict(zip(function.input, inputs, strict=False))}
    for node in function.node:
        # The evaluator does not round, so CastLike returns its input.
        if node.op_type == "CastLike":
            known[node.output[0]] = known[node.input[0]]
            continue
        given = function_bodies.call_attributes(node, attrs)
        results = evaluate_node(
            node.op_type, [known[i] for i in node.input], given, opset=opset, outputs=len(node.output)
        )
        known.update(zip(node.output, results, strict=False))
    return tuple(known[name] for name in function.output[:outputs])
