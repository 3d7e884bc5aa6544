"""Find linear layers with constant weights, and the views, scale, shift and norm before each layer."""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from ..forms.channel_views import views_above
from ..forms.constant_linear import LINEAR, ConstantLinear, absorb_added_bias, constant_linear_of
from ..graphs.graph import Graph
from ..graphs.region import Refusal, RefusalKind
from ..norms.norm_table import DEFAULT
from ..recognition.affine_chains import AffineChain, measure_affine
from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import iter_subgraphs

_STEPS = frozenset({"BatchNormalization", "Mul", "Add", "Sub", "Div", "Identity"})
# Maximum number of nodes of a scale and shift
_LONGEST = 8
SPLIT = frozenset(op for op, row in DEFAULT.items() if row.has_scale and "axis" in row.attributes)


@dataclass(frozen=True)
class LayerSource:
    """Source of a linear layer's input: y = a·z + b, seen through ``views``.

    Attributes:
        y: tensor before the views.
        views: nodes between y and the layer, in the order of `views_above`.
        z: tensor before the scale and shift.
        norm: norm node that computes z. None if the norm node itself applies the scale and shift, or if there is no
            norm.
        affine: the scale a and shift b; None if z and y are the same tensor.
    """

    y: gs.Tensor
    views: tuple[gs.Node, ...]
    z: gs.Tensor
    norm: gs.Node | None
    affine: AffineChain | None


def find_linear_layers(graph: Graph) -> list[ConstantLinear | Refusal]:
    """List every Conv, ConvTranspose, Gemm and MatMul with one constant input, in the graph's order.

    Returns:
        the layers, including an added bias; a Refusal for each layer that can't be read.
    """
    nodes = [n for n in graph.nodes if n.op in LINEAR and sum(graph.is_constant(t) for t in n.inputs[:2]) == 1]
    read = [constant_linear_of(graph, node) for node in nodes]
    read = [one for one in read if not (isinstance(one, Refusal) and one.kind is RefusalKind.NO_LINEAR_OP)]
    return [one if isinstance(one, Refusal) else absorb_added_bias(graph, one) for one in read]


def explain_no_layers(proto: onnx.ModelProto) -> str:
    """Explain why `find_linear_layers` finds no layer in the graph of ``proto``.

    Returns:
        the reason, worded as a clause of an error message.
    """
    inputs = {v.name for v in proto.graph.input} & {t.name for t in proto.graph.initializer}
    nodes = [n for n in proto.graph.node if n.op_type in LINEAR and is_standard(n)]
    for node in nodes:
        weight = next((name for name in node.input[:2] if name in inputs), None)
        if weight is not None:
            return (
                f"the weight {weight!r} of {node.op_type} {node.name or node.output[0]!r} is also a model "
                "input, which a caller may override; remove it from the graph's inputs"
            )
    closed = [f.name for f in proto.functions if any(n.op_type in LINEAR for n in f.node)]
    if closed:
        return (
            f"its linear layers are in functions ({', '.join(map(repr, closed[:3]))}), which are not quantized; "
            "inline them first with onnx.inliner.inline_local_functions"
        )
    inner = (n for node in proto.graph.node for body in iter_subgraphs(node) for n in body.node)
    if any(n.op_type in LINEAR for n in inner):
        return "its linear layers are in bodies of If, Loop or Scan, which are not quantized"
    if nodes:
        first = nodes[0].name or nodes[0].output[0]
        return f"none of its layers has a constant weight; the first is {nodes[0].op_type} {first!r}"
    return "it has no linear layers"


def layer_source(graph: Graph, data: gs.Tensor) -> LayerSource:
    """Trace the input ``data`` of a linear layer back to a norm or a scale and shift.

    Returns:
        the source. If neither a norm nor a scale and shift precedes ``data``, the source is ``data`` itself, without
        views.
    """
    y, views = views_above(graph, data)
    tops = [y]
    steps = list[gs.Node]()
    t = y
    while len(tops) <= _LONGEST and (node := graph.producer(t)) is not None and node.op in _STEPS:
        carried = [i for i in node.inputs if not graph.is_constant(i)]
        if len(carried) != 1 or (node.op == "Div" and node.inputs[0] is not carried[0]):
            break
        t = carried[0]
        steps.append(node)
        tops.append(t)
    for z in reversed(tops[1:]):
        node = graph.producer(z)
        behind = node is not None and node.op in DEFAULT and node.outputs[0] is z
        if behind or any(n.op == "BatchNormalization" for n in steps):
            affine = measure_affine(graph, z, y)
        else:
            affine = None
        if isinstance(affine, AffineChain):
            return LayerSource(y, tuple(views), z, node if behind else None, affine)
    node = graph.producer(y)
    if node is None or node.op not in DEFAULT or node.outputs[0] is not y:
        # Without a norm, scale or shift before them, the views are not needed.
        return LayerSource(data, (), data, None, None)
    return LayerSource(y, tuple(views), y, node, None)
