"""Traverse, query and copy ONNX protobufs. This is the lowest layer that handles them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import onnx

from ..norms.third_party import is_managed_op

_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def attribute_graphs(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    """Return the graphs that an attribute contains.

    Returns:
        the graphs of a GRAPH or GRAPHS attribute; empty for most attributes.
    """
    if attribute.type == onnx.AttributeProto.GRAPH:
        return [attribute.g]
    return list(attribute.graphs)


def iter_subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the bodies of an If, Loop or Scan, and the bodies inside them."""
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs) if attribute.type in _GRAPHS else ():
            yield graph
            for inner in graph.node:
                yield from iter_subgraphs(inner)


def iter_bodies(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """Yield the main graph, then the functions, each followed by the graphs in its nodes."""
    for outer in (proto.graph, *proto.functions):
        yield outer
        for node in outer.node:
            yield from iter_subgraphs(node)


def nodes_with_bodies(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield each node of ``nodes``, and the nodes in its bodies."""
    for node in nodes:
        yield node
        for graph in iter_subgraphs(node):
            yield from graph.node


def attribute_values(node: onnx.NodeProto) -> dict[str, Any]:
    """Return a node's attributes as plain values.

    Returns:
        name → value: a number, bytes, a list, or the protobuf of a tensor or graph.
    """
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def attribute_value(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    """Return one attribute as `attribute_values` does.

    Returns:
        the value; ``default`` if the node does not have the attribute, or if its value comes from the call of the
        function that contains the node.
    """
    for attribute in node.attribute:
        if attribute.name == name and not attribute.ref_attr_name:
            return onnx.helper.get_attribute_value(attribute)
    return default


def unique_name(name: str, taken: set[str]) -> str:
    """Append underscores to ``name`` until it is not in ``taken``, and add it to ``taken``.

    Returns:
        the new name.
    """
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def standard_opset(proto: onnx.ModelProto | onnx.FunctionProto) -> onnx.OperatorSetIdProto | None:
    """Return the opset entry of ONNX's own domain.

    Returns:
        the entry itself, which can be changed; None if the model does not import that domain.
    """
    return next((o for o in proto.opset_import if o.domain in ("", "ai.onnx")), None)


def nodes_with_opsets(proto: onnx.ModelProto) -> list[tuple[onnx.NodeProto, int]]:
    """List every node of the graph, its bodies and the file's functions, with the opset that applies to it.

    Functions of normdeploy's own ops are left out, because they are written anew for each opset.

    Returns:
        pairs (node, opset of ONNX's own domain).
    """
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
    """Copy the value of one protobuf field into ``out``."""
    if isinstance(value, (str, bytes, int, float)):
        setattr(out, field.name, value)
    elif hasattr(value, "extend"):
        getattr(out, field.name).extend(value)
    else:
        getattr(out, field.name).CopyFrom(value)


def copy_model(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Copy a model field by field, because a message of more than 2 GB can't be copied as a whole.

    Returns:
        a copy that shares nothing with ``proto``.
    """
    copy = onnx.ModelProto()
    for field, value in proto.ListFields():
        if field.name != "graph":
            copy_field(copy, field, value)
    for field, value in proto.graph.ListFields():
        copy_field(copy.graph, field, value)
    return copy


def is_meaningless_dim(dim_param: str) -> bool:
    """Return True for a dim's name without a letter, such as "?", "-1" or "*", and for the text "None".

    Returns:
        False for a name with a letter and for "", which means that the dim has no name.
    """
    return bool(dim_param) and (dim_param == "None" or not any(c.isalpha() for c in dim_param))


def required_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the graph inputs without a default value.

    Returns:
        the inputs without an initializer of the same name.
    """
    initializers = {t.name for t in graph.initializer}
    return [v for v in graph.input if v.name not in initializers]


# Key of a function: domain, name, overload.
FunctionKey = tuple[str, str, str]


def function_key(item: onnx.NodeProto | onnx.FunctionProto) -> FunctionKey:
    """Return the key of a function, or of the function that a node may call.

    Returns:
        (domain, name, overload).
    """
    return item.domain, item.op_type if isinstance(item, onnx.NodeProto) else item.name, item.overload


def functions_by_key(proto: onnx.ModelProto) -> dict[FunctionKey, onnx.FunctionProto]:
    """Index the functions that a model defines.

    Returns:
        `function_key` → function.
    """
    return {function_key(f): f for f in proto.functions}


def metadata_text(proto: onnx.ModelProto, key: str) -> str:
    """Return the metadata value that a file stores under ``key``.

    Returns:
        the text; "" if the file has no such key.
    """
    return next((p.value for p in proto.metadata_props if p.key == key), "")


def set_metadata(proto: onnx.ModelProto, key: str, value: object) -> None:
    """Store ``value`` as JSON in a file's metadata under ``key``, replacing any earlier value."""
    kept = [p for p in proto.metadata_props if p.key != key]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    proto.metadata_props.add(key=key, value=json.dumps(value, sort_keys=True))
