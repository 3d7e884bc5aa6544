"""Find nodes at which a runtime has a known fault: wrong numbers, or a fusion that fails.

Each fault has the number of its issue, and says where it was tried. A fault that was only reported says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import onnx

from ...contrib.expansion_types import tensor_types
from ...graphs.dims import Types
from ...graphs.proto_queries import module_path
from ...norms.norm_table import ROWS, STANDARD
from ...option_values import OPENVINO, TENSORRT, USUAL
from ...runtimes.openvino_runner import describe_wide_integers
from ...runtimes.target_support import op_key
from ...storage.onnx_domains import default_domain_opset
from ...storage.proto_traversal import attribute_value
from .norm_rules import Problem

_KINDS = {row.op: row.kind for row in ROWS}
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Mod", "Pow"})
# Ops that normalize the axes from ``axis`` on, and whose scale has these axes
_SCALED_ROWS = frozenset(op for op, row in STANDARD.items() if "axis" in row.attributes and "scale" in row.inputs)


@dataclass(frozen=True)
class _FaultyGraph:
    """Graph with the types of its tensors and the producer of each tensor.

    Attributes:
        wide_integers: int64 weights with values outside int32.
    """

    types: Types
    producers: Mapping[str, onnx.NodeProto]
    wide_integers: frozenset[str] = frozenset()

    def rank(self, name: str) -> int | None:
        shape = self.types[name][1]
        return None if shape is None else len(shape)

    def is_chain(self, name: str, *ops: str) -> bool:
        """Return True if the tensor is computed by ``ops``, last op first, each from an input of the op before."""
        if not ops:
            return True
        node = self.producers.get(name)
        if node is None or node.op_type != ops[0]:
            return False
        return any(self.is_chain(source, *ops[1:]) for source in node.input)


@dataclass(frozen=True)
class RuntimeFault:
    """Known fault of a runtime.

    Attributes:
        issue: repository and number of the report; "" if the project knows no report.
        runtime: "onnxruntime", "openvino" or "tensorrt".
        effect: the wrong result or the failure, and where it was tried.
        remedy: what to write instead.
        matches: tells if a node has the fault.
    """

    issue: str
    runtime: Literal["onnxruntime", "openvino", "tensorrt"]
    effect: str
    remedy: str
    matches: Callable[[_FaultyGraph, onnx.NodeProto], bool]


def _has_narrow_scale(graph: _FaultyGraph, node: onnx.NodeProto) -> bool:
    """Match a LayerNormalization or RMSNormalization whose scale has fewer axes than are normalized."""
    if op_key(node) not in _SCALED_ROWS or len(node.input) < 2:
        return False
    rank = graph.rank(node.input[0])
    scale = graph.rank(node.input[1])
    axis = attribute_value(node, "axis", -1)
    if scale is None or (rank is None and axis >= 0):
        return False
    normalized = -axis if axis < 0 else (rank or 0) - axis
    return scale < normalized


def _broadens_normalized_value(graph: _FaultyGraph, node: onnx.NodeProto) -> bool:
    """Match a Mul that multiplies a norm in the spelling that onnxruntime fuses by a tensor with longer rows."""
    if op_key(node) != "Mul" or len(node.input) != 2:
        return False
    result = graph.types[node.output[0]][1]
    for name in node.input:
        if not graph.is_chain(name, "Div", "Sqrt", "Add", "ReduceMean", "Pow"):
            continue
        shape = graph.types[name][1]
        if shape is not None and result is not None and shape[-1:] != result[-1:]:
            return True
    return False


def _has_single_scale_after_add(graph: _FaultyGraph, node: onnx.NodeProto) -> bool:
    """Match a LayerNormalization of a sum whose scale is one number for a longer row."""
    if op_key(node) != "LayerNormalization" or not graph.is_chain(node.input[0], "Add"):
        return False
    row = graph.types[node.input[0]][1]
    return graph.types[node.input[1]][1] == (1,) and row is not None and row[-1:] != (1,)


def _is_half_skip_norm(graph: _FaultyGraph, node: onnx.NodeProto) -> bool:
    skips = op_key(node) == "com.microsoft.SkipSimplifiedLayerNormalization"
    return skips and graph.types[node.input[0]][0] == onnx.TensorProto.FLOAT16


def _has_one_group(graph: _FaultyGraph, node: onnx.NodeProto) -> bool:
    return op_key(node) == "GroupNormalization" and attribute_value(node, "num_groups", 0) == 1


def _has_scale_of_other_rank(graph: _FaultyGraph, node: onnx.NodeProto) -> bool:
    """Match a LayerNormalization whose scale has another number of axes than are normalized, unless it holds as many
    elements.
    """
    if op_key(node) != "LayerNormalization" or len(node.input) < 2:
        return False
    shape, scale = graph.types[node.input[0]][1], graph.types[node.input[1]][1]
    axis = attribute_value(node, "axis", -1)
    if scale is None or (shape is None and axis >= 0):
        return False
    normalized = -axis if axis < 0 else len(shape or ()) - axis
    rows = tuple(shape or ())[-normalized:]
    if len(scale) == normalized or not all(isinstance(n, int) for n in scale):
        return False
    elements = math.prod(n for n in scale if isinstance(n, int))
    if rows and all(isinstance(n, int) for n in rows):
        return elements != math.prod(n for n in rows if isinstance(n, int))
    return elements == 1


def _is_float64_norm(graph: _FaultyGraph, node: onnx.NodeProto) -> bool:
    return op_key(node) in STANDARD and graph.types[node.input[0]][0] == onnx.TensorProto.DOUBLE


def _computes_with_wide_integer(graph: _FaultyGraph, node: onnx.NodeProto) -> bool:
    """Match integer arithmetic with a constant outside int32. The end of a Slice may be such a constant."""
    return op_key(node) in _ARITHMETIC and any(name in graph.wide_integers for name in node.input)


def _exceeds_int32(tensor: onnx.TensorProto) -> bool:
    if tensor.data_type != onnx.TensorProto.INT64 or onnx.external_data_helper.uses_external_data(tensor):
        return False
    return bool(describe_wide_integers(onnx.numpy_helper.to_array(tensor)))


FAULTS = (
    RuntimeFault(
        "onnxruntime#28971",
        runtime="onnxruntime",
        effect="onnxruntime's CUDA provider is reported to compute wrong numbers if the scale has fewer axes than the"
        " norm. The CPU provider of 1.31.1 computes the right numbers",
        remedy="Write the scale in the shape of the normalized axes",
        matches=_has_narrow_scale,
    ),
    RuntimeFault(
        "onnxruntime#31980",
        runtime="onnxruntime",
        effect="onnxruntime's optimizer fuses the Mul with the norm, although it makes the result larger, and then"
        " fails to run. This was seen in the CPU provider of 1.31.1",
        remedy="Turn the optimizer's extended level off, or expand the input before the norm",
        matches=_broadens_normalized_value,
    ),
    RuntimeFault(
        "",
        runtime="onnxruntime",
        effect="onnxruntime's optimizer fuses the Add with the norm as SkipLayerNormalization, which refuses a scale"
        " of one number. This was seen in the CPU provider of 1.31.1",
        remedy="Write the scale out to one number per element; `normdeploy optimize` does it",
        matches=_has_single_scale_after_add,
    ),
    RuntimeFault(
        "onnxruntime#29034",
        runtime="onnxruntime",
        effect="SkipSimplifiedLayerNormalization in float16 is reported to give zeros. The CPU provider of 1.31.1"
        " computes the right numbers for a small example",
        remedy="Compare the outputs on your provider with verify",
        matches=_is_half_skip_norm,
    ),
    RuntimeFault(
        "TensorRT#4756",
        runtime="tensorrt",
        effect="TensorRT runs a GroupNormalization with one group as an InstanceNormalization, so the numbers are"
        " wrong",
        remedy="`normdeploy optimize --runtime tensorrt` writes a LayerNormalization",
        matches=_has_one_group,
    ),
    RuntimeFault(
        "",
        runtime="openvino",
        effect="OpenVINO does not load a LayerNormalization whose scale has another number of axes than are normalized."
        " This was seen in 2026.4.1",
        remedy="`normdeploy optimize --runtime openvino` writes such a scale in another form",
        matches=_has_scale_of_other_rank,
    ),
    RuntimeFault(
        "",
        runtime="openvino",
        effect="OpenVINO's CPU plugin computes float64 in float32. This was seen in 2026.4.1",
        remedy="Run the file in onnxruntime, or compare its outputs with verify --runner openvino",
        matches=_is_float64_norm,
    ),
    RuntimeFault(
        "",
        runtime="openvino",
        effect="OpenVINO's CPU plugin computes int64 in int32, so the constant becomes another number. This was seen"
        " in 2026.4.1",
        remedy="Keep the integers of the model within int32",
        matches=_computes_with_wide_integer,
    ),
)


def find_runtime_faults(proto: onnx.ModelProto, runtime: str) -> Iterator[Problem]:
    """Find the nodes of the main graph at which a runtime has a known fault.

    Args:
        runtime: runtime whose faults count. "any" means onnxruntime.

    Yields:
        A problem for each node and fault.
    """
    graph = _FaultyGraph(
        tensor_types(proto, default_domain_opset(proto)),
        {name: node for node in proto.graph.node for name in node.output},
        frozenset(t.name for t in proto.graph.initializer if _exceeds_int32(t)),
    )
    family = "tensorrt" if runtime in TENSORRT else OPENVINO if runtime == OPENVINO else USUAL
    for node in (n for n in proto.graph.node if n.input and n.output):
        for fault in FAULTS:
            if fault.runtime == family and fault.matches(graph, node):
                number = f" ({fault.issue})" if fault.issue else ""
                yield Problem(
                    "runtime-fault",
                    f"{node.op_type}: {fault.effect}{number}. {fault.remedy}",
                    kind=_KINDS.get(node.op_type, ""),
                    module=module_path(node),
                    node=node.name,
                    tensor=node.output[0],
                )
