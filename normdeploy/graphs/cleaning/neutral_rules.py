"""Rules for operations with a neutral number: x · 1, x / 1, x - 0, x + 0, x and true, x or false."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from .node_matching import bypass_node, constant_array, is_understood

_NEUTRAL: dict[str, float | bool] = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1, "And": True, "Or": False}
_COMMUTES = frozenset({"Add", "Mul", "And", "Or"})

# Ops that never return -0. Sqrt is not included, because the root of -0 is -0.
_NEVER_MINUS_ZERO = frozenset({"Exp", "Sigmoid", "Softmax", "Abs", "Softplus", "ReduceL1", "ReduceL2"})
# Ops whose result is the same whether an input is +0 or -0.
_READ_ZEROS_ALIKE = frozenset(
    {"Abs", "Cos", "Equal", "Exp", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Sigmoid", "Softmax"}
)
# Ops that never return -0 if their input contains no -0.
_KEEP_SIGNS = frozenset(
    {"Expand", "Unsqueeze", "Identity", "ReduceMean", "ReduceSum", "Reshape", "Sqrt", "Squeeze", "Transpose"}
)
# Maximum number of nodes that the search for a possible -0 follows backwards.
_STEPS = 8
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})


def drop_neutral_operation(graph: ir.Graph, node: ir.Node) -> bool:
    """Drop an operation with its neutral number.

    Premise: the neutral number is exact and a single element. Its rank is at most that of x, so x is not broadcast. x ·
    1, x / 1, x - (+0) and x + (-0) equal x in IEEE 754 and for integers. But -0 + (+0) and -0 - (-0) are +0. So x +
    (+0) and x - (-0) are dropped only in three cases: the type has no -0, x can't be -0, or all consumers treat both
    zeros alike.

    Returns: whether the graph changed.
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
    """Return whether no element of ``value`` can be -0, judging by the nodes that make it.

    A square is never -0, because -0 · -0 = +0. Sums and means of numbers other than -0 are not -0 either; an empty sum
    is +0. A sum of two numbers is -0 only if both numbers are -0. The root of +0 is +0. Views only move numbers.
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
