"""Find the linear layers of a file that can be quantized, and group the layers that share an input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from ..forms.channel_views import input_channel_vector
from ..forms.constant_linear import ConstantLinear
from ..graphs.graph import Graph
from ..graphs.region import Refusal
from .linear_layers import SPLIT, find_linear_layers, layer_source
from .number_formats import INT8, CodeFormat
from .qdq_writer import LayerPlan
from .smoothing import LayerGroup


@dataclass(frozen=True)
class LayerCandidate:
    """One linear layer with its plan, or with the ``reason`` why it can't be quantized.

    Attributes:
        module: name of the model's module that the layer belongs to.
        input: tensor that the layer reads as data, which would be quantized.
        axis: axis of the input's channels.
        source: tensor whose scale and shift a migration would move into the layer (`scale_migration`).
        result: result of the layer, including an added bias.
        outputs: number of output channels.
        groups: groups of a convolution.
        activated: result of a convolution. If the only reader of this result is a Relu or Clip, the result of the Relu
            or Clip. "" for other ops, and if the tensor is an output of the graph.
    """

    plan: LayerPlan
    op: str
    module: str
    input: str
    axis: int
    source: str
    result: str
    outputs: int
    groups: int = 1
    activated: str = ""
    reason: str = ""


def find_candidates(graph: Graph, form: CodeFormat, block: int = 0) -> list[LayerCandidate]:
    """List every Conv, ConvTranspose, Gemm and MatMul with one constant input, in the graph's order.

    Args:
        form: format of the weights.
        block: input channels that share a scale; 0 for one scale per output channel.

    Returns:
        one candidate per layer. A candidate that can't be quantized has a reason.
    """
    return [_make_candidate(graph, linear, form, block) for linear in find_linear_layers(graph)]


def _make_candidate(graph: Graph, linear: ConstantLinear | Refusal, form: CodeFormat, block: int) -> LayerCandidate:
    if isinstance(linear, Refusal):
        node = next((n for n in graph.nodes if n.outputs[0].name == linear.tensor), None)
        plan = LayerPlan(linear.tensor, 0, 1, form, None)
        return LayerCandidate(
            plan,
            node.op if node is not None else "",
            graph.module(node) if node is not None else "",
            "",
            -1,
            "",
            linear.tensor,
            0,
            reason=linear.reason,
        )
    node = linear.node
    data = linear.data_input
    stored = node.inputs[linear.weight]
    rank = len(graph.shape(data) or ())
    plan = LayerPlan(
        node.outputs[0].name, 1 - linear.weight, linear.weight, form, *_scale_granularity(linear, form, block)
    )
    made = LayerCandidate(
        plan,
        node.op,
        graph.module(node),
        data.name,
        linear.input_channel_axis(rank) if rank else -1,
        layer_source(graph, data).y.name,
        linear.out.name,
        linear.output_channels,
        linear.groups,
        _result_after_activation(graph, linear) if node.op == "Conv" else "",
    )
    if not rank:
        return replace(made, reason=f"the rank of its input {data.name!r} is unknown")
    if not isinstance(stored, gs.Constant):
        maker = graph.producer(stored)
        return replace(
            made, reason=f"its weight is computed by {maker.op if maker is not None else 'a node'} from constants"
        )
    if graph.dtype(data) != np.float32 or stored.dtype != np.float32:
        kind = graph.dtype(data)
        return replace(made, reason=f"its input is {kind if kind is not None else 'of unknown type'}, not float32")
    if not np.isfinite(linear.w).all():
        return replace(made, reason="its weight contains NaN or Inf")
    if plan.block and linear.input_channels % plan.block:
        return replace(
            made,
            reason=(f"its {linear.input_channels} input channels are not a multiple of the block size {plan.block}"),
        )
    return made


def _result_after_activation(graph: Graph, linear: ConstantLinear) -> str:
    readers = graph.consumers(linear.out)
    if graph.is_output(linear.out):
        return ""
    if len(readers) == 1 and readers[0].op in ("Relu", "Clip"):
        if graph.is_output(readers[0].outputs[0]):
            return ""
        return str(readers[0].outputs[0].name)
    return str(linear.out.name)


def _scale_granularity(
    linear: ConstantLinear, form: CodeFormat, block: int
) -> tuple[int | None, None, int] | tuple[int | None]:
    """Choose the axis of the stored weight along which scales vary, and the number of elements that share a scale.

    Returns:
        the last fields of a `LayerPlan`: axis (None for a single scale) and, for blocks, step and block.
    """
    op = linear.node.op
    rank = linear.w.ndim
    rows = (op == "Gemm" and linear.is_transposed) or (op == "MatMul" and linear.weight == 0) or op == "Conv"
    if rows:
        if op == "Conv":
            output = 0
        else:
            output = rank - 2
    else:
        output = rank - 1
    if op == "ConvTranspose":
        if linear.groups == 1:
            return (1,)
        return (None,)
    if op == "MatMul" and rank > 2 and form is INT8:
        # onnxruntime has no integer kernel for stacked weights with one scale per output.
        return (None,)
    if not block or op == "Conv":
        return (output,)
    return (rank - 1 if rows else rank - 2, None, block)


def layer_group(graph: Graph, candidates: list[LayerCandidate]) -> LayerGroup | None:
    """Make a group of layers that read one tensor.

    Returns:
        the group. None for convolutions, because their inputs are not scaled or shifted. None also if views mix the
        channels.
    """
    by_name = {one.node.outputs[0].name: one for one in find_linear_layers(graph) if isinstance(one, ConstantLinear)}
    layers = [by_name[c.plan.tensor] for c in candidates]
    if any(one.node.op not in ("MatMul", "Gemm") or one.w.ndim != 2 for one in layers):
        return None
    source = layer_source(graph, layers[0].data_input)
    w = [one.w.T if one.weight == 0 or (one.node.op == "Gemm" and one.is_transposed) else one.w for one in layers]
    if source.norm is not None and source.affine is None and source.norm.op in SPLIT:
        known = [graph.known_value(t) if not t.is_empty() else None for t in source.norm.inputs[1:3]]
        gamma = known[0]
        if gamma is None or gamma.shape != (w[0].shape[0],):
            return None
        places = np.arange(len(gamma), dtype=float)
        last = places.reshape([1] * (len(graph.shape(source.y) or ()) - 1) + [-1])
        laid = [input_channel_vector(graph, last, source.y, one.data_input, one) for one in layers]
        if not all(v is not None and np.array_equal(v, places) for v in laid):
            # Views between the norm and the layer mix the channels.
            return None
        if len(known) > 1 and known[1] is not None:
            beta = known[1]
        else:
            beta = np.zeros_like(gamma)
        return LayerGroup(source.y.name, tuple(w), gamma, beta, True)
    if source.affine is not None:
        a, b = (
            input_channel_vector(graph, v, source.y, layers[0].data_input, layers[0])
            for v in (source.affine.scale, source.affine.shift)
        )
        if a is None or b is None:
            return None
        return LayerGroup(source.y.name, tuple(w), a, b)
    # A view may change which elements form a channel.
    return None if source.views else LayerGroup(source.y.name, tuple(w))
