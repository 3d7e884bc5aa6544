"""This project's own ops in a file: which of them are to be believed, and the functions that go with those that are
written.

A function of one of our names with another body means what its body says: it is never taken for ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count

import onnx
import onnx.inliner

from ..errors import GraphError
from ..storage.protos import copy_field, subgraphs
from .functions import DOMAIN, OPS, VERSION, body, lacking, oldest

_IR_OF_FUNCTIONS = 8  # the first IR version in which a model may hold functions


def imports(proto: onnx.ModelProto) -> bool:
    """Whether ``proto`` may have nodes of our domain."""
    return any(o.domain == DOMAIN for o in proto.opset_import)


def opened(proto: onnx.ModelProto, fuse: str) -> onnx.ModelProto:
    """``proto`` ready for the passes: of the functions in our domain those written out in place that are not asked for
    or not ours.

    Raises:
        GraphError: a node lacks what the function that it calls asks for.
    """
    if not imports(proto):
        return proto
    held = {f.name for f in proto.functions if f.domain == DOMAIN}
    others = {f.name for f in proto.functions if f.domain == DOMAIN and not _ours(f)}
    calls = _calls(proto)
    for node in calls:
        if node.op_type in held - others and not _whole(node):
            raise GraphError(f"{_missing(node)}; the file is no valid ONNX, and nothing can run it")
    if fuse == "portable":
        return _inlined(proto, others, ()) if others else proto
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 1)
    bodies = [body(op, opset) for op in sorted(_complete(calls) - held) if opset >= oldest(op)]
    closed = held | {f.name for f in bodies}
    return _inlined(proto, closed, bodies) if closed else proto


def attach(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Give ``proto``, in place, the functions of our ops that it uses, written for ``opset``, and no other of our
    domain."""
    calls = _calls(proto)
    others = [f for f in proto.functions if f.domain != DOMAIN]
    if calls or len(others) < len(proto.functions):
        own = [body(op, opset) for op in sorted(_complete(calls)) if opset >= oldest(op)]
        del proto.functions[:]
        proto.functions.extend([*others, *own])
        proto.ir_version = max(proto.ir_version, _IR_OF_FUNCTIONS) if own else proto.ir_version
    for holder, needed in (
        (proto, bool(calls)),
        *((f, any(n.domain == DOMAIN for n in _nodes(f.node))) for f in proto.functions),
    ):
        kept = [o for o in holder.opset_import if o.domain != DOMAIN]
        if needed or len(kept) < len(holder.opset_import):
            del holder.opset_import[:]
            holder.opset_import.extend([*kept, *([onnx.helper.make_opsetid(DOMAIN, VERSION)] if needed else [])])
    return proto


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """``nodes``, and those of the bodies in them."""
    for node in nodes:
        yield node
        yield from (inner for graph in subgraphs(node) for inner in graph.node)


def _calls(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes of our domain, outside its functions."""
    holders = [proto.graph.node, *(f.node for f in proto.functions if f.domain != DOMAIN)]
    return [node for held in holders for node in _nodes(held) if node.domain == DOMAIN]


def _complete(calls: Sequence[onnx.NodeProto]) -> set[str]:
    """Our ops among ``calls`` that get all that they ask for each time: others may bear their names."""
    return {n.op_type for n in calls if n.op_type in OPS} - {n.op_type for n in calls if not _whole(n)}


def _whole(node: onnx.NodeProto) -> bool:
    return node.op_type in OPS and not _missing(node)


def _missing(node: onnx.NodeProto) -> str:
    """What a node of ours lacks."""
    given = {a.name: None if a.ref_attr_name else onnx.helper.get_attribute_value(a) for a in node.attribute}
    lacks = lacking(node.op_type, node.input, given)
    return (
        f"the node {node.name or node.output[0]!r} ({DOMAIN}.{node.op_type}) lacks {' and '.join(lacks)}"
        if lacks
        else ""
    )


def _ours(function: onnx.FunctionProto) -> bool:
    opset = next((o.version for o in function.opset_import if o.domain in ("", "ai.onnx")), 0)
    if function.name not in OPS or opset < oldest(function.name) or function.attribute_proto:
        return False
    return _meaning(function) == _meaning(body(function.name, opset))


def _meaning(function: onnx.FunctionProto) -> list[object]:
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


def _inlined(proto: onnx.ModelProto, ops: Collection[str], bodies: Iterable[onnx.FunctionProto]) -> onnx.ModelProto:
    """``proto`` with the functions of our domain of these names, its own and ``bodies``, written out in place."""
    made = {o: n for n in _calls(proto) for o in n.output}
    skeleton = _without_weights(proto)
    skeleton.functions.extend(bodies)
    defaults = {
        (f.name, f.overload): f.attribute_proto for f in skeleton.functions if f.domain == DOMAIN and f.attribute_proto
    }
    for node in _nodes((*skeleton.graph.node, *(n for f in skeleton.functions for n in f.node))) if defaults else ():
        if node.domain == DOMAIN:  # the inliner doesn't know of defaults
            given = {a.name for a in node.attribute}
            node.attribute.extend(a for a in defaults.get((node.op_type, node.overload), ()) if a.name not in given)
    result = onnx.inliner.inline_selected_functions(skeleton, [(DOMAIN, op) for op in sorted(ops)], exclude=False)
    for node in _nodes(result.graph.node):
        call = next((made[o] for o in node.output if o in made), None)
        if call is not None:
            node.metadata_props.extend(call.metadata_props)
    del result.graph.initializer[:]
    result.graph.initializer.extend(proto.graph.initializer)
    return result


def _without_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
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
