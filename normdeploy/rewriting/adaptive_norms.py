"""Match a group or instance norm whose scale and shift are data.

    y = GN(x) · s + t        with s and t of shape (N, C, 1, …), or of the shape of x

Guided diffusion (Dhariwal, Nichol 2021) computes s and t from an embedding, AdaIN (Huang, Belongie 2017) from another
image, and SPADE (Park et al. 2019) from a segmentation map, with one number for each position. In most models s is 1 +
data. The sum with 1 stays a node before the op.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.dims import Dims, is_invented_name
from ..graphs.graph import Graph
from .node_queries import channel_values, is_own_group_norm, is_standard_op, silu_nodes, sole_consumer

# GroupNormalization has one scale per channel from this opset on.
_SCALE_PER_CHANNEL = 21


@dataclass(frozen=True)
class AdaptiveNorm:
    """Norm with the nodes that scale and shift it.

    Attributes:
        op: "AdaGroupNorm", or "AdaGroupNormSiLU" if SiLU follows.
        groups: number of groups of channels.
        epsilon: epsilon of the norm.
        gamma: constant scale per channel of the norm itself, shape (C,); None for 1.
        beta: constant shift per channel of the norm itself, shape (C,); None for 0.
        scale: data s.
        shift: data t.
        result: result of the last node.
        nodes: the nodes behind the norm, in topological order.
    """

    op: str
    groups: int
    epsilon: float
    gamma: np.ndarray | None
    beta: np.ndarray | None
    scale: gs.Tensor
    shift: gs.Tensor
    result: gs.Tensor
    nodes: tuple[gs.Node, ...]


def find_adaptive_norm(graph: Graph, node: gs.Node) -> AdaptiveNorm | None:
    """Find the data by which the result of ``node`` is scaled and shifted.

    Returns:
        the norm; None if ``node`` is another norm, if another node reads one of the results before the last one, or if
        the data have other shapes.
    """
    norm = _read_channel_norm(graph, node)
    product = _read_binary(graph, node.outputs[0], "Mul") if norm is not None else None
    total = _read_binary(graph, product.node.outputs[0], "Add") if product is not None else None
    if norm is None or product is None or total is None:
        return None
    scale, shift = product.other, total.other
    layout = graph.shape(scale)
    per_channel = (norm.shape[0], norm.shape[1], *(1,) * (len(norm.shape) - 2))
    if layout is None or layout != graph.shape(shift) or layout not in (per_channel, norm.shape):
        return None
    if any(d is None or is_invented_name(d) for d in layout):
        return None
    # Data for each element of (N, tokens, width) modulate a LayerNorm of tokens, and channels are not normalized.
    if node.op == "LayerNormalization" and layout == norm.shape and len(layout) == 3:
        return None
    if any(graph.dtype(t) != graph.dtype(node.inputs[0]) for t in (scale, shift)):
        return None
    # With one number for each position, gamma and beta would cost a pass over all positions.
    if layout != per_channel and (norm.gamma is not None or norm.beta is not None):
        return None
    sum_of = total.node.outputs[0]
    activation = silu_nodes(graph, sum_of)
    return AdaptiveNorm(
        op="AdaGroupNormSiLU" if activation else "AdaGroupNorm",
        groups=norm.groups,
        epsilon=float(graph.attrs(node).get("epsilon", 1e-5)),
        gamma=norm.gamma,
        beta=norm.beta,
        scale=scale,
        shift=shift,
        result=activation[-1].outputs[0] if activation else sum_of,
        nodes=(product.node, total.node, *activation),
    )


def write_adaptive_parameters(graph: Graph, found: AdaptiveNorm) -> tuple[gs.Tensor, gs.Tensor, tuple[gs.Node, ...]]:
    """Write the nodes that multiply gamma and beta into the data: s · gamma and s · beta + t.

    Returns:
        scale and shift of the op, and the new nodes. They compute one number for each channel of each sample.
    """
    scale, shift = found.scale, found.shift
    dtype = graph.dtype(scale)
    rank = len(graph.shape(scale) or ())
    made: list[gs.Node] = []

    def write(op: str, t: gs.Tensor, operand: gs.Tensor) -> gs.Tensor:
        made.append(graph.make_node(op, [t, operand], t))
        return made[-1].outputs[0]

    def per_channel(name: str, value: np.ndarray) -> gs.Tensor:
        laid = value.reshape(-1, *(1,) * (rank - 2))
        return graph.add_constant(f"{found.result.name}_{name}", laid, dtype)

    if found.beta is not None:
        shift = write("Add", write("Mul", found.scale, per_channel("beta", found.beta)), found.shift)
    if found.gamma is not None:
        scale = write("Mul", found.scale, per_channel("gamma", found.gamma))
    return scale, shift, tuple(made)


@dataclass(frozen=True)
class _Binary:
    """Node with two operands, one of which is known.

    Attributes:
        node: the node.
        other: the other operand, which is data.
    """

    node: gs.Node
    other: gs.Tensor


def _read_binary(graph: Graph, t: gs.Tensor, op: str) -> _Binary | None:
    """Return the only reader of ``t`` if it is an ``op`` of ``t`` and data."""
    node = sole_consumer(graph, t, op)
    others = [operand for operand in node.inputs if operand is not t] if node is not None else []
    if node is None or len(others) != 1 or graph.is_constant(others[0]):
        return None
    return _Binary(node, others[0])


@dataclass(frozen=True)
class _ChannelNorm:
    """Norm over groups of channels of (N, C, …), with constant parameters.

    Attributes:
        shape: shape of the input.
        groups: number of groups.
        gamma: scale per channel; None for 1.
        beta: shift per channel; None for 0.
    """

    shape: Dims
    groups: int
    gamma: np.ndarray | None
    beta: np.ndarray | None


def _read_channel_norm(graph: Graph, node: gs.Node) -> _ChannelNorm | None:
    """Read a norm whose mean and variance are those of groups of channels, and whose parameters vary by channel."""
    standard = is_standard_op(node, "GroupNormalization", "InstanceNormalization", "LayerNormalization")
    if not standard and not is_own_group_norm(node):
        return None
    shape, dtype = graph.shape(node.inputs[0]), graph.dtype(node.inputs[0])
    if shape is None or len(shape) < 3 or not isinstance(shape[1], int):
        return None
    # The op computes in float32.
    if dtype is None or dtype.itemsize > 4:
        return None
    groups = _count_groups(graph, node, shape)
    laid = [_lay_out(graph, t, node.op, shape) for t in node.inputs[1:] if not t.is_empty()]
    values = [v for v in laid if v is not None]
    if groups is None or len(values) < len(laid):
        return None
    if any(n != 1 for v in values for a, n in enumerate(v.shape) if a != 1):
        return None
    gamma, beta = (*(np.broadcast_to(v.reshape(-1), (shape[1],)) for v in values), None, None)[:2]
    return _ChannelNorm(
        shape,
        groups,
        None if gamma is None or bool((gamma == 1).all()) else gamma,
        None if beta is None or not beta.any() else beta,
    )


def _lay_out(graph: Graph, t: gs.Tensor, op: str, shape: Dims) -> np.ndarray | None:
    """Return a constant parameter with the axes of the norm's input, of size 1 where the values are equal."""
    rank = len(shape)
    if op == "LayerNormalization" or not isinstance(shape[1], int):
        value = graph.known_value(t)
    else:
        value = channel_values(graph, t, shape[1])
    if value is None:
        return None
    if op == "LayerNormalization":
        value = value.reshape((1,) * (rank - value.ndim) + value.shape)
    else:
        value = value.reshape(1, -1, *(1,) * (rank - 2))
    for axis in range(rank):
        first = value.take([0], axis)
        if bool((value == first).all()):
            value = first
    return value


def _count_groups(graph: Graph, node: gs.Node, shape: Dims) -> int | None:
    """Return the number of groups of a norm over (N, C, …); None for other nodes."""
    attrs = graph.attrs(node)
    channels = shape[1] if isinstance(shape[1], int) else None
    if is_own_group_norm(node):
        return int(attrs["num_groups"])
    if node.op == "GroupNormalization":
        return int(attrs["num_groups"]) if graph.opset >= _SCALE_PER_CHANNEL else None
    if node.op == "InstanceNormalization":
        return channels
    # The optional outputs, mean and inverse standard deviation, must be unused.
    if any(graph.is_output(t) or graph.consumers(t) for t in node.outputs[1:]):
        return None
    axis = int(attrs.get("axis", -1)) % len(shape)
    return {1: 1, 2: channels}.get(axis)
