"""Write a linear layer (MatMul and Add of a bias) as Gemm over rows if the runtime runs Gemm faster.

onnxruntime (1.31, CPU) adds the bias of a Gemm during the multiplication. After a MatMul of rank 3, the Add passes over
the product once more, because onnxruntime joins MatMul and Add only for inputs of rank 2. The Reshapes around Gemm copy
nothing. Adjacent Reshapes are merged, and Reshapes between two layers are removed
(`normdeploy.graphs.cleaning.movement_rules`). `benchmarks.whole_models` measures the gain in whole models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.graph import Graph
from ..option_values import USUAL
from .certification import pair_of
from .node_queries import is_standard_op, sole_consumer
from .proposals import Proposal, RewriteTarget, propose_for_speed
from .rounding_verdicts import fold_trial_maker

# Lowest opset in which Shape has the attributes start and end
_OPSET = 15


@dataclass(frozen=True)
class BiasedMatMul:
    """Linear layer y = x·weight + bias."""

    x: gs.Tensor
    weight: gs.Constant
    bias: gs.Constant
    y: gs.Tensor


def propose_row_gemm(graph: Graph, node: gs.Node, target: RewriteTarget) -> Proposal | None:
    """Propose to write the layer that starts at the MatMul ``node`` as Reshape, Gemm, Reshape.

    Returns:
        the proposal; None if ``node`` starts no such layer or the runtime does not benefit.
    """
    if target.wanted.runtime != USUAL or not target.wanted.rows or graph.opset < _OPSET:
        return None
    layer = match_layer(graph, node)
    if layer is None:
        return None
    rows, flat = _rows_matrix(graph, layer, target)
    shape, made = _result_shape(graph, layer, target)
    product = graph.make_node("Gemm", [rows, layer.weight, layer.bias], layer.y)
    end = graph.make_node("Reshape", [product.outputs[0], shape], layer.y)
    return propose_for_speed(
        "linear layer",
        layer.y,
        [*flat, *made, product, end],
        "Gemm",
        graph.module(node),
        (pair_of(graph, layer.y, [layer.x], end.outputs[0]),),
        trial=fold_trial_maker((), np.dtype(np.float32), _OPSET),
        shared={("rows", layer.x.name): rows} | ({_result_shape_key(graph, layer): shape} if made else {}),
    )


def match_layer(graph: Graph, node: gs.Node) -> BiasedMatMul | None:
    """Match a float32 MatMul of rank 3 or more with a constant matrix, followed by the Add of a constant bias.

    Returns:
        the layer; None if there is none.
    """
    if not is_standard_op(node, "MatMul"):
        return None
    (x, weight), (product,) = node.inputs, node.outputs
    shape = graph.shape(x)
    dtype = graph.dtype(x)
    if (
        dtype != np.float32
        or shape is None
        or len(shape) < 3
        or not isinstance(weight, gs.Constant)
        or len(weight.shape) != 2
    ):
        return None
    add = sole_consumer(graph, product, "Add")
    if graph.is_constant(x) or add is None:
        return None
    bias = next((t for t in add.inputs if t is not product), None)
    if not isinstance(bias, gs.Constant) or tuple(bias.shape) != (weight.shape[1],) or bias.dtype != np.float32:
        return None
    return BiasedMatMul(x, weight, bias, add.outputs[0])


def _rows_matrix(graph: Graph, layer: BiasedMatMul, target: RewriteTarget) -> tuple[gs.Tensor, list[gs.Node]]:
    """Return the input as a matrix of rows, and the new node that computes it; layers with the same input share it."""
    known = target.shared.get(("rows", layer.x.name))
    if known is not None and (maker := graph.producer(known)) is not None and graph.is_alive(maker):
        return known, []
    wanted = graph.add_constant(f"{layer.x.name}_rows", np.array([-1, layer.weight.shape[0]]), np.int64)
    node = graph.make_node("Reshape", [layer.x, wanted], layer.x)
    return node.outputs[0], [node]


def _result_shape_key(graph: Graph, layer: BiasedMatMul) -> tuple[object, ...]:
    """Return a key that is equal for results of one shape."""
    return ("shape", *(graph.shape(layer.x) or ())[:-1], layer.weight.shape[1])


def _result_shape(graph: Graph, layer: BiasedMatMul, target: RewriteTarget) -> tuple[gs.Tensor, list[gs.Node]]:
    """Return the shape of the result, and the new nodes that compute it.

    Nodes are needed only if the file leaves more than one dim open. Results of equal shape share these nodes.
    """
    key = _result_shape_key(graph, layer)
    _, *dims = key
    if sum(not isinstance(n, int) for n in dims) <= 1:
        return (
            graph.add_constant(
                f"{layer.y.name}_shape", np.array([n if isinstance(n, int) else -1 for n in dims]), np.int64
            ),
            [],
        )
    known = target.shared.get(key)
    if (
        None not in dims
        and known is not None
        and (maker := graph.producer(known)) is not None
        and graph.is_alive(maker)
    ):
        return known, []
    like = gs.Variable(f"{layer.y.name}_leading", dtype=np.int64)
    last = graph.add_constant(f"{layer.y.name}_channels", np.array([layer.weight.shape[1]]), np.int64)
    leading = graph.make_node("Shape", [layer.x], like, {"start": 0, "end": -1})
    joined = graph.make_node("Concat", [leading.outputs[0], last], like, {"axis": 0})
    return joined.outputs[0], [leading, joined]
