"""What transforms ask of the nodes around a tensor."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.graph import Graph
from ..storage.onnx_domains import is_standard


def is_standard_op(node: gs.Node | None, *ops: str) -> bool:
    """Return whether there is a node, and it is one of these standard ops."""
    return node is not None and node.op in ops and is_standard(node)


def standard_producer(graph: Graph, t: gs.Tensor, *ops: str) -> gs.Node | None:
    """Return the node that makes ``t``, where it is one of these standard ops."""
    node = graph.producer(t)
    if is_standard_op(node, *ops):
        return node
    return None


def sole_consumer(graph: Graph, t: gs.Tensor, *ops: str) -> gs.Node | None:
    """Return the node that alone reads the values of ``t``, which is no output; with ``ops``, where it is one of these
    standard ops."""
    if graph.is_output(t) or not graph.is_read_once(t):
        return None
    (node,) = graph.consumers(t)
    if not ops or is_standard_op(node, *ops):
        return node
    return None


def constant_number(graph: Graph, t: gs.Tensor) -> float | None:
    """Return the one number that a constant holds."""
    value: np.ndarray | None = graph.known_value(t)
    if value is not None and value.size == 1:
        return float(value.reshape(()))
    return None
