"""Rule for a ScatterND that overwrites all rows."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .node_matching import (
    bypass_node,
    constant_array,
    constant_integers,
    input_at,
    is_same_size,
    is_understood,
    understood_producer,
)


def drop_full_scatter(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace a ScatterND by its updates if it writes each row exactly once.

    Premise: ScatterND has no reduction, which would combine data with updates. The indices, of shape [n, 1], hold 0 …
    n-1 in this order, with n the first dim of data. The standard then requires updates of data's shape, so row i of the
    result is row i of the updates. The indices are constant, or they are Unsqueeze(Range(0, d, 1), [-1]), where d is a
    dim equal to n.

    Returns: whether the graph changed.
    """
    if not is_understood(node, "ScatterND") or node.attributes.get_string("reduction", "none") != "none":
        return False
    data = node.inputs[0]
    indices = input_at(node, 1)
    updates = input_at(node, 2)
    if data is None or data.shape is None or len(data.shape) == 0 or indices is None or updates is None:
        return False
    rows = data.shape[0]
    stated = constant_array(indices)
    if stated is not None:
        counted = isinstance(rows, int) and np.array_equal(stated, np.arange(rows).reshape(-1, 1))
    else:
        counted = _counts_all_rows(indices, rows)
    return counted and bypass_node(graph, node, updates)


def _counts_all_rows(indices: ir.Value, rows: object) -> bool:
    """Return whether a Range computes ``indices`` as [[0], [1], …], with one entry for each of the ``rows`` rows."""
    unsqueeze = understood_producer(indices, "Unsqueeze")
    if unsqueeze is None:
        counted = None
    else:
        counted = understood_producer(unsqueeze.inputs[0], "Range")
    if unsqueeze is None or counted is None or constant_integers(input_at(unsqueeze, 1)) not in ([-1], [1]):
        return False
    if constant_integers(counted.inputs[0]) != [0] or constant_integers(input_at(counted, 2)) != [1]:
        return False
    gather = understood_producer(input_at(counted, 1), "Gather")
    if gather is None:
        shape = None
    else:
        shape = understood_producer(gather.inputs[0], "Shape")
    if gather is None or shape is None or (shape.attributes.get_int("start") or 0) or "end" in shape.attributes:
        return False
    place = constant_integers(input_at(gather, 1))
    source = shape.inputs[0]
    if place is None or len(place) != 1 or source is None or source.shape is None:
        return False
    axis = place[0]
    return -len(source.shape) <= axis < len(source.shape) and is_same_size(source.shape[axis], rows)
