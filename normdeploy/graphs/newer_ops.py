"""Inline what an older opset lacks: functions of the file, and ops that onnx's schemas define by a function body."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import onnx
import onnx.inliner

from ..norms.norm_table import STANDARD as NORMS
from ..norms.third_party import function_op_row, is_managed_op
from ..storage.onnx_domains import default_domain_opset, is_standard
from ..storage.proto_traversal import copy_field, copy_model, nodes_with_bodies, unique_name
from .function_ops import inline_calls, inline_functions
from .opset_adapters import ADAPTERS, is_same_form
from .opset_forms import Opsets, has_op
from .proto_queries import all_names
from .region import RefusedError
from .subgraphs import body_subgraphs

# Function bodies may hold ops that are newer too, such as Swish in SwiGLU.
_ROUNDS = 4


def inline_newer_functions(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Inline the functions with a body that the older opset can't hold as it is, apart from its norms.

    Returns:
        a changed copy, or ``proto`` itself if nothing is inlined.

    Raises:
        RefusedError: a function can't be inlined.
    """
    calls = [n for n in nodes_with_bodies(proto.graph.node) if is_managed_op(n.domain, n.op_type)]
    rows = [(n, function_op_row(n.domain, n.op_type)) for n in calls]
    proto = inline_calls(proto, [n for n, row in rows if row is not None and row.since > opset])
    changed = [
        (f.domain, f.name)
        for f in proto.functions
        if not is_managed_op(f.domain, f.name)
        and not all(
            n.op_type in NORMS or is_same_form(n, Opsets(default_domain_opset(f), opset))
            for n in nodes_with_bodies(f.node)
        )
    ]
    if not changed:
        return proto
    proto = inline_functions(proto, changed)
    left = {(f.domain, f.name) for f in proto.functions}.intersection(changed)
    if left:
        # onnx's inliner leaves functions whose opset is not the model's.
        raise RefusedError(
            f"the function {'.'.join(min(left))!r} has ops that opset {opset} lacks, and can't be inlined"
        )
    return proto


def inline_newer_ops(proto: onnx.ModelProto, opset: int, around: Collection[str] = frozenset()) -> onnx.ModelProto:
    """Replace ops that begin after ``opset`` by the function bodies in onnx's schemas, at the model's own opset.

    Args:
        around: names that the new tensors must not have.

    Returns:
        a changed copy.

    Raises:
        RefusedError: onnx fails to write a function body.
    """
    proto = copy_model(proto)
    newer = default_domain_opset(proto)
    names = {*around, *all_names(proto.graph)}
    # The inliner knows the types of the main graph only, so each body is opened as a model.
    for body in body_subgraphs(proto):
        body.put_back(inline_newer_ops(body.model, opset, names))
    for _ in range(_ROUNDS):
        nodes = [n for n in proto.graph.node if _has_body_only(n, newer, opset)]
        if not nodes:
            break
        for node in nodes:
            _state_defaults(node, newer)
        before = {output: n for n in proto.graph.node for output in n.output}
        try:
            proto = _inline_schema_bodies(proto, sorted({n.op_type for n in nodes}))
        except Exception as error:
            # onnx's exceptions share no base class.
            reason = " ".join(str(error).split())[:120]
            unknown = re.search(r"Type unknown for (\S+)", reason)
            if unknown is not None:
                reason = f"onnx does not know the type of {unknown[1]!r}, which it reads"
            raise RefusedError(f"onnx can't write {nodes[0].op_type} as its function body: {reason}") from error
        _rename_clashing(proto.graph, before, around)
        _copy_metadata(proto.graph.node, before)
    return proto


def _rename_clashing(graph: onnx.GraphProto, before: Mapping[str, onnx.NodeProto], around: Collection[str]) -> None:
    """Rename the tensors of inlined bodies that have the name of a tensor of an outer graph."""
    taken = {*around, *all_names(graph)}
    new = {o for n in graph.node for o in n.output} - before.keys()
    names = {name: unique_name(name, taken) for name in sorted(new.intersection(around))}
    for node in graph.node if names else ():
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def _copy_metadata(nodes: Sequence[onnx.NodeProto], before: Mapping[str, onnx.NodeProto]) -> None:
    """Give the nodes of inlined bodies the metadata of the nodes that they replace.

    Args:
        before: name of an output → its node before the inlining.
    """
    inner = {output: node for node in nodes for output in node.output if output not in before}
    for node in reversed(nodes):
        replaced = next((before[o] for o in node.output if o in before), None)
        if replaced is not None and not node.metadata_props:
            node.metadata_props.extend(replaced.metadata_props)
        for writer in (inner[name] for name in node.input if name in inner):
            if not writer.metadata_props:
                writer.metadata_props.extend(node.metadata_props)


def _inline_schema_bodies(proto: onnx.ModelProto, ops: Sequence[str]) -> onnx.ModelProto:
    """Replace standard ops by the function bodies in onnx's schemas.

    The weights become inputs for that: protobuf can't give the inliner more than 2 GB, and the inliner does not see the
    types of initializers.
    """
    skeleton = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions)
    for descriptor, value in proto.graph.ListFields():
        if descriptor.name != "initializer":
            copy_field(skeleton.graph, descriptor, value)
    fed = {i.name for i in proto.graph.input}
    skeleton.graph.input.extend(
        onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims)
        for t in proto.graph.initializer
        if t.name not in fed
    )
    inlined = onnx.inliner.inline_selected_functions(
        skeleton, [("", op) for op in ops], exclude=False, inline_schema_functions=True
    )
    for descriptor in ("node", "value_info"):
        made = list(getattr(inlined.graph, descriptor))
        del getattr(proto.graph, descriptor)[:]
        getattr(proto.graph, descriptor).extend(made)
    return proto


def _has_body_only(node: onnx.NodeProto, newer: int, older: int) -> bool:
    """Return whether the older opset lacks a node's op, and onnx's schema has a function body for it."""
    if not is_standard(node) or node.op_type in ADAPTERS or node.op_type in NORMS:
        return False
    if not has_op(node.op_type, newer):
        return False
    if has_op(node.op_type, older):
        return False
    schema = onnx.defs.get_schema(node.op_type, newer)
    return bool(schema.has_function or schema.has_context_dependent_function)


def _state_defaults(node: onnx.NodeProto, opset: int) -> None:
    """Write the default attributes into a node, because onnx's inliner ignores them."""
    node.domain = ""
    stated = {a.name for a in node.attribute}
    for name, attribute in onnx.defs.get_schema(node.op_type, opset).attributes.items():
        if name not in stated and attribute.default_value.name:
            node.attribute.append(attribute.default_value)
