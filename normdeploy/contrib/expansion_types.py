"""Types and shapes in a file whose nodes onnx's inference does not all know.

Standard nodes stand in for those that leave a tensor's shape as it is. Behind an op that nothing is known of, inference
has lost the shapes; a skip norm finds them again in its residual stream, which comes from another norm.
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

# places of outputs
_SUMS = {op: row.outputs.index("sum") for op, row in rows_of_owner(OpOwner.ONNXRUNTIME).items() if "sum" in row.outputs}
# of onnxruntime's own
_ELEMENTWISE = ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")


def tensor_types(proto: onnx.ModelProto, opset: int) -> Types:
    """The element type and shape of each tensor, as far as they can be known."""
    functions = {(f.domain, f.name) for f in proto.functions}
    by_name = {
        v.name
        for v in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output)
        if v.type.tensor_type.HasField("shape")
    }
    # the results of norms
    stream: set[str] = set()
    # those that inference will not find
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
    """Standard nodes that give the node's results their types and shapes: none where these are lost, None where it
    needs none."""
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
        # any other second summand may be broadcast
        alike = node.input[1]
    if alike not in lost:
        return [onnx.helper.make_node("Identity", [alike], [o]) for o in ends]
    return []


def stated_value_infos(writer: ExpansionWriter, types: Types, known: set[str]) -> list[onnx.ValueInfoProto]:
    """What the file has to state about the tensors of an expansion, because inference may not find it."""
    kind, shape = types[writer.node.output[0]]
    if kind is None or shape is None:
        return []
    dims = tuple(None if is_invented_name(d) else d for d in shape)
    return [make_value_info(t, kind, dims) for t in (writer.node.output[0], *writer.alike) if t not in known]
