"""Ask onnx's schemas whether a node means the same at an older opset, and describe what the older opset lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from .dims import Types
from .region import RefusedError
from .type_opsets import onnx_type_names, schema_allows_types

# Op and attribute → its values that began later than the attribute → the opset of each value
_LATER_VALUES: Mapping[tuple[str, str], Mapping[bytes, int]] = {
    ("Pad", "mode"): {b"wrap": 19},
    ("Resize", "coordinate_transformation_mode"): {b"half_pixel_symmetric": 19},
    ("ScatterElements", "reduction"): {b"max": 18, b"min": 18},
    ("ScatterND", "reduction"): {b"max": 18, b"min": 18},
}


@dataclass(frozen=True)
class Opsets:
    """Opset of the nodes before and after."""

    newer: int
    older: int


def has_op(op: str, opset: int) -> bool:
    return bool(onnx.defs.has(op, max_inclusive_version=opset, domain=""))


def is_newer(node: onnx.NodeProto, opsets: Opsets) -> bool:
    """Return whether a node follows a schema that the older opset does not have."""
    if not has_op(node.op_type, opsets.newer):
        # The op belongs to another tool, which wrote it into ONNX's domain.
        return False
    known = onnx.defs.get_schema(node.op_type, opsets.newer).attributes
    if any(a.name not in known for a in node.attribute):
        # A norm's nodes were written for the older opset.
        return False
    if not has_op(node.op_type, opsets.older):
        return True
    old, new = (onnx.defs.get_schema(node.op_type, opset) for opset in (opsets.older, opsets.newer))
    return bool(old.since_version != new.since_version)


def build_refusal(node: onnx.NodeProto, opset: int, reason: str, since: int) -> RefusedError:
    label = node.name or next((o for o in node.output if o), "")
    return RefusedError(
        f"node {label!r} ({node.op_type}) can't be written at opset {opset}: {reason}; the lowest opset for it is"
        f" {since}"
    )


def lowest_opset(node: onnx.NodeProto, opset: int, types: Types) -> int:
    """Find the lowest opset that holds a node as it is."""
    while opset > 1 and not describe_misfit(node, opset - 1, types):
        opset -= 1
    return opset


def describe_misfit(node: onnx.NodeProto, opset: int, types: Types) -> str:
    """Describe the first part of a node that an opset does not define; "" if there is none."""
    if not has_op(node.op_type, opset):
        return "the opset has no such op"
    schema = onnx.defs.get_schema(node.op_type, opset)
    for attribute in node.attribute:
        value = None if attribute.ref_attr_name else onnx.helper.get_attribute_value(attribute)
        shown = value.decode() if isinstance(value, bytes) else value
        if attribute.name not in schema.attributes:
            return f"the opset has no attribute {attribute.name} (it is {shown})"
        later = _LATER_VALUES.get((node.op_type, attribute.name), {})
        if isinstance(value, bytes) and later.get(value, 0) > opset:
            return f"the opset has no {attribute.name} {shown}"
    fewest = (schema.min_input, schema.min_output)
    for names, least, most, side in (
        (node.input, fewest[0], schema.max_input, "input"),
        (node.output, fewest[1], schema.max_output, "output"),
    ):
        if not least <= len(names) <= most:
            return f"the opset allows {least} to {most} {side}s, not {len(names)}"
    known = {name: kind for name in (*node.input, *node.output) if (kind := types[name][0])}
    given, made = (onnx_type_names(names, known) for names in (node.input, node.output))
    if not schema_allows_types(node.op_type, opset, given, made):
        shown = ", ".join(dict.fromkeys(n.removeprefix("tensor(").removesuffix(")") for n in (*given, *made) if n))
        return f"the opset does not allow its types ({shown})"
    for formal, types_of_it in _types_by_parameter(schema, given, made).items():
        if len(types_of_it) > 1:
            return f"the opset needs one type for its {formal}, not {' and '.join(types_of_it)}"
    return ""


def _types_by_parameter(
    schema: onnx.defs.OpSchema, given: Sequence[str], made: Sequence[str]
) -> dict[str, dict[str, None]]:
    """Return the types that each type parameter of an op gets, such as T → "tensor(float)", in order."""
    found: dict[str, dict[str, None]] = {}
    for formals, types in ((schema.inputs, given), (schema.outputs, made)):
        for place, name in enumerate(types if formals else ()):
            formal = formals[min(place, len(formals) - 1)]
            if name and formal.is_homogeneous:
                found.setdefault(formal.type_str, {})[name.removeprefix("tensor(").removesuffix(")")] = None
    return found
