"""The linear layers of a file, as they can be quantized: where their channels lie, and which read one tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from ..forms.channels import input_vector
from ..forms.linear import Linear
from ..graphs.graph import Graph
from ..graphs.region import Refusal
from .conditions import Group
from .linears import SPLIT, linears, source_of
from .qdq import Plan
from .steps import INT8, Format


@dataclass(frozen=True)
class Candidate:
    """One layer: how it would be written, or ``reason`` why it can't be."""

    plan: Plan
    op: str
    module: str
    input: str  # the tensor that is quantized
    axis: int  # of its channels
    source: str  # the tensor that a migration would start from
    result: str  # the layer's result, an added bias included
    outputs: int
    groups: int = 1  # of a convolution
    activated: str = ""  # of a convolution: its result, or what a Relu or Clip makes of it that alone reads it
    reason: str = ""


def candidates(graph: Graph, form: Format, block: int = 0) -> list[Candidate]:
    """Every Conv, ConvTranspose, Gemm and MatMul with one constant input, in the graph's order.

    ``block``: places of the input channels that share a scale; 0: a scale for each output channel.
    """
    return [_candidate(graph, linear, form, block) for linear in linears(graph)]


def _candidate(graph: Graph, linear: Linear | Refusal, form: Format, block: int) -> Candidate:
    if isinstance(linear, Refusal):
        node = next((n for n in graph.nodes if n.outputs[0].name == linear.tensor), None)
        plan = Plan(linear.tensor, 0, 1, form, None)
        return Candidate(
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
    node, data = linear.node, linear.data
    stored = node.inputs[linear.weight]
    rank = len(graph.shape(data) or ())
    plan = Plan(node.outputs[0].name, 1 - linear.weight, linear.weight, form, *_granularity(linear, form, block))
    made = Candidate(
        plan,
        node.op,
        graph.module(node),
        data.name,
        linear.input_axis(rank) if rank else -1,
        source_of(graph, data).y.name,
        linear.out.name,
        linear.channels,
        linear.groups,
        _activated(graph, linear) if node.op == "Conv" else "",
    )
    if not rank:
        return replace(made, reason=f"the rank of its input {data.name!r} is not known")
    if not isinstance(stored, gs.Constant):
        maker = graph.producer(stored)
        return replace(made, reason=f"its weight is made by {maker.op if maker is not None else 'a node'} of constants")
    if graph.dtype(data) != np.float32 or stored.dtype != np.float32:
        kind = graph.dtype(data)
        return replace(made, reason=f"its input is {kind if kind is not None else 'of no known type'}, not float32")
    if not np.isfinite(linear.w).all():
        return replace(made, reason="its weight holds a number that is not finite")
    if plan.block and linear.inputs % plan.block:
        return replace(made, reason=f"its {linear.inputs} input channels are no multiple of blocks of {plan.block}")
    return made


def _activated(graph: Graph, linear: Linear) -> str:
    readers = graph.consumers(linear.out)
    if graph.is_output(linear.out):
        return ""
    if len(readers) == 1 and readers[0].op in ("Relu", "Clip"):
        return "" if graph.is_output(readers[0].outputs[0]) else str(readers[0].outputs[0].name)
    return str(linear.out.name)


def _granularity(linear: Linear, form: Format, block: int) -> tuple[int | None, None, int] | tuple[int | None]:
    """Along which axis of the stored weight there are scales, and how many places of it share one."""
    op, rank = linear.node.op, linear.w.ndim
    rows = (op == "Gemm" and linear.transposed) or (op == "MatMul" and linear.weight == 0) or op == "Conv"
    output = (0 if op == "Conv" else rank - 2) if rows else rank - 1
    if op == "ConvTranspose":
        return (1,) if linear.groups == 1 else (None,)
    if op == "MatMul" and rank > 2 and form is INT8:
        return (None,)  # onnxruntime has no integer product of stacked weights with a scale for each output
    if not block or op == "Conv":
        return (output,)
    return (rank - 1 if rows else rank - 2, None, block)


def group_of(graph: Graph, candidates: list[Candidate]) -> Group | None:
    """Layers that read one tensor, as matrices; None for convolutions, whose channels stay as they are."""
    by_name = {one.node.outputs[0].name: one for one in linears(graph) if isinstance(one, Linear)}
    layers = [by_name[c.plan.tensor] for c in candidates]
    if any(one.node.op not in ("MatMul", "Gemm") or one.w.ndim != 2 for one in layers):
        return None
    source = source_of(graph, layers[0].data)
    w = [one.w.T if one.weight == 0 or (one.node.op == "Gemm" and one.transposed) else one.w for one in layers]
    if source.norm is not None and source.affine is None and source.norm.op in SPLIT:
        known = [graph.known(t) if not t.is_empty() else None for t in source.norm.inputs[1:3]]
        gamma = known[0]
        if gamma is None or gamma.shape != (w[0].shape[0],):
            return None
        places = np.arange(len(gamma), dtype=float)
        last = places.reshape([1] * (len(graph.shape(source.y) or ()) - 1) + [-1])
        laid = [input_vector(graph, last, source.y, one.data, one) for one in layers]
        if not all(v is not None and np.array_equal(v, places) for v in laid):
            return None  # views between mix the channels
        beta = known[1] if len(known) > 1 and known[1] is not None else np.zeros_like(gamma)
        return Group(source.y.name, tuple(w), gamma, beta, True)
    if source.affine is not None:
        a, b = (
            input_vector(graph, v, source.y, layers[0].data, layers[0])
            for v in (source.affine.scale, source.affine.shift)
        )
        return None if a is None or b is None else Group(source.y.name, tuple(w), a, b)
    return None if source.views else Group(source.y.name, tuple(w))  # of views channels need not be channels
