"""Lower a file's opset: write each node as the older opset defines it, or refuse the file.

onnx's version converter (1.23) is not used here. It refuses a whole file if one op has no adapter down, and many ops
have none: Add, Reshape and BatchNormalization from opset 14 to 13, Identity from 16, Shape from 15, Split and Pad from
18, and GroupNormalization from 21 (onnx/onnx#5843; a newer onnx has one, #8436). It also loses functions and metadata.
Most nodes need no adapter, because ops gained mainly types and optional attributes. A node stays as it is if onnx's
older schema has its inputs, attributes and types. An attribute that only the newer schema has is dropped if it has the
value that the older op implied.

The other nodes are rewritten by `normdeploy.graphs.opset_adapters`. Ops that the older opset lacks are replaced by
their function body in onnx's schema: Gelu, HardSwish, Mish, Swish, Attention (`normdeploy.graphs.newer_ops`). Norms are
replaced before, because each of them has a proof (`normdeploy.contrib.standardization`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx

from ..norms.third_party import is_managed_op
from ..storage.onnx_domains import default_domain_opset, is_standard
from ..storage.proto_traversal import nodes_with_bodies, standard_opset
from .dims import Types
from .newer_ops import inline_newer_ops
from .opset_adapters import NodeWriter, is_same_form, write_node
from .opset_forms import Opsets, build_refusal, describe_misfit, is_newer, lowest_opset
from .proto_queries import all_names, constant_tensors
from .shape_inference import infer_types
from .subgraphs import body_subgraphs


@dataclass(frozen=True)
class LoweredNode:
    """Node that was changed, or whose op has another form at the older opset.

    Attributes:
        place: body that contains the node; "" for the main graph.
        before: the node at the newer opset.
        after: nodes at the older opset.
        constants: constants that one of these nodes reads.
        computed: names of constants that other nodes compute.
        types: types of the tensors around.
    """

    place: str
    before: onnx.NodeProto
    after: Sequence[onnx.NodeProto]
    constants: Sequence[onnx.TensorProto]
    computed: frozenset[str]
    types: Types = field(repr=False)


def lower_opset(proto: onnx.ModelProto, opset: int) -> tuple[onnx.ModelProto, list[LoweredNode]]:
    """Lower the model and its functions to ``opset``.

    Nodes that follow ``opset`` already stay: a reduction with an attribute ``axes``, for example.

    Args:
        proto: the model after `inline_newer_functions`.

    Returns:
        a changed copy, and each rewritten node.

    Raises:
        RefusedError: a node has no equal form at this opset. The message names node, op, type and the lowest opset.
    """
    newer = default_domain_opset(proto)
    out = inline_newer_ops(proto, opset)
    lowered: list[LoweredNode] = []
    _lower_graph(out, Opsets(newer, opset), set(), lowered, "")
    functions = [f for f in out.functions if not is_managed_op(f.domain, f.name)]
    for function in functions:
        opsets = Opsets(default_domain_opset(function, newer), opset)
        for node in nodes_with_bodies(function.node):
            if not is_same_form(node, opsets):
                reason = describe_misfit(node, opset, Types()) or "it has another form there, and is in a function"
                raise build_refusal(node, opset, reason, lowest_opset(node, opsets.newer, Types()))
    for holder in (out, *functions):
        entry = standard_opset(holder)
        if entry is not None:
            entry.version = opset
    oldest = onnx.helper.find_min_ir_version_for(list(out.opset_import), ignore_unknown=True)
    # Functions need a newer IR version, and those with an overload an even newer one.
    out.ir_version = max(oldest, out.ir_version) if out.functions else oldest
    return out, lowered


def _lower_graph(
    proto: onnx.ModelProto,
    opsets: Opsets,
    around: set[str],
    lowered: list[LoweredNode],
    place: str,
) -> None:
    """Rewrite the nodes of a graph and of its bodies, in place."""
    types = infer_types(proto)
    taken = {*around, *all_names(proto.graph)}
    for body in body_subgraphs(proto):
        inner = "; ".join(filter(None, (place, body.place)))
        _lower_graph(body.model, opsets, taken, lowered, inner)
        body.put_back(body.model)
    constants = constant_tensors(proto.graph)
    writers = {output: node for node in proto.graph.node for output in node.output}
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        if not is_standard(node) or not is_newer(node, opsets):
            nodes.append(node)
            continue
        writer = NodeWriter(node, opsets.newer, opsets.older, types, constants, writers, taken)
        write_node(writer)
        for made in writer.nodes:
            _require_form(node, made, opsets, writer.types)
            made.metadata_props.extend(node.metadata_props if not made.metadata_props else ())
        read = {name for n in (node, *writer.nodes) for name in n.input}
        near = [t for name, t in constants.items() if name in read]
        computed = [onnx.numpy_helper.from_array(value, name) for name, value in writer.computed.items()]
        lowered.append(
            LoweredNode(
                place,
                node,
                writer.nodes,
                [*near, *computed, *writer.initializers],
                frozenset(writer.computed),
                types,
            )
        )
        nodes += writer.nodes
        proto.graph.initializer.extend(writer.initializers)
    kept = list(nodes)
    del proto.graph.node[:]
    proto.graph.node.extend(kept)


def _require_form(original: onnx.NodeProto, node: onnx.NodeProto, opsets: Opsets, types: Types) -> None:
    """Raise RefusedError if the older opset does not define a written node."""
    reason = describe_misfit(node, opsets.older, types)
    if reason:
        raise build_refusal(original, opsets.older, reason, lowest_opset(original, opsets.newer, types))
