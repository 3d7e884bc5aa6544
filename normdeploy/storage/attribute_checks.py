"""Refuse attributes that ONNX's checker accepts but that runtimes misread as a different number."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto

from ..errors import GraphError
from .onnx_domains import is_standard

_NARROW = np.iinfo(np.int32)
# Attributes whose integers may exceed 32 bits: values, ends of ranges, and seeds.
_WIDE = frozenset(
    {
        "end",
        "ends",
        "k",
        "max_skip_count",
        "maxsplit",
        "pool_int64s",
        "seed",
        "start",
        "starts",
        "value_int",
        "value_ints",
    }
)


def require_attributes(nodes: Iterable[onnx.NodeProto]) -> None:
    """Check that axes, counts and flags fit into 32 bits, and that Cast has a valid target type.

    ONNX's shape inference and onnxruntime 1.31 read an axis of 2^63 - 1 as -1, and a keepdims of 2^32 as 0.

    Raises:
        GraphError: an attribute of a standard op does not fit.
    """
    for node in nodes:
        if not is_standard(node):
            continue
        # ONNX's shape inference uses a negative batch_dims as an index, and crashes the process.
        if node.op_type == "GatherND" and any(a.name == "batch_dims" and a.i < 0 for a in node.attribute):
            raise GraphError(f"GatherND {node.name!r} has batch_dims below 0; it must be 0 or more")
        for attribute in node.attribute:
            # The attribute gets its value from the call of the function.
            if attribute.ref_attr_name:
                continue
            if node.op_type == "Cast" and attribute.name == "to" and attribute.type == AttributeProto.INT:
                _require_valid_cast_type(node, attribute.i)
            if attribute.name not in _WIDE:
                _require_32_bit_values(node, attribute)


def require_stated_attributes(nodes: Iterable[onnx.NodeProto]) -> None:
    """Check that no node outside of functions takes an attribute from a call.

    Args:
        nodes: nodes of the model's graph and of its bodies.

    Raises:
        GraphError: an attribute refers to an attribute of a function.
    """
    for node in nodes:
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                raise GraphError(
                    f"{node.op_type} {node.name!r} takes its attribute {attribute.name!r} from a function's attribute"
                    f" {attribute.ref_attr_name!r}, but the node is not in a function; the file is damaged"
                )


def _require_valid_cast_type(node: onnx.NodeProto, kind: int) -> None:
    if kind == TensorProto.UNDEFINED or kind not in TensorProto.DataType.values():
        raise GraphError(f"Cast {node.name!r} casts to the type {kind}, which ONNX does not have; the file is damaged")


def _require_32_bit_values(node: onnx.NodeProto, attribute: AttributeProto) -> None:
    numbers = {AttributeProto.INT: (attribute.i,), AttributeProto.INTS: attribute.ints}.get(attribute.type, ())
    wide = next((number for number in numbers if not _NARROW.min <= number <= _NARROW.max), None)
    if wide is not None:
        raise GraphError(
            f"{node.op_type} {node.name!r} has the attribute {attribute.name} = {wide}, which runtimes truncate to "
            f"32 bits: they compute with another number; use one between {_NARROW.min} and {_NARROW.max}"
        )
