"""Read a node in full, or refuse it: an attribute or input that a rule does not know may change what the node means."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

Rule = Callable[[ir.Graph, ir.Node], bool]

_WINDOW = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")

# op -> (its attributes, the most inputs) that the rules read. ``is_understood`` refuses every other form.
_READ: dict[str, tuple[tuple[str, ...], int | None]] = {
    "Add": ((), 2),
    "And": ((), 2),
    "Cast": (("to",), 1),
    "Clip": ((), 3),
    "ConstantOfShape": (("value",), 1),
    "Conv": (_WINDOW, 3),
    "ConvInteger": (_WINDOW, 4),
    "Div": ((), 2),
    "Flatten": (("axis",), 1),
    "Gather": (("axis",), 2),
    "MatMul": ((), 2),
    "Max": ((), None),
    "Min": ((), None),
    "Mul": ((), 2),
    "Or": ((), 2),
    "Pad": (("mode",), 4),
    "Range": ((), 3),
    "Relu": ((), 1),
    "Reshape": (("allowzero",), 2),
    "ScatterND": (("reduction",), 3),
    "Shape": (("start", "end"), 1),
    "Slice": ((), 5),
    "Squeeze": ((), 2),
    "Sub": ((), 2),
    "Transpose": (("perm",), 1),
    "Unsqueeze": ((), 2),
}


def is_understood(node: ir.Node | None, op: str) -> bool:
    """Return whether ``node`` is the standard ``op`` and the rules read every attribute and input of it."""
    if node is None or node.op_type != op or node.domain != "" or len(node.outputs) != 1:
        return False
    attributes, inputs = _READ[op]
    if any(name not in attributes or attribute.is_ref() for name, attribute in node.attributes.items()):
        return False
    return bool(node.inputs) and node.inputs[0] is not None and (inputs is None or len(node.inputs) <= inputs)


def producer_of_op(value: ir.Value | None, op: str) -> ir.Node | None:
    """Return the node that makes ``value`` where it is the standard ``op``, whatever its attributes are."""
    if value is None:
        node = None
    else:
        node = value.producer()
    if node is not None and node.op_type == op and node.domain == "":
        return node
    return None


def understood_producer(value: ir.Value | None, op: str) -> ir.Node | None:
    """Return the node that makes ``value`` where it is an understood ``op``."""
    node = producer_of_op(value, op)
    if is_understood(node, op):
        return node
    return None


def input_at(node: ir.Node, index: int) -> ir.Value | None:
    """Return the input at ``index``; None where it is left out."""
    if index < len(node.inputs):
        return node.inputs[index]
    return None


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """Return the numbers of a constant; None of what is computed. An input with a default has no numbers here:
    `simplify` puts the defaults aside before the rules run."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.dtype == ir.DataType.STRING:
        return None
    return tensor.numpy()


def constant_integers(value: ir.Value | None) -> list[int] | None:
    """Return the integers of a constant."""
    array = constant_array(value)
    if array is None or array.dtype.kind not in "iu":
        return None
    return [int(n) for n in array.reshape(-1)]


def static_dims(value: ir.Value | None) -> list[int] | None:
    """Return the dims of a tensor of known shape."""
    if value is None or value.shape is None:
        return None
    dims = [dim for dim in value.shape if isinstance(dim, int)]
    if len(dims) == len(value.shape):
        return dims
    return None


def is_same_size(a: object, b: object) -> bool:
    """Return whether two dims are known to be equal: the same number, or the same name."""
    if isinstance(a, ir.SymbolicDim) and a.value is None:
        return False
    return a == b


def int64_constant(values: list[int]) -> ir.Node:
    """Return a Constant of int64."""
    return ir.node("Constant", [], {"value": ir.tensor(np.array(values, np.int64))})


def replace_node(graph: ir.Graph, old: ir.Node, *new: ir.Node) -> bool:
    """Put ``new`` in the place of ``old``; the last one makes its output. Returns: True."""
    for node in new:
        node.metadata_props.update(old.metadata_props)
    ir.convenience.replace_nodes_and_values(graph, old, [old], list(new), old.outputs, new[-1].outputs)
    return True


def bypass_node(graph: ir.Graph, old: ir.Node, value: ir.Value | None) -> bool:
    """Let readers of ``old`` read ``value``. Returns: True."""
    return replace_node(graph, old, ir.node("Identity", [value]))


def write_reshape(graph: ir.Graph, old: ir.Node, dims: list[int]) -> bool:
    """Put a Reshape of the first input of ``old`` in its place. Returns: True."""
    shape = int64_constant(dims)
    return replace_node(graph, old, shape, ir.node("Reshape", [old.inputs[0], shape.outputs[0]]))


def write_transpose(graph: ir.Graph, old: ir.Node, x: ir.Value | None, order: list[int]) -> bool:
    """Put a Transpose of ``x`` in the place of ``old``, or ``x`` itself where the order stays. Returns: True."""
    if order == sorted(order):
        return bypass_node(graph, old, x)
    return replace_node(graph, old, ir.node("Transpose", [x], {"perm": order}))
