"""Raise a file's opset to one that supports its element types.

Most ops gained bfloat16 and the 8- and 4-bit types long after float32 (Conv: opset 22). onnx's schemas list, for each
op, the opset from which it supports a type. If an op lacks bfloat16 in every opset that runtimes load (Einsum, Celu),
it is computed in float32 between Casts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import onnx
from onnx import TensorProto

from ..storage.onnx_domains import default_domain_opset, is_standard
from .opset_conversion import convert_to_opset
from .region import RefusedError
from .shape_inference import infer_types

# Newest opset that torch's exporter writes. Every onnxruntime since 1.25 loads it.
NEWEST = 25
# Oldest elem_type that is checked. Most ops have supported the types with smaller numbers from the start.
_OLDEST_TYPE = TensorProto.BFLOAT16


def raise_opset_for_types(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Raise the opset to one that supports the model's types, and add Casts around ops that no opset supports.

    Returns: a changed copy, or ``proto``, which may be changed in place.
    """
    types = _newer_tensor_types(proto)
    if not types:
        return proto
    _cast_around_ops(proto, types)
    needed = oldest_opset_for_types(proto)
    if needed <= default_domain_opset(proto):
        return proto
    try:
        return convert_to_opset(proto, needed)
    except RefusedError:
        return proto


def oldest_opset_for_types(proto: onnx.ModelProto) -> int:
    """Find the oldest opset, from the file's own on, in which the main graph's ops support their types.

    Returns: the opset; ops that no opset up to `NEWEST` supports are ignored.
    """
    opset = default_domain_opset(proto)
    types = _newer_tensor_types(proto)
    for node in proto.graph.node if types else ():
        opset = max(opset, _oldest_opset_for_node(node, types, opset) or 0)
    return opset


def _newer_tensor_types(proto: onnx.ModelProto) -> dict[str, int]:
    """Return tensor → elem_type, for bfloat16 and newer types only."""
    stated = [v.type.tensor_type.elem_type for v in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output)]
    stated += [t.data_type for t in proto.graph.initializer]
    stated += [a.i for n in proto.graph.node if n.op_type == "Cast" for a in n.attribute if a.name == "to"]
    if max(stated, default=0) < _OLDEST_TYPE:
        return {}
    return {name: kind for name, (kind, _) in infer_types(proto).items() if kind is not None and kind >= _OLDEST_TYPE}


def _oldest_opset_for_node(node: onnx.NodeProto, types: Mapping[str, int], opset: int) -> int | None:
    """Return the oldest opset from ``opset`` on in which a node supports its types; None if there is none."""
    given = onnx_type_names(node.input, types)
    made = onnx_type_names(node.output, types)
    if not is_standard(node) or not (any(given) or any(made)):
        return opset
    return next((v for v in range(opset, NEWEST + 1) if schema_allows_types(node.op_type, v, given, made)), None)


def onnx_type_names(names: Sequence[str], types: Mapping[str, int]) -> tuple[str, ...]:
    """Return ONNX's names of the types, such as "tensor(float)".

    Returns: one name for each tensor; "" for a tensor whose type ``types`` does not have.
    """
    return tuple(f"tensor({TensorProto.DataType.Name(types[name]).lower()})" if name in types else "" for name in names)


@lru_cache(maxsize=4096)
def schema_allows_types(op: str, opset: int, given: tuple[str, ...], made: tuple[str, ...]) -> bool:
    """Return whether an op accepts and computes tensors of these types at an opset.

    Args:
        given, made: types of the inputs and outputs, as in `onnx_type_names`.

    Returns: True also if the opset does not have the op.
    """
    if not onnx.defs.has(op, max_inclusive_version=opset, domain=""):
        return True
    schema = onnx.defs.get_schema(op, opset)
    kinds = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    for sides, wanted in ((schema.inputs, given), (schema.outputs, made)):
        for place, kind in enumerate(wanted):
            if not kind or not sides:
                continue
            side = sides[min(place, len(sides) - 1)]
            if kind not in kinds.get(side.type_str, {side.type_str}):
                return False
    return True


def _cast_around_ops(proto: onnx.ModelProto, types: Mapping[str, int]) -> None:
    """Compute ops in float32 if no opset supports bfloat16 for them; changes ``proto`` in place."""
    opset = default_domain_opset(proto)
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        if _oldest_opset_for_node(node, types, opset) is not None:
            nodes.append(node)
            continue
        for i, name in enumerate(node.input):
            if types.get(name) == TensorProto.BFLOAT16:
                node.input[i] = f"{node.output[0]}_{i}_float32"
                nodes.append(_make_cast(name, node.input[i], TensorProto.FLOAT, node))
        nodes.append(node)
        for i, name in enumerate(node.output):
            if types.get(name) == TensorProto.BFLOAT16:
                node.output[i] = f"{name}_float32"
                nodes.append(_make_cast(node.output[i], name, TensorProto.BFLOAT16, node))
    if len(nodes) > len(proto.graph.node):
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)


def _make_cast(source: str, made: str, kind: int, like: onnx.NodeProto) -> onnx.NodeProto:
    node = onnx.helper.make_node("Cast", [source], [made], name=f"cast_{made}", to=kind)
    node.metadata_props.extend(like.metadata_props)
    return node
