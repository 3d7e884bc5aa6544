"""Find the linear op that may take a scale and shift, although views lie between them.

The values of the scale and shift are mapped to the channels of the linear op.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from ..evaluate import evaluator
from ..graphs.graph import Graph
from ..graphs.region import EvaluationFailed, Refusal, compile_region, concrete_shape, size_assignments
from ..recognition.anchors import VIEWS
from ..storage.onnx_domains import is_standard
from .constant_linear import ConstantLinear, channel_vector

# torch exports a copy of a permuted tensor as an Identity.
_VIEWS = VIEWS | {"Identity"}


def producing_node(graph: Graph, t: gs.Tensor) -> gs.Node | None:
    """Find the node that computes ``t``, or the MatMul whose bias that node adds.

    Returns:
        the node, or None for a graph input or a constant.
    """
    node = graph.producer(t)
    if node is not None and node.op == "Add":
        above = [graph.producer(i) for i in node.inputs if not graph.is_constant(i)]
        if len(above) == 1 and above[0] is not None and above[0].op == "MatMul":
            return above[0]
        return node
    return node


def value_readers(graph: Graph, t: gs.Tensor) -> list[gs.Node]:
    """List the nodes that read the values of ``t``, not only its shape.

    Returns:
        all readers but Shape and Size nodes.
    """
    return [n for n in graph.consumers(t) if n.op not in ("Shape", "Size")]


def is_read_once(graph: Graph, t: gs.Tensor) -> bool:
    """Return True if only one node reads ``t``, so that a rewrite may change ``t``."""
    return not graph.is_output(t) and len(value_readers(graph, t)) == 1


def views_above(graph: Graph, z: gs.Tensor) -> tuple[gs.Tensor, list[gs.Node]]:
    """Follow the views above ``z``.

    Returns:
        the tensor that ``z`` is a view of, and the views between the two tensors in graph order.
    """
    views: list[gs.Node] = []
    while (node := graph.producer(z)) is not None and node.op in _VIEWS and is_standard(node):
        views.insert(0, node)
        z = node.inputs[0]
    return z, views


def views_below(graph: Graph, y: gs.Tensor) -> tuple[gs.Tensor, list[gs.Node]]:
    """Follow the views of ``y`` as long as nothing else reads them.

    Returns:
        the last view's output, and the views in graph order.
    """
    views: list[gs.Node] = []
    while (
        is_read_once(graph, y)
        and (node := value_readers(graph, y)[0]).op in _VIEWS
        and node.inputs[0] is y
        and is_standard(node)
    ):
        if views and len(graph.consumers(y)) > 1:
            # Another node reads the shape of this tensor, which the rewrite would remove.
            break
        views.append(node)
        y = node.outputs[0]
    return y, views


def output_channel_vector(
    graph: Graph, values: np.ndarray, t: gs.Tensor, z: gs.Tensor, linear: ConstantLinear
) -> np.ndarray | None:
    """Map a scale or shift of ``z``, a view of ``t``, to the output channels of the linear op that computes ``t``.

    Returns:
        a vector of shape (output channels,), or None if the values vary along other axes.
    """
    rank = len(graph.shape(t) or ())
    axis = linear.channel_axis(rank)
    if t is z:
        return channel_vector(values, axis, linear.output_channels)
    region = compile_region(graph, z, [t])
    if isinstance(region, Refusal):
        return None
    for sizes in size_assignments(region.symbols):
        size = concrete_shape(graph, t, sizes)
        if size is None or size[axis] != linear.output_channels:
            continue
        channel = np.broadcast_to(
            np.arange(linear.output_channels, dtype=float).reshape([-1 if i == axis else 1 for i in range(rank)]), size
        )
        try:
            with evaluator.silence_numpy():
                order = region.bind(sizes).run([channel]).astype(int)
                full = np.broadcast_to(values, order.shape)
        except (EvaluationFailed, ValueError):
            continue
        vector = np.zeros(linear.output_channels)
        vector[order.ravel()] = full.ravel()
        if (vector[order] == full).all():
            return vector
        return None
    return None


def input_channel_vector(
    graph: Graph, values: np.ndarray, y: gs.Tensor, t: gs.Tensor, linear: ConstantLinear
) -> np.ndarray | None:
    """Map a scale or shift of ``y`` to the input channels of the linear op that reads ``t``, a view of ``y``.

    Returns:
        a vector of shape (input channels,), or None if the values vary along other axes.
    """
    axis = linear.input_channel_axis(len(graph.shape(t) or ()))
    if t is y:
        return channel_vector(values, axis, linear.input_channels)
    region = compile_region(graph, t, [y])
    if isinstance(region, Refusal):
        return None
    for sizes in size_assignments(region.symbols):
        size = concrete_shape(graph, y, sizes)
        if size is None:
            return None
        try:
            with evaluator.silence_numpy():
                seen = region.bind(sizes).run([np.broadcast_to(values, size)])
        except (EvaluationFailed, ValueError):
            continue
        if seen.shape[axis] != linear.input_channels:
            continue
        rows = np.moveaxis(seen, axis, 0).reshape(linear.input_channels, -1)
        if (rows == rows[:, :1]).all():
            return rows[:, 0].copy()
        return None
    return None
