"""Query the nodes around a tensor, for transforms."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.graph import Graph
from ..norms.function_bodies import describe_missing
from ..norms.norm_table import DOMAIN, OURS
from ..storage.onnx_domains import is_standard


def is_standard_op(node: gs.Node | None, *ops: str) -> bool:
    """Return True if ``node`` is one of these standard ops.

    Args:
        ops: op types.

    Returns:
        False for None.
    """
    return node is not None and node.op in ops and is_standard(node)


def is_own_group_norm(node: gs.Node) -> bool:
    """Return True if ``node`` is a complete call of normdeploy's own op GroupNorm."""
    named = node.domain == DOMAIN and node.op == "GroupNorm"
    return named and not describe_missing(OURS[node.op], [t.name for t in node.inputs], node.attrs)


def standard_producer(graph: Graph, t: gs.Tensor, *ops: str) -> gs.Node | None:
    """Return the producer of ``t`` if it is one of these standard ops.

    Returns:
        the node; None otherwise.
    """
    node = graph.producer(t)
    if is_standard_op(node, *ops):
        return node
    return None


def sole_consumer(graph: Graph, t: gs.Tensor, *ops: str) -> gs.Node | None:
    """Return the only node that reads the values of ``t``, if ``t`` is not a graph output.

    Args:
        ops: op types; any if empty.

    Returns:
        the node; None if there are several readers, or the only reader is another op.
    """
    if graph.is_output(t) or not graph.is_read_once(t):
        return None
    (node,) = graph.consumers(t)
    if not ops or is_standard_op(node, *ops):
        return node
    return None


def silu_nodes(graph: Graph, y: gs.Tensor) -> tuple[gs.Node, ...]:
    """Return the nodes of y · sigmoid(y), in topological order, if they alone read ``y`` and its sigmoid.

    Returns:
        a Swish, or a Sigmoid and a Mul; () if there are none.
    """
    readers = graph.consumers(y)
    if graph.is_output(y):
        return ()
    if len(readers) == 1 and is_standard_op(readers[0], "Swish") and graph.attrs(readers[0]).get("alpha", 1.0) == 1.0:
        return (readers[0],)
    gate = next((n for n in readers if is_standard_op(n, "Sigmoid")), None)
    product = next((n for n in readers if is_standard_op(n, "Mul")), None)
    if len(readers) != 2 or gate is None or product is None:
        return ()
    if {id(t) for t in product.inputs} != {id(y), id(gate.outputs[0])}:
        return ()
    if sole_consumer(graph, gate.outputs[0]) is None:
        return ()
    return gate, product


def channel_values(graph: Graph, t: gs.Tensor, channels: int) -> np.ndarray | None:
    """Read a parameter with one number for each channel.

    torch fills the parameters of a norm without weights by ConstantOfShape, whose size comes from the input's shape.

    Returns:
        float64 array of shape (channels,); None if the values depend on data or have another size.
    """
    value: np.ndarray | None = graph.known_value(t)
    if value is None and graph.shape(t) in ((channels,), (None,)):
        filling = standard_producer(graph, t, "ConstantOfShape")
        if filling is not None:
            value = np.full(channels, np.asarray(graph.attrs(filling).get("value", 0.0), np.float64).reshape(()))
    return value if value is not None and value.shape == (channels,) else None


def constant_number(graph: Graph, t: gs.Tensor) -> float | None:
    """Read a constant of one element.

    Returns:
        the number; None for other tensors.
    """
    value: np.ndarray | None = graph.known_value(t)
    if value is not None and value.size == 1:
        return float(value.reshape(()))
    return None
