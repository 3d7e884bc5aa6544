"""Check and write the functions of normdeploy's own ops and of third-party ops with an ONNX function body.

If a function has the name of such an op but another body, it is never treated as that op: only its body defines it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import count

import onnx
import onnx.inliner

from ..errors import GraphError
from ..norms.function_bodies import VERSION, describe_missing, norm_function_body, rename_colliding_inputs
from ..norms.norm_op import DOMAIN, NormOp
from ..norms.third_party import function_op_row, is_managed_op
from ..storage.onnx_domains import default_domain_opset
from ..storage.proto_traversal import copy_field, function_key, nodes_with_bodies

# First IR version in which a model may hold functions.
_IR_OF_FUNCTIONS = 8

# Domain and name.
Op = tuple[str, str]


def may_use_function_ops(proto: onnx.ModelProto) -> bool:
    """Return whether the model may contain normdeploy's own ops, or whether it contains third-party ops with a function
    body.

    Returns: True also if the model imports normdeploy's domain without using it.
    """
    return any(o.domain == DOMAIN for o in proto.opset_import) or bool(_function_op_calls(proto))


def inline_unwanted_functions(proto: onnx.ModelProto, fuse: str) -> onnx.ModelProto:
    """Prepare the model for the passes by inlining functions of normdeploy's own ops and of third-party ops.

    Args:
        fuse: "portable" inlines only functions whose body differs from the body of the op with the same name. Any other
            value inlines all functions of normdeploy's own ops and of third-party ops.

    Returns: a changed copy; ``proto`` itself if nothing is inlined.

    Raises:
        GraphError: a node lacks an input or attribute that the function it calls requires.
    """
    if not may_use_function_ops(proto):
        return proto
    ours = {(f.domain, f.name) for f in proto.functions if is_managed_op(f.domain, f.name)}
    others = {(f.domain, f.name) for f in proto.functions if is_managed_op(f.domain, f.name) and not is_own_function(f)}
    calls = _function_op_calls(proto)
    for node in calls:
        if (node.domain, node.op_type) in ours - others and not _is_complete_call(node):
            raise GraphError(f"{_describe_missing(node)}; the file is not valid ONNX, and no runtime can run it")
    if fuse == "portable":
        if others:
            return inline_functions(proto, others)
        return proto
    opset = default_domain_opset(proto)
    bodies = _function_bodies(_fully_called_ops(calls), opset, ours)
    closed = ours | {(f.domain, f.name) for f in bodies}
    if closed:
        return inline_functions(proto, closed, bodies)
    return proto


def attach_functions(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Write the functions, for ``opset``, of the own ops and third-party ops in use, and remove the functions of unused
    ops.

    Returns: ``proto``, changed in place.
    """
    calls = _function_op_calls(proto)
    others = [f for f in proto.functions if not is_managed_op(f.domain, f.name)]
    if calls or len(others) < len(proto.functions):
        written = [
            rename_colliding_inputs(f, (n for n in calls if (n.domain, n.op_type) == (f.domain, f.name)))
            for f in _function_bodies(_fully_called_ops(calls), opset)
        ]
        del proto.functions[:]
        proto.functions.extend([*others, *written])
        if written:
            proto.ir_version = max(proto.ir_version, _IR_OF_FUNCTIONS)
    for holder, nodes in ((proto, calls), *((f, [*nodes_with_bodies(f.node)]) for f in proto.functions)):
        needed = sorted({n.domain for n in nodes if is_managed_op(n.domain, n.op_type)})
        kept = [o for o in holder.opset_import if o.domain != DOMAIN]
        new = [domain for domain in needed if domain not in {o.domain for o in kept}]
        if new or len(kept) < len(holder.opset_import):
            del holder.opset_import[:]
            holder.opset_import.extend([*kept, *(onnx.helper.make_opsetid(domain, VERSION) for domain in new)])
    return proto


def inline_calls(proto: onnx.ModelProto, calls: Iterable[onnx.NodeProto]) -> onnx.ModelProto:
    """Inline these calls of own ops and third-party ops.

    The calls are renamed in place first, so other nodes of the same op stay.

    Returns: a changed copy; ``proto`` itself if no call has a body at its opset.
    """
    opset = default_domain_opset(proto)
    functions = dict[Op, onnx.FunctionProto]()
    for node in calls:
        row = function_op_row(node.domain, node.op_type)
        if row is None or opset < row.since:
            continue
        function = onnx.FunctionProto()
        function.CopyFrom(norm_function_body(row, opset))
        function.name = node.op_type = f"{row.op}WrittenOut"
        functions[function.domain, function.name] = function
    if functions:
        return inline_functions(proto, functions.keys(), functions.values())
    return proto


