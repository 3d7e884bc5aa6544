"""Replace computed sizes of Reshape and Expand by constants, so that the shape arithmetic of an open dim disappears.

A Reshape or Expand to the shape of its input becomes an Identity. In a Reshape's operand, each open size equal to the
data's size in the same position becomes 0 ("unchanged"). Alternatively, one other open size becomes -1 ("the remaining
elements"). A 0 and a -1 together are not allowed, because in an empty batch the remaining elements do not determine a
size. In an Expand's operand, a size equal to the data's size becomes 1. All of this holds at every size, by the
polynomials of `normdeploy.graphs.shape_completion`.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import unique_name
from .graph import Graph
from .proto_queries import all_names
from .shape_completion import integer_values, symbolic_shape
from .symbolic_sizes import ONE, Size

_OPS = frozenset({"Reshape", "Expand"})


def resolve_reshapes(proto: onnx.ModelProto) -> bool:
    """Give the Reshapes and Expands of the main graph constant operands if possible.

    Returns:
        Whether ``proto`` was changed.
    """
    if not any(node.op_type in _OPS for node in proto.graph.node):
        return False
    graph = Graph(proto)
    sizes = integer_values(graph)
    resolved: dict[str, list[int]] = {}
    idle: set[str] = set()
    for node in graph.nodes:
        if node.op not in _OPS or not is_standard(node) or len(node.inputs) < 2:
            continue
        operand = sizes.get(id(node.inputs[1]))
        data = symbolic_shape(graph, node.inputs[0])
        if operand is None:
            operand = graph.known_value(node.inputs[1])
        if data is None or operand is None or operand.ndim != 1:
            continue
        asked = [Size.from_int(n) for n in operand.tolist()]
        if _keeps_shape(node.op, data, asked):
            idle.add(node.outputs[0].name)
        elif not graph.is_constant(node.inputs[1]):
            if node.op == "Reshape":
                numbers = _reshape_operand(data, asked, graph.attrs(node).get("allowzero", 0))
            else:
                numbers = _expand_operand(data, asked)
            if numbers is not None:
                resolved[node.outputs[0].name] = numbers
    taken = set(all_names(proto.graph))
    for node_proto in proto.graph.node:
        if node_proto.output and node_proto.output[0] in idle:
            node_proto.op_type = "Identity"
            del node_proto.input[1:], node_proto.attribute[:]
        numbers = resolved.get(node_proto.output[0]) if node_proto.output else None
        if numbers is None:
            continue
        name = unique_name(f"{node_proto.output[0]}.sizes", taken)
        proto.graph.initializer.append(numpy_helper.from_array(np.array(numbers, dtype=np.int64), name))
        node_proto.input[1] = name
    return bool(idle or resolved)


def _keeps_shape(op: str, data: list[Size], asked: list[Size]) -> bool:
    """Return whether the operand requests the shape that the data already has.

    The shape that the file declares for the result is not trusted.
    """
    if op == "Expand":
        return len(asked) <= len(data) and all(
            n in (own, ONE) for n, own in zip(reversed(asked), reversed(data), strict=False)
        )
    rest = [i for i, n in enumerate(asked) if n == -1]
    return (
        len(asked) == len(data)
        and len(rest) < 2
        and all(i in rest or n == own for i, (n, own) in enumerate(zip(asked, data, strict=True)))
    )


def _reshape_operand(data: list[Size], asked: list[Size], allowzero: int) -> list[int] | None:
    if allowzero:
        return None
    view: list[int] = []
    copied = rest = False
    for i, n in enumerate(asked):
        number = n.constant_value
        # The operand states a number: a size, 0 or -1.
        if number is not None:
            view.append(number)
        elif i < len(data) and n == data[i]:
            view.append(0)
            copied = True
        else:
            view.append(-1)
            rest = True
    # If a copied size is zero, the tensor has no elements, and -1 does not determine a size.
    if view.count(-1) > 1 or (rest and copied):
        return None
    return view


def _expand_operand(data: list[Size], asked: list[Size]) -> list[int] | None:
    offset = len(asked) - len(data)
    spread: list[int] = []
    for i, n in enumerate(asked):
        if i >= offset:
            own = data[i - offset]
        else:
            own = ONE
        number = n.constant_value
        if number is None and n != own:
            return None
        spread.append(1 if number is None else number)
    return spread
