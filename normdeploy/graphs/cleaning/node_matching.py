"""Match a node only if the rules read all its attributes and inputs.

An unknown attribute or input may change the node's meaning.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

Rule = Callable[[ir.Graph, ir.Node], bool]

_WINDOW = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")

# Op → (attributes, maximum number of inputs) that the rules read; None allows any number of inputs. ``is_understood``
# returns False for every other form.
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
    """Return whether ``node`` is the standard ``op`` and the rules read all its attributes and inputs.

    Returns: False also for a node without a first input or with several outputs.
    """
    if node is None or node.op_type != op or node.domain != "" or len(node.outputs) != 1:
        return False
    attributes, inputs = _READ[op]
    if any(name not in attributes or attribute.is_ref() for name, attribute in node.attributes.items()):
        return False
    return bool(node.inputs) and node.inputs[0] is not None and (inputs is None or len(node.inputs) <= inputs)


def producer_of_op(value: ir.Value | None, op: str) -> ir.Node | None:
    """Return the node that makes ``value`` if it is the standard ``op``, with any attributes.

    Returns: None for another op, or for an input or initializer.
    """
    if value is None:
        node = None
    else:
        node = value.producer()
    if node is not None and node.op_type == op and node.domain == "":
        return node
    return None


def understood_producer(value: ir.Value | None, op: str) -> ir.Node | None:
    """Return the node that makes ``value`` if it is an understood ``op``.

    Returns: None for another op or form, or for an input or initializer.
    """
    node = producer_of_op(value, op)
    if is_understood(node, op):
        return node
    return None


def input_at(node: ir.Node, index: int) -> ir.Value | None:
    """Return the input at ``index``.

    Returns: None if it is omitted.
    """
    if index < len(node.inputs):
        return node.inputs[index]
    return None


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """Return the numbers of a constant.

    An input with a default value is not constant: `simplify` removes such defaults before the rules run.

    Returns: None if ``value`` is computed or holds strings.
    """
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.dtype == ir.DataType.STRING:
        return None
    return tensor.numpy()


def constant_integers(value: ir.Value | None) -> list[int] | None:
    """Return the integers of a constant as a flat list.

    Returns: None if ``value`` is computed or not of an integer type.
    """
    array = constant_array(value)
    if array is None or array.dtype.kind not in "iu":
        return None
    return [int(n) for n in array.reshape(-1)]


def static_dims(value: ir.Value | None) -> list[int] | None:
    """Return the dims of a tensor.

    Returns: None if the rank or a dim is unknown.
    """
    if value is None or value.shape is None:
        return None
    dims = [dim for dim in value.shape if isinstance(dim, int)]
    if len(dims) == len(value.shape):
        return dims
    return None


def is_same_size(a: object, b: object) -> bool:
    """Return whether two dims are known to be equal.

    Returns: True for the same number or the same name; False if either dim has no name.
    """
    if isinstance(a, ir.SymbolicDim) and a.value is None:
        return False
    return a == b


def int64_constant(values: list[int]) -> ir.Node:
    """Build a Constant of int64.

    Returns: a node whose output has the shape [number of values].
    """
    return ir.node("Constant", [], {"value": ir.tensor(np.array(values, np.int64))})


def replace_node(graph: ir.Graph, old: ir.Node, *new: ir.Node) -> bool:
    """Replace ``old`` by ``new``, whose last node makes the output.

    The new nodes inherit the metadata of ``old``.

    Returns: True.
    """
    for node in new:
        node.metadata_props.update(old.metadata_props)
    ir.convenience.replace_nodes_and_values(graph, old, [old], list(new), old.outputs, new[-1].outputs)
    return True


def bypass_node(graph: ir.Graph, old: ir.Node, value: ir.Value | None) -> bool:
    """Let the readers of ``old`` read ``value``.

    Returns: True.
    """
    return replace_node(graph, old, ir.node("Identity", [value]))


def write_reshape(graph: ir.Graph, old: ir.Node, dims: list[int]) -> bool:
    """Replace ``old`` by a Reshape of its first input.

    Returns: True.
    """
    shape = int64_constant(dims)
    return replace_node(graph, old, shape, ir.node("Reshape", [old.inputs[0], shape.outputs[0]]))


def write_transpose(graph: ir.Graph, old: ir.Node, x: ir.Value | None, order: list[int]) -> bool:
    """Replace ``old`` by a Transpose of ``x``, or by ``x`` itself if the order is unchanged.

    Returns: True.
    """
    if order == sorted(order):
        return bypass_node(graph, old, x)
    return replace_node(graph, old, ir.node("Transpose", [x], {"perm": order}))
