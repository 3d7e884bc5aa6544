"""Infer types and shapes in a file with nodes unknown to onnx's inference.

Inference loses the shapes after an unknown op. So for inference, standard nodes replace each unknown node whose result
has the shape of an input. The shape of a skip norm's result is taken from its residual input, which another norm
computed.
"""

from __future__ import annotations

import onnx

from ..graphs.dims import is_invented_name
from ..graphs.shape_inference import infer_types
from ..graphs.subgraphs import make_value_info
from ..norms.norm_table import OpOwner, rows_of_owner
from ..recognition.anchors import is_norm_node
from ..storage.onnx_domains import STANDARD
from .contrib_ops import foreign_op_of
from .expansion_writer import SKIP_NORMS, ExpansionWriter, Types

# Op → index of its output ``sum``.
_SUMS = {op: row.outputs.index("sum") for op, row in rows_of_owner(OpOwner.ONNXRUNTIME).items() if "sum" in row.outputs}
# Elementwise ops of onnxruntime's domain.
_ELEMENTWISE = ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")


def tensor_types(proto: onnx.ModelProto, opset: int) -> Types:
    """Infer the element type and shape of each tensor, as far as possible.

    Returns:
        types and shapes by tensor name.
    """
    functions = {(f.domain, f.name) for f in proto.functions}
    by_name = {
        v.name
        for v in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output)
        if v.type.tensor_type.HasField("shape")
    }
    # Outputs of norms, which have the shape of the residual stream.
    stream: set[str] = set()
    # Tensors whose shapes inference will not find.
    lost: set[str] = set()
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        standard = _stand_in_nodes(node, opset, stream, lost)
        strange = node.domain not in STANDARD and (node.domain, node.op_type) not in functions
        if (standard is None and (strange or not lost.isdisjoint(node.input))) or standard == []:
            lost.update(o for o in node.output if o not in by_name)
        elif standard is not None or is_norm_node(node):
            stream.update(o for n in standard or [node] for o in n.output)
        if standard is None:
            nodes += [node]
        else:
            nodes += standard
    return infer_types(proto, nodes)


def _stand_in_nodes(node: onnx.NodeProto, opset: int, stream: set[str], lost: set[str]) -> list[onnx.NodeProto] | None:
    """Build standard nodes that give the node's outputs their types and shapes.

    Returns:
        the nodes; an empty list if types and shapes are unknown; None if the node needs no replacement.
    """
    op = foreign_op_of(node, opset)
    if op is None and not (node.domain == "com.microsoft" and node.op_type in _ELEMENTWISE):
        return None
    if len(node.input) < (1 if op is None else op.row.min_inputs):
        return []
    ends = [o for i, o in enumerate(node.output) if o and i in (0, _SUMS.get(node.op_type, 0))]
    if node.op_type == "EmbedLayerNormalization":
        return [onnx.helper.make_node("Gather", [node.input[2], node.input[0]], [o]) for o in ends]
    alike = node.input[0]
    if node.op_type in SKIP_NORMS and alike not in stream and node.input[1] in stream:
        # If the second summand is from the residual stream, it has the result's shape. Any other summand may have to be
        # broadcast.
        alike = node.input[1]
    if alike not in lost:
        return [onnx.helper.make_node("Identity", [alike], [o]) for o in ends]
    return []


def stated_value_infos(writer: ExpansionWriter, types: Types, known: set[str]) -> list[onnx.ValueInfoProto]:
    """Build the value infos that the file has to state for an expansion, because inference may not find them.

    Returns:
        infos of the first output and of tensors of its shape; empty if the type or shape is unknown.
    """
    kind, shape = types[writer.node.output[0]]
    if kind is None or shape is None:
        return []
    dims = tuple(None if is_invented_name(d) else d for d in shape)
    return [make_value_info(t, kind, dims) for t in (writer.node.output[0], *writer.alike) if t not in known]
