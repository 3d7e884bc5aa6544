"""Find the numbers that a graph compares with an unmodified input.

Examples are the 0.5 of x > 0.5, the edge of a bucket, and the threshold of a decision tree. If the input equals such a
number, > and >= give different results. The search passes through exact ops only. After a product or a sum, the result
of a comparison depends on rounding, and either result is correct.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx

from ..dtypes import is_float_dtype
from ..storage.onnx_domains import STANDARD
from ..storage.proto_traversal import attribute_graphs, nodes_with_bodies
from ..types import Arrays
from .graph_thresholds import distinct_numbers, node_constant, small_constants

# Ops for which each element of the result is an element of an operand, or its negative.
_MOVES = frozenset(
    {
        *("Identity", "CastLike", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Concat"),
        *("Split", "Expand", "Pad", "Gather", "GatherElements", "GatherND", "Dropout", "Tile", "Where", "ScatterND"),
        *("ScatterElements", "DepthToSpace", "SpaceToDepth", "Relu", "Clip", "Min", "Max", "ReduceMax", "ReduceMin"),
        *("MaxPool", "GlobalMaxPool"),
    }
)
_TURNS = frozenset({"Neg", "Abs"})
_COMPARISONS = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"})
# Op → the fixed numbers at which its result jumps.
JUMPS: Mapping[str, tuple[float, ...]] = {
    "sign": (0.0,),
    "floor": (-1.0, 0.0, 1.0, 2.0),
    "ceil": (-1.0, 0.0, 1.0, 2.0),
    "trunc": (-1.0, 0.0, 1.0, 2.0),
    "round": (-0.5, 0.5, 1.5, 2.5),
}
_LEAF = b"LEAF"
_Origins = dict[str, frozenset[str]]


def comparison_thresholds(proto: onnx.ModelProto) -> dict[str, tuple[float, ...]]:
    """Find the numbers that the graph and its bodies compare with an input's elements. Functions are not searched.

    Returns: floating input → numbers.
    """
    found: dict[str, dict[float, None]] = {}
    origins = {
        value.name: frozenset({value.name})
        for value in proto.graph.input
        if is_float_dtype(_numpy_dtype(value.type.tensor_type.elem_type))
    }
    _collect_thresholds(proto.graph, origins, {}, found)
    return {name: tuple(values) for name, values in found.items()}


def compares_values(proto: onnx.ModelProto) -> bool:
    """Return whether any node of the graph or of its bodies compares numbers or converts them to integers.

    Returns: True also if that node does not read an input of the graph.
    """
    return any(
        node.op_type in _COMPARISONS
        or node.op_type.lower() in JUMPS
        or (node.op_type == "Cast" and any(a.name == "to" and _numpy_dtype(a.i).kind in "iu" for a in node.attribute))
        for node in nodes_with_bodies(proto.graph.node)
    )


def _numpy_dtype(kind: int) -> np.dtype:
    if kind:
        return onnx.helper.tensor_dtype_to_np_dtype(kind)
    return np.dtype(object)


def _collect_thresholds(
    graph: onnx.GraphProto,
    outer: Mapping[str, frozenset[str]],
    outer_constants: Arrays,
    found: dict[str, dict[float, None]],
) -> None:
    origins: _Origins = dict(outer)
    constants = small_constants(graph, outer_constants)
    for node in graph.node:
        for body in (body for attribute in node.attribute for body in attribute_graphs(attribute)):
            _collect_thresholds(body, origins, constants, found)
        if (value := node_constant(node, constants)) is not None:
            constants[node.output[0]] = value
        for name, values in _node_thresholds(node, constants):
            for origin in origins.get(name, ()):
                # The input may have been negated on the way.
                found.setdefault(origin, {}).update(dict.fromkeys(v for c in values for v in (c, -c)))
        if node.domain in STANDARD and (node.op_type in _MOVES | _TURNS or _is_widening_cast(node)):
            moved = frozenset[str]().union(*(origins.get(name, frozenset()) for name in node.input))
            origins.update(dict.fromkeys(node.output, moved))


def _node_thresholds(node: onnx.NodeProto, constants: Arrays) -> Iterator[tuple[str, Iterable[float]]]:
    """Yield each input of a node with the finite numbers at which the node's result changes."""
    attributes = {a.name: a for a in node.attribute}
    if node.op_type.startswith("TreeEnsemble") and "nodes_modes" in attributes and "nodes_values" in attributes:
        modes = attributes["nodes_modes"].strings
        values = attributes["nodes_values"].floats
        yield node.input[0], [v for mode, v in zip(modes, values, strict=False) if mode != _LEAF]
    elif node.domain not in STANDARD:
        return
    elif node.op_type in _COMPARISONS:
        for name, other in (node.input, reversed(node.input)):
            yield name, [v for v in distinct_numbers(constants.get(other)) if np.isfinite(v)]
    elif node.op_type.lower() in JUMPS:
        yield node.input[0], JUMPS[node.op_type.lower()]
    elif node.op_type == "Cast" and _numpy_dtype(attributes["to"].i).kind in "iu":
        yield node.input[0], JUMPS["floor"]


def _is_widening_cast(node: onnx.NodeProto) -> bool:
    """Return whether a Cast keeps every float32 number."""
    wide = {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE}
    return node.op_type == "Cast" and any(a.name == "to" and a.i in wide for a in node.attribute)
