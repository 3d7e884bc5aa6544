"""Raise a file's opset, which is done only if a norm node requires a newer opset.

Most conversions just change the number, because the ops in the file mean the same in both versions. onnx's own schemas
show this: inputs, attributes and defaults are the same, and only optional inputs and attributes were added. If an op
did change, onnx's version converter rewrites it. The converter loses node metadata and the shapes after unknown ops,
which are restored. It also loses model-local functions, so a file with functions is refused.

An op is also refused if it was not tested, or if the converter of onnx 1.23 converts it incorrectly. The converter
gives Hardmax the new default axis and Resize the new coordinates. It leaves GroupNormalization one scale per group.
"""

from __future__ import annotations

import onnx
import onnx.version_converter

from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import copy_model, iter_subgraphs, nodes_with_opsets, standard_opset
from .converter_fixes import (
    collect_facts,
    has_mask,
    has_scales_and_sizes,
    prepare_for_converter,
    require_convertible,
    restore_bounds,
)
from .region import RefusedError

# Ops whose meaning changed although their schemas look alike: either the default axis or the interpretation of an axis
# changed.
_CHANGED = {
    "Softmax": 13,
    "LogSoftmax": 13,
    "Hardmax": 13,
    "Resize": 19,
    "Upsample": 10,
    "AveragePool": 19,
    "RoiAlign": 16,
}

# Op → the lowest opset from which the converter rewrites the op without changing a result
# (tests/graphs/test_opset_conversion.py runs each op).
CONVERTED = {
    **dict.fromkeys(
        (
            "ReduceL1",
            "ReduceL2",
            "ReduceLogSum",
            "ReduceLogSumExp",
            "ReduceMax",
            "ReduceMean",
            "ReduceMin",
            "ReduceProd",
        ),
        1,
    ),
    **dict.fromkeys(
        ("ReduceSum", "ReduceSumSquare", "Softmax", "LogSoftmax", "BatchNormalization", "Clip", "Dropout", "Pad"), 1
    ),
    **dict.fromkeys(("Scatter", "Slice", "Split", "Squeeze", "TopK", "Unsqueeze", "AveragePool", "GridSample"), 1),
    "Resize": 11,
}


def ops_needing_conversion(proto: onnx.ModelProto, opset: int) -> list[str]:
    """List the ops of the model whose meaning or form changes up to ``opset``.

    Returns: sorted op types.
    """
    return sorted(
        {
            n.op_type
            for n, version in nodes_with_opsets(proto)
            if version < opset and not _is_same_across_opsets(n, version, opset)
        }
    )


def raise_opset_number(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Set the opset of the model and its functions to at least ``opset``, if no op needs conversion.

    Returns: ``proto``, changed in place.
    """
    entries = [
        e for e in (standard_opset(proto), *map(standard_opset, proto.functions)) if e is not None and e.version < opset
    ]
    for entry in entries:
        entry.version = opset
    if entries:
        _raise_ir_version(proto)
    return proto


def _raise_ir_version(proto: onnx.ModelProto) -> None:
    """Set the IR version to at least the one that the opsets of the model need."""
    oldest = onnx.helper.find_min_ir_version_for(list(proto.opset_import), ignore_unknown=True)
    proto.ir_version = max(proto.ir_version, oldest)


def convert_opset(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Convert the model to ``opset`` with onnx's converter.

    Returns: a changed copy.

    Raises:
        RefusedError: an op can't be converted reliably, the model has functions, or the converter failed.
    """
    if proto.functions:
        raise RefusedError("onnx's converter would remove the file's functions")
    entry = standard_opset(proto)
    nested = [n for node in proto.graph.node for body in iter_subgraphs(node) for n in body.node]
    stuck = next((n for n in nested if entry is not None and not _is_same_across_opsets(n, entry.version, opset)), None)
    if stuck is not None:
        raise RefusedError(f"onnx's converter does not convert the {stuck.op_type} in a body of If, Loop or Scan")
    untried = [
        op for op in ops_needing_conversion(proto, opset) if entry is None or entry.version < CONVERTED.get(op, opset)
    ]
    if untried:
        raise RefusedError(
            f"{untried[0]} has another meaning at the new opset, and onnx's converter does not convert it reliably"
        )
    known = collect_facts(proto)
    if entry is not None:
        require_convertible(proto, entry.version, opset, known)
    kept = {n.output[0]: n for n in proto.graph.node if n.output}
    proto = copy_model(proto)
    prepare_for_converter(proto, known)
    try:
        result = onnx.version_converter.convert_version(proto, opset)
    except Exception as error:
        raise RefusedError(f"onnx's converter failed: {' '.join(str(error).split())[:120]}") from error
    for node in result.graph.node:
        original = kept.get(node.output[0]) if node.output else None
        if original is not None:
            node.metadata_props.extend(original.metadata_props)
            node.doc_string = original.doc_string
    restore_bounds(result, kept, known)
    made = {o for n in result.graph.node for o in n.output} - {v.name for v in result.graph.value_info}
    result.graph.value_info.extend(v for v in proto.graph.value_info if v.name in made)
    del result.metadata_props[:]
    result.metadata_props.extend(proto.metadata_props)
    _raise_ir_version(result)
    return result


def convert_to_opset(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Raise the model to ``opset``: only its number if no op changes, else with onnx's converter.

    Returns: ``proto``, changed in place, or a changed copy.

    Raises:
        RefusedError: as for `convert_opset`.
    """
    if ops_needing_conversion(proto, opset):
        return convert_opset(proto, opset)
    return raise_opset_number(proto, opset)


def _is_same_across_opsets(node: onnx.NodeProto, old: int, new: int) -> bool:
    if not is_standard(node):
        return True
    if not onnx.defs.has(node.op_type, max_inclusive_version=old, domain=""):
        # A pass wrote this node by the newest opset's definition, so it needs no conversion.
        return True
    a = onnx.defs.get_schema(node.op_type, old)
    b = onnx.defs.get_schema(node.op_type, new)
    if a.since_version == b.since_version:
        return True
    if a.since_version < _CHANGED.get(node.op_type, 0) <= b.since_version or b.deprecated:
        return False
    if has_mask(node) and a.since_version < 12:
        return False
    if has_scales_and_sizes(node) and a.since_version < 18 <= b.since_version:
        return False
    if node.op_type == "GroupNormalization":
        return a.since_version >= 21
    if node.op_type == "Split" and a.since_version < 18 <= b.since_version and not any(node.input[1:]):
        # Since opset 18, a Split into equal parts must state their number.
        return False
    if [i.name for i in a.inputs] != [i.name for i in b.inputs[: len(a.inputs)]] or len(b.outputs) < len(a.outputs):
        return False
    for name, attribute in a.attributes.items():
        if (
            name not in b.attributes
            or attribute.default_value.SerializeToString() != b.attributes[name].default_value.SerializeToString()
        ):
            return False
    return not any(v.required for k, v in b.attributes.items() if k not in a.attributes)