def _function_bodies(ops: Iterable[Op], opset: int, present: Collection[Op] = ()) -> list[onnx.FunctionProto]:
    """Return a function for each of ``ops`` that has a body at this opset and no function in ``present`` yet."""
    rows = [(op, function_op_row(*op)) for op in sorted({*ops} - {*present})]
    return [norm_function_body(row, opset) for _, row in rows if row is not None and opset >= row.since]


def _function_op_calls(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    """List the nodes of own ops, and of third-party ops with a function body. Nodes inside functions of these ops are
    left out.
    """
    holders = [proto.graph.node, *(f.node for f in proto.functions if not is_managed_op(f.domain, f.name))]
    return [
        node for holder in holders for node in nodes_with_bodies(holder) if is_managed_op(node.domain, node.op_type)
    ]


def _fully_called_ops(calls: Sequence[onnx.NodeProto]) -> set[Op]:
    """Return the ops whose calls are all complete. Nodes of other ops may share the name by accident."""
    whole = {(n.domain, n.op_type) for n in calls if _own_op_row(n) is not None}
    return whole - {(n.domain, n.op_type) for n in calls if not _is_complete_call(n)}


def _own_op_row(node: onnx.NodeProto) -> NormOp | None:
    return function_op_row(node.domain, node.op_type)


def _is_complete_call(node: onnx.NodeProto) -> bool:
    return _own_op_row(node) is not None and not _describe_missing(node)


def _describe_missing(node: onnx.NodeProto) -> str:
    """Describe the inputs and attributes that a call lacks; "" if it is complete."""
    row = _own_op_row(node)
    assert row is not None
    given = {a.name: None if a.ref_attr_name else onnx.helper.get_attribute_value(a) for a in node.attribute}
    lacks = describe_missing(row, node.input, given)
    if lacks:
        return f"node {node.name or node.output[0]!r} ({node.domain}.{node.op_type}) lacks {' and '.join(lacks)}"
    return ""


def is_own_function(function: onnx.FunctionProto) -> bool:
    """Return whether a function of the file has the body of the op with its name.

    Returns: False for functions of other ops, too.
    """
    opset = default_domain_opset(function, 0)
    row = function_op_row(function.domain, function.name)
    if row is None or opset < row.since or function.attribute_proto:
        return False
    return _function_meaning(function) == _function_meaning(norm_function_body(row, opset))


def _function_meaning(function: onnx.FunctionProto) -> list[object]:
    """Describe the computation of a function independently of its tensors' names, which tools may change."""
    counter = count()
    numbers = dict(zip(function.input, counter, strict=False))
    steps: list[object] = [len(function.input), sorted(function.attribute)]
    for node in function.node:
        attributes = sorted(
            (a.name, a.ref_attr_name or repr(onnx.helper.get_attribute_value(a))) for a in node.attribute
        )
        read = [numbers.get(i) for i in node.input]
        numbers.update(zip(node.output, counter, strict=False))
        steps.append((node.domain.replace("ai.onnx", ""), node.op_type, read, attributes))
    return [*steps, [numbers.get(o) for o in function.output]]


def inline_functions(
    proto: onnx.ModelProto, ops: Collection[Op], bodies: Iterable[onnx.FunctionProto] = ()
) -> onnx.ModelProto:
    """Inline the calls of ``ops``, from the functions of the model and from ``bodies``.

    Returns: a changed copy.
    """
    made = {o: n for n in _function_op_calls(proto) for o in n.output}
    skeleton = _copy_without_weights(proto)
    skeleton.functions.extend(bodies)
    defaults = {
        function_key(f): f.attribute_proto
        for f in skeleton.functions
        if is_managed_op(f.domain, f.name) and f.attribute_proto
    }
    for node in (
        nodes_with_bodies((*skeleton.graph.node, *(n for f in skeleton.functions for n in f.node))) if defaults else ()
    ):
        # The inliner ignores default attributes.
        if is_managed_op(node.domain, node.op_type):
            given = {a.name for a in node.attribute}
            default = defaults.get(function_key(node), ())
            node.attribute.extend(a for a in default if a.name not in given)
    result = onnx.inliner.inline_selected_functions(skeleton, sorted(ops), exclude=False)
    for node in nodes_with_bodies(result.graph.node):
        call = next((made[o] for o in node.output if o in made), None)
        if call is not None:
            node.metadata_props.extend(call.metadata_props)
    del result.graph.initializer[:]
    result.graph.initializer.extend(proto.graph.initializer)
    return result


def _copy_without_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Copy the model without the data of its initializers: protobuf can't give the inliner more than 2 GB."""
    copy = onnx.ModelProto()
    for field, value in proto.ListFields():
        if field.name != "graph":
            copy_field(copy, field, value)
    for field, value in proto.graph.ListFields():
        if field.name != "initializer":
            copy_field(copy.graph, field, value)
    copy.graph.initializer.extend(
        onnx.TensorProto(name=t.name, data_type=t.data_type, dims=[0]) for t in proto.graph.initializer
    )
    return copy
