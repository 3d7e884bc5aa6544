"""Find the precision in which a file computes, from the types in its graph.

A file is in half precision if one of these conditions holds:

- most of its matrix products and convolutions are in half precision;
- most of its nodes that compute floating-point numbers are in half precision;
- all of its outputs are in half precision.

A node with a half-precision weight counts as a half-precision node. If no condition holds, half-precision nodes are
treated as layers that lost precision, and the file is judged by the wider type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx
import onnx.inliner
from onnx import TensorProto

from ...errors import GraphError
from ...graphs.shape_inference import infer_types
from ...norms.third_party import is_managed_op
from ...storage.proto_traversal import iter_bodies

_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)
_HALVES = {TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}
# Types that are coarser than both half types. A file that is quantized to them is judged by its quantization steps.
_EIGHT_BITS = {
    TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E4M3FNUZ,
    TensorProto.FLOAT8E5M2,
    TensorProto.FLOAT8E5M2FNUZ,
}
_PRODUCTS = frozenset(
    {
        *("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention", "LSTM", "GRU", "RNN", "FusedMatMul"),
        *("MultiHeadAttention", "GroupQueryAttention", "FusedConv", "FusedGemm", "NhwcConv", "DeformConv"),
    }
)
_STORAGE = frozenset({"Cast", "CastLike", "Identity", "Transpose", "Reshape", "Constant"})


@dataclass(frozen=True)
class ComputePrecision:
    """Precision of a file.

    Attributes:
        precision: "fp16" or "bf16" if the file is judged as half precision, otherwise "".
        halves: half types that occur anywhere in the file.
        coarser: tensors with a type coarser than the file's precision, in the graph's order.
        lowered: outputs in half precision of a file that is judged as wider.
    """

    precision: str = ""
    halves: frozenset[str] = frozenset()
    coarser: tuple[str, ...] = ()
    lowered: tuple[str, ...] = ()


def find_compute_precision(proto: onnx.ModelProto) -> ComputePrecision:
    """Find the precision in which ``proto`` computes; its large weights need not be loaded.

    Returns:
        the precision, and the tensors that deviate from this precision.

    Raises:
        GraphError: a function of the file can't be inlined.
    """
    proto = _inline_foreign_functions(proto)
    types = {name: kind for name, (kind, _) in infer_types(proto).items() if kind is not None}
    kinds = set(types.values()) | set(_body_elem_types(proto))
    halves = frozenset(name for kind, name in _HALVES.items() if kind in kinds)
    if not halves:
        return ComputePrecision()
    stored = _stored_half_types(proto.graph, types)
    nodes = [n for n in proto.graph.node if n.op_type not in _STORAGE]
    every = [kind for n in nodes if (kind := _node_elem_type(n, types, stored)) is not None]
    products = [
        kind for n in nodes if n.op_type in _PRODUCTS if (kind := _node_elem_type(n, types, stored)) is not None
    ]
    ends = [types[v.name] for v in proto.graph.output if types.get(v.name) in (*_FLOATS, *_HALVES)]
    precision = _majority_half_type(products) or _majority_half_type(every) or _common_half_type(ends)
    if precision:
        lowered = []
    else:
        lowered = [name for n in nodes for name in n.output if types.get(name) in _HALVES]
    return ComputePrecision(
        precision, halves, tuple(_find_coarser_tensors(proto.graph, types, precision)), tuple(lowered)
    )


def _inline_foreign_functions(proto: onnx.ModelProto) -> onnx.ModelProto:
    foreign = [(f.domain, f.name) for f in proto.functions if not is_managed_op(f.domain, f.name)]
    if not foreign:
        return proto
    try:
        return onnx.inliner.inline_selected_functions(proto, foreign)
    except Exception as error:
        raise GraphError(f"can't inline a function of the file: {' '.join(str(error).split())}") from error


def _body_elem_types(proto: onnx.ModelProto) -> Iterable[int]:
    """Yield the elem_types that bodies declare, and those to which Casts convert."""
    for body in iter_bodies(proto):
        if isinstance(body, onnx.GraphProto) and body is not proto.graph:
            yield from (t.data_type for t in body.initializer)
            yield from (v.type.tensor_type.elem_type for v in (*body.value_info, *body.output, *body.input))
        for node in body.node:
            if node.op_type == "Cast":
                yield from (a.i for a in node.attribute if a.name == "to")


def _stored_half_types(graph: onnx.GraphProto, types: Mapping[str, int]) -> dict[str, int]:
    """Return tensor -> half type of its stored weight, for weights and for tensors that are reshaped or cast
    weights.
    """
    stored = {t.name: t.data_type for t in graph.initializer if t.data_type in _HALVES}
    for node in graph.node:
        if node.op_type in _STORAGE and node.input and node.input[0] in stored:
            stored.update((name, stored[node.input[0]]) for name in node.output)
    return stored


def _node_elem_type(node: onnx.NodeProto, types: Mapping[str, int], stored: Mapping[str, int]) -> int | None:
    """Return the coarsest floating type of a node; None if it computes no floating-point numbers."""
    found = {types.get(name) for name in (*node.input, *node.output)} | {stored.get(name) for name in node.input}
    for kind in (TensorProto.BFLOAT16, TensorProto.FLOAT16, *_FLOATS):
        if kind in found:
            return kind
    return None


def _majority_half_type(kinds: list[int]) -> str:
    """Return the more frequent half type if more than half of ``kinds`` are half types, otherwise ""."""
    counts = {name: kinds.count(kind) for kind, name in _HALVES.items()}
    if 2 * sum(counts.values()) <= len(kinds):
        return ""
    return max(counts, key=lambda name: counts[name])


def _common_half_type(kinds: list[int]) -> str:
    """Return the more frequent half type if all ``kinds`` are half types, otherwise ""."""
    if kinds and all(k in _HALVES for k in kinds):
        return _majority_half_type(kinds)
    return ""


def _find_coarser_tensors(graph: onnx.GraphProto, types: Mapping[str, int], precision: str) -> Iterable[str]:
    """Yield the tensors whose type is coarser than the precision."""
    if precision != "bf16":
        coarse = {*_EIGHT_BITS, TensorProto.BFLOAT16}
    else:
        coarse = _EIGHT_BITS
    if not precision:
        # In a float32 file, any coarser type exceeds the allowed error, so it need not be reported.
        return
    names = [*(t.name for t in graph.initializer), *(name for node in graph.node for name in node.output)]
    for name in names:
        if types.get(name) in coarse:
            yield name
