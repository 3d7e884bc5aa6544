"""Rewrite norm nodes that some version of TensorRT can't parse or parses wrongly. The new nodes compute the same
function and are parsed correctly.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ..graphs.dims import Dims
from ..graphs.graph import Graph
from ..graphs.own_op_functions import DOMAIN, OLDEST
from ..graphs.region import RefusedError
from .plugin_nodes import PluginPlan, PluginPlanner

_HALVES = ("float16", "bfloat16")


def to_own_rms_norm(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    """Plan to replace RMSNormalization by normdeploy's own op RMSNorm. Every TensorRT from 9.0 on can parse its
    function body.

    Returns:
        the plan.

    Raises:
        RefusedError: the opset is too old, or the types of input and scale differ.
    """
    graph = p.graph
    attributes = p.graph.attrs(node)
    x, scale = node.inputs
    axis = int(attributes.get("axis", -1))
    shape = p.known_shape(x)
    axis -= len(shape) if axis >= 0 else 0
    if graph.opset < OLDEST or graph.dtype(x) != graph.dtype(scale):
        raise RefusedError("its result has its scale's type, not its input's")
    stash = attributes.get("stash_type", 1)
    epsilon = attributes.get("epsilon", 1e-5)
    new = graph.make_node(
        "RMSNorm",
        [x, scale],
        node.outputs[0],
        {"axes": [*range(axis, 0)], "epsilon": epsilon, "stash_type": stash},
        DOMAIN,
    )
    filled = _fill_shape(shape, p.known_shape(scale, 0))
    data = () if graph.is_constant(scale) else (scale,)
    free = tuple(range(len(shape) + axis))
    return PluginPlan((node,), (node.outputs[0],), (x, *data), (new,), filled, free, "function body of RMSNorm")


def _fill_shape(shape: Dims, own: Dims) -> Dims:
    """Fill unknown dims of ``shape`` from a parameter of shape ``own`` that broadcasts to it.

    Returns:
        dims of x. For example, (None, None) and (64,) give (None, 64).
    """
    own = ((1,) * len(shape) + own)[-len(shape) :]
    return tuple(b if isinstance(b, int) and b != 1 else a for a, b in zip(shape, own, strict=True))


def to_layer_norm(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    """Plan to replace GroupNormalization of one group by LayerNormalization over all axes after the batch.

    Scale and bias get the shape (C, 1, ...).

    Returns:
        the plan.
    """
    graph = p.graph
    x = node.inputs[0]
    y = node.outputs[0]
    shape = p.known_shape(x, 3)
    attributes = graph.attrs(node)
    parameters, before, shape = _reshape_parameters(p, node, shape)
    given = {name: attributes[name] for name in ("epsilon", "stash_type") if name in attributes}
    new = graph.make_node("LayerNormalization", [x, *parameters], y, {"axis": 1} | given)
    return PluginPlan(
        (node,),
        (y,),
        (x, *_data_parameters(graph, node)),
        (*before, new),
        shape,
        (0, *range(2, len(shape))),
        "LayerNormalization(axis=1)",
    )


def to_instance_norm(p: PluginPlanner, node: gs.Node) -> PluginPlan:
    """Plan to replace GroupNormalization of opset 21 by InstanceNormalization of shape (N, groups, ...), then Mul and
    Add.

    Half-precision data is converted to float32 if ``stash_type`` is float32.

    Returns:
        the plan.
    """
    graph = p.graph
    x = node.inputs[0]
    y = node.outputs[0]
    shape = p.known_shape(x, 3)
    attributes = graph.attrs(node)
    dtype = p.dtype(x)
    groups = int(attributes["num_groups"])
    parameters, before, shape = _reshape_parameters(p, node, shape)
    wide = dtype.name in _HALVES and attributes.get("stash_type", 1) == onnx.TensorProto.FLOAT
    kind = np.dtype(np.float32) if wide else dtype
    nodes = list(before)

    def append_node(op: str, *inputs: gs.Tensor, **attrs: int | float) -> gs.Tensor:
        """Add a node to the plan.

        Returns:
            the node's output.
        """
        nodes.append(graph.make_node(op, inputs, y, attrs))
        return nodes[-1].outputs[0]

    t = append_node("Cast", x, to=onnx.TensorProto.FLOAT) if wide else x
    t = append_node("Reshape", t, graph.add_constant(f"{y.name}_groups", np.array([0, groups, -1]), np.int64))
    unit, zero = (
        graph.add_constant(f"{y.name}_{name}", np.full(groups, v), kind) for name, v in (("unit", 1.0), ("zero", 0.0))
    )
    t = append_node("InstanceNormalization", t, unit, zero, epsilon=attributes.get("epsilon", 1e-5))
    t = append_node("Reshape", t, append_node("Shape", x))
    if wide:
        t = append_node("Cast", t, to=onnx.helper.np_dtype_to_tensor_dtype(dtype))
    append_node("Add", append_node("Mul", t, parameters[0]), parameters[1])
    free = (0, *range(2, len(shape)))
    return PluginPlan(
        (node,),
        (y,),
        (x, *_data_parameters(graph, node)),
        tuple(nodes),
        shape,
        free,
        "Reshape, InstanceNormalization, Reshape, Mul, Add",
    )


def _data_parameters(graph: Graph, node: gs.Node) -> list[gs.Tensor]:
    return [t for t in node.inputs[1:3] if not graph.is_constant(t)]


def _reshape_parameters(p: PluginPlanner, node: gs.Node, shape: Dims) -> tuple[list[gs.Tensor], list[gs.Node], Dims]:
    """Reshape scale and bias to (C, 1, ...).

    Returns:
        the two tensors, the Reshape nodes of parameters that are not constants, and the shape of x with C filled in.
    """
    vectors = []
    nodes = []
    laid = (-1, *(1,) * (len(shape) - 2))
    for name, t in zip(("scale", "bias"), node.inputs[1:3], strict=True):
        value = p.graph.known_value(t)
        own = p.known_shape(t, 0)
        if value is None:
            target = p.graph.add_constant(f"{node.outputs[0].name}_{name}_shape", np.array(laid), np.int64)
            nodes.append(p.graph.make_node("Reshape", [t, target], t))
            vectors.append(nodes[-1].outputs[0])
        else:
            vectors.append(p.make_constant(node.outputs[0], name, value.reshape(laid), p.graph.dtype(t)))
        if all(isinstance(n, int) for n in own):
            size = math.prod(n for n in own if isinstance(n, int))
        else:
            size = 1
        shape = _fill_shape(shape, (size, *(1,) * (len(shape) - 2)))
    return vectors, nodes, shape
