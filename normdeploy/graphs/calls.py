"""Ops whose function body travels in the file, ours and packages', in a file: which of them are to be believed, and the
functions that go with those that are written.

A function of such a name with another body means what its body says: it is never taken for the op.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count

import onnx
import onnx.inliner

from ..domains import default_opset
from ..errors import GraphError
from ..norms.bodies import VERSION, apart_from, body, lacking
from ..norms.guests import belongs, own
from ..norms.op import DOMAIN, NormOp
from ..storage.protos import copy_field, subgraphs

_IR_OF_FUNCTIONS = 8  # the first IR version in which a model may hold functions

Op = tuple[str, str]  # domain, name


def imports(proto: onnx.ModelProto) -> bool:
    """Whether ``proto`` may have nodes of ours, or has such of a package's."""
    return any(o.domain == DOMAIN for o in proto.opset_import) or bool(_calls(proto))


def opened(proto: onnx.ModelProto, fuse: str) -> onnx.ModelProto:
    """``proto`` ready for the passes: of the functions of our ops and packages' those written out in place that are not
    asked for or not theirs.

    Raises:
        GraphError: a node lacks what the function that it calls asks for.
    """
    if not imports(proto):
        return proto
    ours = {(f.domain, f.name) for f in proto.functions if belongs(f.domain, f.name)}
    others = {(f.domain, f.name) for f in proto.functions if belongs(f.domain, f.name) and not _meant(f)}
    calls = _calls(proto)
    for node in calls:
        if (node.domain, node.op_type) in ours - others and not _whole(node):
            raise GraphError(f"{_missing(node)}; the file is no valid ONNX, and nothing can run it")
    if fuse == "portable":
        return _inlined(proto, others, ()) if others else proto
    opset = default_opset(proto)
    bodies = _bodies(_complete(calls), opset, ours)
    closed = ours | {(f.domain, f.name) for f in bodies}
    return _inlined(proto, closed, bodies) if closed else proto


def attach(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Give ``proto``, in place, the functions of our ops and packages' that it uses, written for ``opset``, and no
    other of them."""
    calls = _calls(proto)
    others = [f for f in proto.functions if not belongs(f.domain, f.name)]
    if calls or len(others) < len(proto.functions):
        written = [
            apart_from(f, (n for n in calls if (n.domain, n.op_type) == (f.domain, f.name)))
            for f in _bodies(_complete(calls), opset)
        ]
        del proto.functions[:]
        proto.functions.extend([*others, *written])
        proto.ir_version = max(proto.ir_version, _IR_OF_FUNCTIONS) if written else proto.ir_version
    for holder, nodes in ((proto, calls), *((f, [*_nodes(f.node)]) for f in proto.functions)):
        needed = sorted({n.domain for n in nodes if belongs(n.domain, n.op_type)})
        kept = [o for o in holder.opset_import if o.domain != DOMAIN]
        new = [domain for domain in needed if domain not in {o.domain for o in kept}]
        if new or len(kept) < len(holder.opset_import):
            del holder.opset_import[:]
            holder.opset_import.extend([*kept, *(onnx.helper.make_opsetid(domain, VERSION) for domain in new)])
    return proto


def written_out(proto: onnx.ModelProto, calls: Iterable[onnx.NodeProto]) -> onnx.ModelProto:
    """``proto`` with these of its nodes, calls of ops of ours, as the nodes of their bodies. The calls are changed;
    other nodes that bear the same name stay."""
    opset, functions = default_opset(proto), dict[Op, onnx.FunctionProto]()
    for node in calls:
        row = own(node.domain, node.op_type)
        if row is None or opset < row.since:
            continue
        function = onnx.FunctionProto()
        function.CopyFrom(body(row, opset))
        function.name = node.op_type = f"{row.op}WrittenOut"
        functions[function.domain, function.name] = function
    return _inlined(proto, functions.keys(), functions.values()) if functions else proto


def _bodies(ops: Iterable[Op], opset: int, present: Collection[Op] = ()) -> list[onnx.FunctionProto]:
    """The functions of those ops that have one at that opset, but for those ``held`` already."""
    rows = [(op, own(*op)) for op in sorted({*ops} - {*present})]
    return [body(row, opset) for _, row in rows if row is not None and opset >= row.since]


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """``nodes``, and those of the bodies in them."""
    for node in nodes:
        yield node
        yield from (inner for graph in subgraphs(node) for inner in graph.node)


def _calls(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes of our domain and packages' ops, outside their functions."""
    holders = [proto.graph.node, *(f.node for f in proto.functions if not belongs(f.domain, f.name))]
    return [node for holder in holders for node in _nodes(holder) if belongs(node.domain, node.op_type)]


def _complete(calls: Sequence[onnx.NodeProto]) -> set[Op]:
    """The ops among ``calls`` that get all that they ask for each time: others may bear their names."""
    whole = {(n.domain, n.op_type) for n in calls if _row(n) is not None}
    return whole - {(n.domain, n.op_type) for n in calls if not _whole(n)}


def _row(node: onnx.NodeProto) -> NormOp | None:
    return own(node.domain, node.op_type)


def _whole(node: onnx.NodeProto) -> bool:
    return _row(node) is not None and not _missing(node)


def _missing(node: onnx.NodeProto) -> str:
    """What a node of such an op lacks."""
    row = _row(node)
    assert row is not None
    given = {a.name: None if a.ref_attr_name else onnx.helper.get_attribute_value(a) for a in node.attribute}
    lacks = lacking(row, node.input, given)
    return (
        f"the node {node.name or node.output[0]!r} ({node.domain}.{node.op_type}) lacks {' and '.join(lacks)}"
        if lacks
        else ""
    )


def _meant(function: onnx.FunctionProto) -> bool:
    """Whether a function of the file is the one of the op that bears its name."""
    opset = default_opset(function, 0)
    row = own(function.domain, function.name)
    if row is None or opset < row.since or function.attribute_proto:
        return False
    return _meaning(function) == _meaning(body(row, opset))


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


def _inlined(proto: onnx.ModelProto, ops: Collection[Op], bodies: Iterable[onnx.FunctionProto]) -> onnx.ModelProto:
    """``proto`` with the functions of these ops, its own and ``bodies``, written out in place."""
    made = {o: n for n in _calls(proto) for o in n.output}
    skeleton = _without_weights(proto)
    skeleton.functions.extend(bodies)
    defaults = {
        (f.domain, f.name, f.overload): f.attribute_proto
        for f in skeleton.functions
        if belongs(f.domain, f.name) and f.attribute_proto
    }
    for node in _nodes((*skeleton.graph.node, *(n for f in skeleton.functions for n in f.node))) if defaults else ():
        if belongs(node.domain, node.op_type):  # the inliner doesn't know of defaults
            given, default = (
                {a.name for a in node.attribute},
                defaults.get((node.domain, node.op_type, node.overload), ()),
            )
            node.attribute.extend(a for a in default if a.name not in given)
    result = onnx.inliner.inline_selected_functions(skeleton, sorted(ops), exclude=False)
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
