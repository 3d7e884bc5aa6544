"""ONNX protobufs: what any reader or writer of them needs, the lowest of all that knows them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import onnx

from ..norms.third_party import is_managed_op

_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def attribute_graphs(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    """The graphs that an attribute holds, mostly none."""
    if attribute.type == onnx.AttributeProto.GRAPH:
        return [attribute.g]
    return list(attribute.graphs)


def iter_subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The bodies of an If, Loop or Scan, and those inside them."""
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs) if attribute.type in _GRAPHS else ():
            yield graph
            for inner in graph.node:
                yield from iter_subgraphs(inner)


def iter_bodies(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """The main graph first, then the functions, each followed by the graphs in its nodes."""
    for outer in (proto.graph, *proto.functions):
        yield outer
        for node in outer.node:
            yield from iter_subgraphs(node)


def nodes_with_bodies(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield each node, and those in its bodies."""
    for node in nodes:
        yield node
        for graph in iter_subgraphs(node):
            yield from graph.node


def attribute_values(node: onnx.NodeProto) -> dict[str, Any]:
    """Return a node's attributes as plain values: numbers, bytes, lists, protobufs of tensors and graphs."""
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def attribute_value(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    """Return one attribute as `attribute_values` does; ``default`` where the node does not state it, or lets the caller
    of its function state it."""
    for attribute in node.attribute:
        if attribute.name == name and not attribute.ref_attr_name:
            return onnx.helper.get_attribute_value(attribute)
    return default


def unique_name(name: str, taken: set[str]) -> str:
    """Return ``name``, with underscores behind it as long as it is one of ``taken``; it is one from now on."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def standard_opset(proto: onnx.ModelProto | onnx.FunctionProto) -> onnx.OperatorSetIdProto | None:
    """The line that says in which opset ONNX's own ops are written; None where there is none."""
    return next((o for o in proto.opset_import if o.domain in ("", "ai.onnx")), None)


def nodes_with_opsets(proto: onnx.ModelProto) -> list[tuple[onnx.NodeProto, int]]:
    """Every node of the graph, its bodies and the file's functions (this project's own are written anew for each
    opset), and the opset that it is written in."""
    listed: list[tuple[onnx.NodeProto, int]] = []
    for holder, nodes in (
        (proto, proto.graph.node),
        *((f, f.node) for f in proto.functions if not is_managed_op(f.domain, f.name)),
    ):
        entry = standard_opset(holder)
        if entry is not None:
            listed += [(n, entry.version) for n in nodes_with_bodies(nodes)]
    return listed


def copy_field(out: onnx.ModelProto, field: Any, value: Any) -> None:
    if isinstance(value, (str, bytes, int, float)):
        setattr(out, field.name, value)
    elif hasattr(value, "extend"):
        getattr(out, field.name).extend(value)
    else:
        getattr(out, field.name).CopyFrom(value)


def copy_model(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy, field by field: a message of more than 2 GB can't be copied as a whole."""
    copy = onnx.ModelProto()
    for field, value in proto.ListFields():
        if field.name != "graph":
            copy_field(copy, field, value)
    for field, value in proto.graph.ListFields():
        copy_field(copy.graph, field, value)
    return copy


def is_meaningless_dim(dim_param: str) -> bool:
    """Whether a dim's name holds no letter, such as "?", "-1" or "*", or is Python's None as text."""
    return bool(dim_param) and (dim_param == "None" or not any(c.isalpha() for c in dim_param))


def required_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """The inputs without a default."""
    initializers = {t.name for t in graph.initializer}
    return [v for v in graph.input if v.name not in initializers]


# domain, name, overload
FunctionKey = tuple[str, str, str]


def function_key(item: onnx.NodeProto | onnx.FunctionProto) -> FunctionKey:
    """Of a function, and of the one that a node calls, if it calls one."""
    return item.domain, item.op_type if isinstance(item, onnx.NodeProto) else item.name, item.overload


def functions_by_key(proto: onnx.ModelProto) -> dict[FunctionKey, onnx.FunctionProto]:
    """The functions that a model defines."""
    return {function_key(f): f for f in proto.functions}


def metadata_text(proto: onnx.ModelProto, key: str) -> str:
    """Return the metadata of a file under ``name``, "" if it has none."""
    return next((p.value for p in proto.metadata_props if p.key == key), "")


def set_metadata(proto: onnx.ModelProto, key: str, value: object) -> None:
    """Let a file say ``value`` of itself, as JSON, in the place of what it said under that name."""
    kept = [p for p in proto.metadata_props if p.key != key]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    proto.metadata_props.add(key=key, value=json.dumps(value, sort_keys=True))
