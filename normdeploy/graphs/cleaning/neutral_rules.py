"""Rules for neutral numbers: x · 1, x / 1, x - 0, x + 0, x and true, x or false."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from .node_matching import bypass_node, constant_array, is_understood

_NEUTRAL: dict[str, float | bool] = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1, "And": True, "Or": False}
_COMMUTES = frozenset({"Add", "Mul", "And", "Or"})

# What these make is never -0: a square root of -0 is, so Sqrt is not among them.
_NEVER_MINUS_ZERO = frozenset({"Exp", "Sigmoid", "Softmax", "Abs", "Softplus", "ReduceL1", "ReduceL2"})
# These read +0 and -0 alike.
_READ_ZEROS_ALIKE = frozenset(
    {"Abs", "Cos", "Equal", "Exp", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Sigmoid", "Softmax"}
)
# Of numbers that are never -0 these make others that are none.
_KEEP_SIGNS = frozenset(
    {"Expand", "Unsqueeze", "Identity", "ReduceMean", "ReduceSum", "Reshape", "Sqrt", "Squeeze", "Transpose"}
)
# nodes that are looked back
_STEPS = 8
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})


def drop_neutral_operation(graph: ir.Graph, node: ir.Node) -> bool:
    """Drop an operation with the neutral number.

    Premise: one number, exactly neutral, of no higher rank than x, so that nothing is broadcast. x · 1 and x / 1 are x
    in IEEE 754 and in whole numbers. x - (+0) and x + (-0) are x too. -0 + (+0) and -0 - (-0) are +0: these go only
    where the type has no -0, where x can't be -0, or where all that reads the result takes both zeros alike.
    """
    op = node.op_type
    if op not in _NEUTRAL or not is_understood(node, op) or len(node.inputs) != 2:
        return False
    sides = (0, 1) if op in _COMMUTES else (0,)
    for side in sides:
        x = node.inputs[side]
        number = constant_array(node.inputs[1 - side])
        if x is None or number is None or number.size != 1 or number.item() != _NEUTRAL[op]:
            continue
        if number.ndim and (x.shape is None or number.ndim > len(x.shape)):
            continue
        if op in {"Add", "Sub"} and not _keeps_zero_signs(node, x, number):
            continue
        return bypass_node(graph, node, x)
    return False


def _keeps_zero_signs(node: ir.Node, x: ir.Value, zero: np.ndarray) -> bool:
    if x.dtype is None:
        return False
    if x.dtype not in _FLOATS:
        return x.dtype.is_integer()
    negative = math.copysign(1, float(zero.item())) < 0
    if negative == (node.op_type == "Add"):
        return True
    if _is_never_minus_zero(x, _STEPS):
        return True
    y = node.outputs[0]
    readers = [reader for reader, _ in y.uses()]
    alike = all(reader.domain == "" and reader.op_type in _READ_ZEROS_ALIKE for reader in readers)
    return bool(readers) and alike and not y.is_graph_output()


def _is_never_minus_zero(value: ir.Value, steps: int) -> bool:
    """Whether no element of ``value`` can be -0, by the nodes that make it.

    A square is never -0, for -0 · -0 = +0. Sums and means of numbers that are none are none, of no number too: an empty
    sum is +0. A sum of two is -0 only where both are. A root of +0 is +0. Views move numbers.
    """
    node = value.producer()
    if node is None or node.domain != "" or not steps or not node.inputs or node.inputs[0] is None:
        return False
    op = node.op_type
    x = node.inputs[0]
    if op in _NEVER_MINUS_ZERO:
        return True
    if op == "Mul":
        return len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
    if op == "Pow":
        exponent = constant_array(node.inputs[1])
        return exponent is not None and exponent.size == 1 and exponent.item() == 2
    if op == "Cast" and x.dtype is not None and (x.dtype.is_integer() or x.dtype == ir.DataType.BOOL):
        return True
    if op == "Add":
        return any(each is not None and _is_never_minus_zero(each, steps - 1) for each in node.inputs)
    return op in _KEEP_SIGNS and _is_never_minus_zero(x, steps - 1)
