"""Ops whose function body travels in the file, ours and packages', in a file: which of them are to be believed, and the
functions that go with those that are written.

A function of such a name with another body means what its body says: it is never taken for the op.
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

# the first IR version in which a model may hold functions
_IR_OF_FUNCTIONS = 8

# domain, name
Op = tuple[str, str]


def may_use_function_ops(proto: onnx.ModelProto) -> bool:
    """Whether ``proto`` may have nodes of ours, or has such of a package's."""
    return any(o.domain == DOMAIN for o in proto.opset_import) or bool(_function_op_calls(proto))


def inline_unwanted_functions(proto: onnx.ModelProto, fuse: str) -> onnx.ModelProto:
    """``proto`` ready for the passes: of the functions of our ops and packages' those written out in place that are not
    asked for or not theirs.

    Raises:
        GraphError: a node lacks what the function that it calls asks for.
    """
    if not may_use_function_ops(proto):
        return proto
    ours = {(f.domain, f.name) for f in proto.functions if is_managed_op(f.domain, f.name)}
    others = {(f.domain, f.name) for f in proto.functions if is_managed_op(f.domain, f.name) and not is_own_function(f)}
    calls = _function_op_calls(proto)
    for node in calls:
        if (node.domain, node.op_type) in ours - others and not _is_complete_call(node):
            raise GraphError(f"{_describe_missing(node)}; the file is no valid ONNX, and nothing can run it")
    if fuse == "portable":
        if others:
            return _inline_functions(proto, others, ())
        return proto
    opset = default_domain_opset(proto)
    bodies = _function_bodies(_fully_called_ops(calls), opset, ours)
    closed = ours | {(f.domain, f.name) for f in bodies}
    if closed:
        return _inline_functions(proto, closed, bodies)
    return proto


def attach_functions(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Give ``proto``, in place, the functions of our ops and packages' that it uses, written for ``opset``, and no
    other of them."""
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
    """``proto`` with these of its nodes, calls of ops of ours, as the nodes of their bodies. The calls are changed;
    other nodes that bear the same name stay."""
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
        return _inline_functions(proto, functions.keys(), functions.values())
    return proto


def _function_bodies(ops: Iterable[Op], opset: int, present: Collection[Op] = ()) -> list[onnx.FunctionProto]:
    """The functions of those ops that have one at that opset, but for those ``held`` already."""
    rows = [(op, function_op_row(*op)) for op in sorted({*ops} - {*present})]
    return [norm_function_body(row, opset) for _, row in rows if row is not None and opset >= row.since]


def _function_op_calls(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes of our domain and packages' ops, outside their functions."""
    holders = [proto.graph.node, *(f.node for f in proto.functions if not is_managed_op(f.domain, f.name))]
    return [
        node for holder in holders for node in nodes_with_bodies(holder) if is_managed_op(node.domain, node.op_type)
    ]


def _fully_called_ops(calls: Sequence[onnx.NodeProto]) -> set[Op]:
    """The ops among ``calls`` that get all that they ask for each time: others may bear their names."""
    whole = {(n.domain, n.op_type) for n in calls if _own_op_row(n) is not None}
    return whole - {(n.domain, n.op_type) for n in calls if not _is_complete_call(n)}


def _own_op_row(node: onnx.NodeProto) -> NormOp | None:
    return function_op_row(node.domain, node.op_type)


def _is_complete_call(node: onnx.NodeProto) -> bool:
    return _own_op_row(node) is not None and not _describe_missing(node)


def _describe_missing(node: onnx.NodeProto) -> str:
    """What a node of such an op lacks."""
    row = _own_op_row(node)
    assert row is not None
    given = {a.name: None if a.ref_attr_name else onnx.helper.get_attribute_value(a) for a in node.attribute}
    lacks = describe_missing(row, node.input, given)
    if lacks:
        return f"the node {node.name or node.output[0]!r} ({node.domain}.{node.op_type}) lacks {' and '.join(lacks)}"
    return ""


def is_own_function(function: onnx.FunctionProto) -> bool:
    """Whether a function of the file is the one of the op that bears its name."""
    opset = default_domain_opset(function, 0)
    row = function_op_row(function.domain, function.name)
    if row is None or opset < row.since or function.attribute_proto:
        return False
    return _function_meaning(function) == _function_meaning(norm_function_body(row, opset))


def _function_meaning(function: onnx.FunctionProto) -> list[object]:
    """What a function computes, however a tool that wrote the file again calls its tensors."""
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


def _inline_functions(
    proto: onnx.ModelProto, ops: Collection[Op], bodies: Iterable[onnx.FunctionProto]
) -> onnx.ModelProto:
    """``proto`` with the functions of these ops, its own and ``bodies``, written out in place."""
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
        # the inliner doesn't know of defaults
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
    """A copy whose initializers have their names alone: protobuf can't give the inliner more than 2 GB."""
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
